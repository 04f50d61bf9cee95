"""The same thread or task again, with ``reentrant=True``."""

from __future__ import annotations

from contextlib import suppress

import pytest

import lockkit
from lockkit.testing.conformance.base import Cases, Stage, case
from lockkit.testing.face_driver import PATIENCE


class Reentrancy(Cases):
    """Counted leases, per thread or task."""

    @case()
    async def test_same_actor_gets_the_same_lease_again(self, stage: Stage) -> None:
        """Counted, with its token unchanged; the last release frees."""
        client = await stage.connect()
        name = stage.name()
        lock = client.lock(name, ttl=stage.timing.long, reentrant=True)

        async with lock as first:
            async with lock as second, client.lock(name, ttl=stage.timing.long, reentrant=True) as third:
                assert first == second == third
                token = third.token
            first.check()
            assert first.token == token
            assert await first.confirm()

        assert not first.held
        assert await client.holders(name) == []

    @case()
    async def test_other_actor_waits(self, stage: Stage) -> None:
        """Reentrancy is for the one who holds, not for the whole client."""
        client = await stage.connect()
        name = stage.name()
        lock = client.lock(name, ttl=stage.timing.long, reentrant=True)

        async with lock, lock:
            assert await stage.spawn(lock.try_acquire()).result() is None
            waiting = stage.spawn(lock.acquire())
            await stage.until_waiting(client, name)

        await (await waiting.result()).release()
        assert await client.holders(name) == []

    @case()
    async def test_plain_lock_of_that_name_is_refused(self, stage: Stage) -> None:
        """Both acquisitions must ask for reentrancy."""
        client = await stage.connect()
        name = stage.name()

        async with client.lock(name, ttl=stage.timing.long, reentrant=True):
            assert await client.lock(name, ttl=stage.timing.long).try_acquire() is None
        async with client.lock(name, ttl=stage.timing.long):
            assert await client.lock(name, ttl=stage.timing.long, reentrant=True).try_acquire() is None

    @case()
    async def test_other_client_of_the_same_actor_is_refused(self, stage: Stage) -> None:
        """The lease belongs to one client."""
        client, other = await stage.connect(), await stage.connect()
        name = stage.name()

        async with client.lock(name, ttl=stage.timing.long, reentrant=True):
            assert await other.lock(name, ttl=stage.timing.long, reentrant=True).try_acquire() is None

    @case()
    async def test_lost_lease_is_not_entered_again(self, stage: Stage) -> None:
        """The inner block would rely on what the outer one lost; once that is released, a fresh lease can be had."""
        client = await stage.connect()
        lock = client.lock(stage.name(), ttl=stage.timing.short, renew=False, reentrant=True)
        lease = await lock.acquire(20)
        while lease.remaining() > 0:
            await stage.sleep(0.01)

        with pytest.raises(lockkit.LockLost):
            await lock.acquire(0)
        with pytest.raises(lockkit.LockLost):
            await lease.release()

        again = await lock.acquire(stage.timing.beyond(lease.ttl))
        assert again.token > lease.token
        with suppress(lockkit.LockLost):  # it is as short as the first
            await again.release()

    @case()
    async def test_released_as_often_as_acquired_and_no_oftener(self, stage: Stage) -> None:
        """A further release is as harmless as that of any lease."""
        client = await stage.connect()
        name = stage.name()
        lock = client.lock(name, ttl=stage.timing.long, reentrant=True)
        lease = await lock.acquire(PATIENCE)
        await lock.acquire(0)

        await lease.release()
        assert await lease.confirm()
        await lease.release()
        assert await client.holders(name) == []
        await lease.release()

        async with lock as after:
            assert after.token > lease.token
