"""Giving a lock back: once, twice, by somebody else, too late; and the end of ``with``."""

from __future__ import annotations

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


async def _lost_lease(driver: FaceDriver, client: aio.Client, name: str) -> aio.Lease:
    lease = await client.lock(name, ttl=driver.timing.short, renew=False).acquire(20)
    assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
    return lease


class Releasing(Cases):
    """Release and the end of ``with``."""

    backend_part = (
        "`release`: in one atomic step, the server compares the whole owner and frees the lock. For any other owner "
        "it changes nothing and returns False."
    )

    @case()
    async def test_release_frees_the_lock(self, driver: FaceDriver) -> None:
        """It can be had again at once, by anybody."""
        client, other, lease = await driver.held()

        await lease.release()

        assert not lease.held
        assert not lease.lost
        assert await client.holders(lease.name) == []
        await driver.pass_through(other, lease.name)

    @case()
    async def test_releasing_twice_is_no_error(self, driver: FaceDriver) -> None:
        """And the second time frees nobody else's lock."""
        _, other, lease = await driver.held()
        await lease.release()
        after = await other.lock(lease.name, ttl=driver.timing.long).acquire(20)

        await lease.release()

        assert await after.confirm()
        await after.release()

    @case()
    async def test_release_after_expiry_raises(self, driver: FaceDriver) -> None:
        """The client knows it by its clock."""
        client = await driver.connect()
        lease = await _lost_lease(driver, client, driver.name())

        with pytest.raises(lockkit.LockLost) as caught:
            await lease.release()

        assert (caught.value.name, caught.value.backend) == (lease.name, client.url)

    @case()
    async def test_lease_can_be_released_by_another_actor(self, driver: FaceDriver) -> None:
        """Ownership belongs to the lease: it may be handed to another thread or task."""
        client = await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        async def take_over(lease: aio.Lease) -> None:
            lease.check()
            await lease.release()

        await driver.spawn(take_over(lease)).result()

        assert not lease.held
        assert await client.holders(name) == []

    @case()
    async def test_lock_object_shared_by_two_keeps_their_leases_apart(self, driver: FaceDriver) -> None:
        """Two blocks of one lock object: leaving the first does not free the second."""
        client = await driver.connect()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long, timeout=20)
        inside, leave = driver.signal(), driver.signal()

        async def second() -> None:
            async with lock as lease:
                inside.set()
                await leave.wait()
                assert await lease.confirm()

        async with lock as first:
            actor = driver.spawn(second())
            await driver.until_waiting(client, name)
        await inside.wait()
        await first.release()

        assert await driver.answered(lock.try_acquire) is None
        leave.set()
        await actor.result()
        assert await client.holders(name) == []
