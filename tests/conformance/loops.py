"""One asyncio client in several event loops, one after the other: as of a worker that runs each job in one."""

from __future__ import annotations

import asyncio

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class EventLoops(Cases):
    """Each loop runs its own connections, and its leases end with it."""

    @case(faces=["asyncio"])
    async def test_client_works_in_one_loop_after_another(self, driver: FaceDriver) -> None:
        """Also when leases of the loop before were neither released nor lost; those are lost then."""
        target, name = driver.target, driver.name()
        shared = lockkit.aio.connect(target.url, **target.options)
        tokens: list[int] = []
        left: list[lockkit.aio.Lease] = []

        async def job(*, release: bool) -> None:
            # The loop before frees its leases when it ends, or the server does at their ttl.
            lease = await shared.lock(name, ttl=driver.timing.short).acquire(PATIENCE)
            tokens.append(lease.token)
            if release:
                await lease.release()
            else:
                left.append(lease)

        async def last() -> None:
            with pytest.raises(lockkit.LockLost):
                left[0].check()
            left.append(await shared.lock(f"{name}:2", ttl=driver.timing.long).acquire(PATIENCE))
            await shared.close()

        for release in (True, False, True, True):
            await driver.call(asyncio.run, job(release=release))
        await driver.call(asyncio.run, last())

        assert tokens == sorted(set(tokens))
