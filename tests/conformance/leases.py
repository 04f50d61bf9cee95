"""What a lease and its block do by themselves: who is notified of a loss, and what leaving ``with`` makes of it."""

from __future__ import annotations

import asyncio
import logging

import pytest

import lockkit
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class _Stopped(BaseException):
    """Derives from BaseException alone, as KeyboardInterrupt and SystemExit do."""


class Losses(Cases):
    """A lease that ends before its holder wanted."""

    @case()
    async def test_callbacks_are_called_once_each(self, driver: FaceDriver) -> None:
        """Of the lock and of the lease, also one registered after the loss; a release is no loss, and calls none."""
        client = await driver.connect()
        calls: list[tuple[str, int, str]] = []
        lock = client.lock(
            driver.name(),
            ttl=driver.timing.short,
            renew=False,
            on_lost=lambda lease, reason: calls.append(("lock", lease.token, reason)),
        )
        async with lock:
            pass
        lease = await lock.acquire(PATIENCE)
        lease.on_lost(lambda lease, reason: calls.append(("lease", lease.token, reason)))
        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
        lease.on_lost(lambda lease, reason: calls.append(("late", lease.token, reason)))
        with pytest.raises(lockkit.LockLost):
            lease.check()
        with pytest.raises(lockkit.LockLost):
            await lease.release()

        await driver.eventually(lambda: len(calls) >= 3, "three callbacks")
        await client.close()

        assert sorted(calls) == [(who, lease.token, "expired") for who in ("late", "lease", "lock")]

    @case()
    async def test_exception_of_a_callback_is_contained(
        self, driver: FaceDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and neither the other callbacks nor later losses suffer."""
        client = await driver.connect()
        calls: list[str] = []

        def fail(*_: object) -> None:
            raise ValueError("from the callback")

        for _ in range(2):
            lease = await client.lock(driver.name(), ttl=driver.timing.short, renew=False, on_lost=fail).acquire(20)
            lease.on_lost(lambda _, reason: calls.append(reason))
            assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        await driver.eventually(lambda: len(calls) == 2, "the second callback, twice")
        await driver.eventually(lambda: "from the callback" in caplog.text, "a log record")

    @case(faces=["asyncio"])
    async def test_callback_may_be_a_coroutine_function(self, driver: FaceDriver) -> None:
        """It is awaited."""
        client = await driver.connect()
        told = driver.signal()

        async def on_lost(*_: object) -> None:
            await asyncio.sleep(0)
            told.set()

        lease = await client.lock(driver.name(), ttl=driver.timing.short, renew=False, on_lost=on_lost).acquire(20)

        await told.wait()
        assert lease.lost

    @case()
    async def test_wait_lost_wakes_on_loss_release_and_timeout(self, driver: FaceDriver) -> None:
        """True only when it was lost."""
        client = await driver.connect()
        lock = client.lock(driver.name(), ttl=driver.timing.long)
        lease = await lock.acquire(PATIENCE)
        assert not await lease.wait_lost(0.01)

        waiting = driver.spawn(lease.wait_lost())
        await lease.release()
        assert not await waiting.result()

        lease = await client.lock(driver.name(), ttl=driver.timing.short, renew=False).acquire(20)
        assert await driver.spawn(lease.wait_lost()).result(driver.timing.beyond(lease.ttl))
        assert await lease.wait_lost(0)
        assert not await lease.confirm()

    @case(faces=["asyncio"])
    async def test_body_is_cancelled_on_request_when_the_lease_is_lost(self, driver: FaceDriver) -> None:
        """cancel_on_lost: the cancellation comes out as LockLost, and the task goes on uncancelled."""
        client = await driver.connect()
        ended = False

        with pytest.raises(lockkit.LockLost):  # noqa: PT012 - the body is the point
            async with client.lock(driver.name(), ttl=driver.timing.short, renew=False, cancel_on_lost=True):
                await asyncio.sleep(driver.timing.beyond(driver.timing.short))
                ended = True

        assert not ended
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    @case()
    async def test_loss_is_logged(self, driver: FaceDriver, caplog: pytest.LogCaptureFixture) -> None:
        """By a WARNING that names the lock; with raise_on_lost=False that is all that leaving after a loss does."""
        client = await driver.connect()
        name = driver.name()

        with caplog.at_level(logging.WARNING, "lockkit"):
            async with client.lock(name, ttl=driver.timing.short, renew=False, raise_on_lost=False) as lease:
                assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
            # The holder is notified first, so a log that is slow delays nobody.
            await driver.eventually(lambda: any(name in one.getMessage() for one in caplog.records), "the message")
            await client.close()

        records = [record for record in caplog.records if name in record.getMessage()]
        assert {record.levelname for record in records} == {"WARNING"}

    @case()
    async def test_client_is_a_context_manager(self, driver: FaceDriver) -> None:
        """It is closed at the end, which wakes who waits for a loss: the lease was released, so it was not lost."""
        other = await driver.connect()
        name = driver.name()
        async with driver.make_client() as client:
            lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
            waiting = driver.spawn(lease.wait_lost())

        assert not await waiting.result()
        assert not lease.held
        assert await other.holders(name) == []
        with pytest.raises(lockkit.LockError, match="closed"):
            await client.ping()


class Blocks(Cases):
    """Leases and the end of ``with``."""

    @case()
    async def test_body_never_runs_without_the_lock(self, driver: FaceDriver) -> None:
        """Entering a busy lock raises; the body is not run."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        ran = False

        async def enter() -> None:
            nonlocal ran
            async with other.lock(name, ttl=driver.timing.long, timeout=0):
                ran = True

        async with client.lock(name, ttl=driver.timing.long):
            with pytest.raises(lockkit.LockTimeout):
                await driver.answered(enter)

        assert not ran

    @case()
    async def test_released_lease_is_not_held(self, driver: FaceDriver) -> None:
        """Work that checks its lease after the release gets LockLost; a lease is true all the same, and never a no."""
        client = await driver.connect()
        name = driver.name()

        async with await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) as lease:
            lease.check()
            assert lease

        assert lease
        assert not lease.held
        with pytest.raises(lockkit.LockLost, match="released"):
            lease.check()
        assert not await lease.confirm()
        assert not await lease.wait_lost(0)
        assert await client.holders(name) == []

    @case()
    async def test_block_whose_lease_was_released_inside_ends_quietly(self, driver: FaceDriver) -> None:
        """Releasing early is no error."""
        client = await driver.connect()

        async with client.lock(driver.name(), ttl=driver.timing.long) as lease:
            await lease.release()

    @case()
    async def test_exception_of_the_body_goes_on_unchanged(self, driver: FaceDriver) -> None:
        """And the lock is free; not only on Exception."""
        client = await driver.connect()
        name = driver.name()
        for error in (ValueError("the body's own"), _Stopped()):
            with pytest.raises(type(error)) as caught:
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
