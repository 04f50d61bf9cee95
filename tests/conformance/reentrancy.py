"""The same thread or task again, with ``reentrant=True``."""

from __future__ import annotations

from contextlib import suppress

import pytest

import lockkit
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class Reentrancy(Cases):
    """Counted leases, per thread or task."""

    @case()
    async def test_same_actor_gets_the_same_lease_again(self, driver: FaceDriver) -> None:
        """Counted, with its token unchanged; the last release frees."""
        client = await driver.connect()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long, reentrant=True)

        async with lock as first:
            async with lock as second, client.lock(name, ttl=driver.timing.long, reentrant=True) as third:
                assert first == second == third
                token = third.token
            first.check()
            assert first.token == token
            assert await first.confirm()

        assert not first.held
        assert await client.holders(name) == []

    @case()
    async def test_other_actor_waits(self, driver: FaceDriver) -> None:
        """Reentrancy is for the one who holds, not for the whole client."""
        client = await driver.connect()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long, reentrant=True)

        async with lock, lock:
            assert await driver.spawn(driver.answered(lock.try_acquire)).result() is None
            waiting = driver.spawn(lock.acquire())
            await driver.until_waiting(client, name)

        await (await waiting.result()).release()
        assert await client.holders(name) == []

    @case()
    async def test_plain_lock_of_that_name_is_refused(self, driver: FaceDriver) -> None:
        """Both acquisitions must ask for reentrancy."""
        client = await driver.connect()
        name = driver.name()

        async with client.lock(name, ttl=driver.timing.long, reentrant=True):
            assert await driver.answered(client.lock(name, ttl=driver.timing.long).try_acquire) is None
        async with client.lock(name, ttl=driver.timing.long):
            assert await driver.answered(client.lock(name, ttl=driver.timing.long, reentrant=True).try_acquire) is None

    @case()
    async def test_other_client_of_the_same_actor_is_refused(self, driver: FaceDriver) -> None:
        """The lease belongs to one client."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()

        async with client.lock(name, ttl=driver.timing.long, reentrant=True):
            assert await driver.answered(other.lock(name, ttl=driver.timing.long, reentrant=True).try_acquire) is None

    @case()
    async def test_lost_lease_is_not_entered_again(self, driver: FaceDriver) -> None:
        """The inner block would rely on what the outer one lost; once that is released, a fresh lease can be had."""
        client = await driver.connect()
        lock = client.lock(driver.name(), ttl=driver.timing.short, renew=False, reentrant=True)
        lease = await lock.acquire(20)
        while lease.remaining() > 0:
            await driver.sleep(0.01)

        with pytest.raises(lockkit.LockLost):
            await lock.acquire(0)
        with pytest.raises(lockkit.LockLost):
            await lease.release()

        again = await lock.acquire(driver.timing.beyond(lease.ttl))
        assert again.token > lease.token
        with suppress(lockkit.LockLost):  # it is as short as the first
            await again.release()

    @case()
    async def test_released_as_often_as_acquired_and_no_oftener(self, driver: FaceDriver) -> None:
        """A further release is as harmless as that of any lease."""
        client = await driver.connect()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long, reentrant=True)
        lease = await lock.acquire(PATIENCE)
        await lock.acquire(0)

        await lease.release()
        assert await lease.confirm()
        await lease.release()
        assert await client.holders(name) == []
        await lease.release()

        async with lock as after:
            assert after.token > lease.token
