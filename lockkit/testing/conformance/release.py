"""Giving a lock back: once, twice, by somebody else, too late; and the end of ``with``."""

from __future__ import annotations

import logging

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class _Stopped(BaseException):
    """Derives from BaseException alone, as KeyboardInterrupt and SystemExit do."""


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
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        await lease.release()

        assert not lease.held
        assert not lease.lost
        assert await client.holders(name) == []
        async with other.lock(name, ttl=driver.timing.long, timeout=20):
            pass

    @case()
    async def test_releasing_twice_is_no_error(self, driver: FaceDriver) -> None:
        """And the second time frees nobody else's lock."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        await lease.release()
        after = await other.lock(name, ttl=driver.timing.long).acquire(20)

        await lease.release()

        assert await after.confirm()
        await after.release()

    @case()
    async def test_released_lease_is_not_held(self, driver: FaceDriver) -> None:
        """Work that checks its lease after the release gets LockLost."""
        client = await driver.connect()
        lease = await client.lock(driver.name(), ttl=driver.timing.long).acquire(PATIENCE)
        await lease.release()

        with pytest.raises(lockkit.LockLost, match="released"):
            lease.check()
        assert not await lease.confirm()
        assert not await lease.wait_lost(0)

    @case()
    async def test_release_after_expiry_raises_and_leaves_the_next_holder_alone(self, driver: FaceDriver) -> None:
        """The release of a lost lease frees nothing, least of all the lock of the next holder."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await _lost_lease(driver, client, name)
        after = await other.lock(name, ttl=driver.timing.long).acquire(20)

        with pytest.raises(lockkit.LockLost) as caught:
            await lease.release()

        assert caught.value.name == name
        assert caught.value.backend == client.url
        assert await after.confirm()
        assert await driver.answered(client.lock(name, ttl=driver.timing.long).try_acquire) is None
        await after.release()

    @case()
    async def test_release_of_a_broken_lease_leaves_the_next_holder_alone(self, driver: FaceDriver) -> None:
        """The owner is compared at the backend: by its own clock the old holder still believes."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        assert await other.break_lock(name)
        after = await other.lock(name, ttl=driver.timing.long).acquire(20)

        with pytest.raises(lockkit.LockLost):
            await lease.release()

        assert await after.confirm()
        await after.release()

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

    @case()
    async def test_lease_is_a_context_manager(self, driver: FaceDriver) -> None:
        """Leaving the block of a lease releases it."""
        client = await driver.connect()
        name = driver.name()

        async with await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) as lease:
            lease.check()

        assert not lease.held
        assert await client.holders(name) == []

    @case()
    async def test_lease_is_true(self, driver: FaceDriver) -> None:
        """Also when it was released: a lease is never a way to say no."""
        client = await driver.connect()
        lease = await client.lock(driver.name(), ttl=driver.timing.long).acquire(PATIENCE)
        assert lease
        await lease.release()
        assert lease


class Blocks(Cases):
    """What leaving ``with`` does."""

    backend_part = "`release`, which the engine calls however a block ends."

    @case()
    async def test_exception_of_the_body_goes_on_unchanged(self, driver: FaceDriver) -> None:
        """And the lock is free."""
        client = await driver.connect()
        name = driver.name()
        error = ValueError("the body's own")

        with pytest.raises(ValueError, match="the body's own") as caught:
            async with client.lock(name, ttl=driver.timing.long):
                raise error

        assert caught.value is error
        assert not hasattr(error, "__notes__")
        assert await client.holders(name) == []

    @case()
    async def test_exception_of_the_body_is_not_hidden_by_a_loss(self, driver: FaceDriver) -> None:
        """The loss is a note on it."""
        client = await driver.connect()
        error = ValueError("the body's own")

        with pytest.raises(ValueError, match="the body's own") as caught:  # noqa: PT012 - the body is the point
            async with client.lock(driver.name(), ttl=driver.timing.short, renew=False) as lease:
                assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
                raise error

        assert caught.value is error
        assert any("lost" in note for note in error.__notes__)

    @case()
    async def test_leaving_after_a_loss_raises(self, driver: FaceDriver) -> None:
        """The work was not protected to its end."""
        client = await driver.connect()

        with pytest.raises(lockkit.LockLost):
            async with client.lock(driver.name(), ttl=driver.timing.short, renew=False) as lease:
                assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

    @case()
    async def test_leaving_after_a_loss_is_only_logged_on_request(
        self, driver: FaceDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With raise_on_lost=False."""
        client = await driver.connect()
        name = driver.name()

        with caplog.at_level(logging.WARNING, "lockkit"):
            async with client.lock(name, ttl=driver.timing.short, renew=False, raise_on_lost=False) as lease:
                assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
            # The holder is notified first, so a log that is slow delays nobody.
            await driver.eventually(lambda: any(name in one.getMessage() for one in caplog.records), "the message")

    @case()
    async def test_lock_is_released_on_every_base_exception(self, driver: FaceDriver) -> None:
        """Not only on Exception."""
        client = await driver.connect()
        name = driver.name()

        with pytest.raises(_Stopped):
            async with client.lock(name, ttl=driver.timing.long):
                raise _Stopped

        assert await client.holders(name) == []

    @case()
    async def test_block_whose_lease_was_released_inside_ends_quietly(self, driver: FaceDriver) -> None:
        """Releasing early is no error."""
        client = await driver.connect()
        name = driver.name()

        async with client.lock(name, ttl=driver.timing.long) as lease:
            await lease.release()

        assert await client.holders(name) == []
