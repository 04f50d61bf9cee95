"""A lease that ends before its holder wanted: who is notified, when, and how often."""

from __future__ import annotations

import asyncio
import logging
from typing import get_args

import pytest

import lockkit
from lockkit.backend import LossReason
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds

REASONS = get_args(LossReason)


class Loss(Cases):
    """Telling the holder."""

    backend_part = (
        "`renew` returns `Gone` if the owner no longer holds the lock, and never takes the lock again. `confirm`, "
        "which asks `holders` by default, says the same."
    )

    @case()
    async def test_passed_deadline_is_loss(self, driver: FaceDriver) -> None:
        """Everything local says so, without asking the backend."""
        client = await driver.connect()
        lease = await client.lock(driver.name(), ttl=driver.timing.short, renew=False).acquire(20)

        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        assert lease.lost
        assert not lease.held
        assert lease.remaining() == 0.0
        assert not await lease.confirm()
        with pytest.raises(lockkit.LockLost):
            lease.check()

    @case()
    async def test_broken_lock_is_told_by_the_next_renewal(self, driver: FaceDriver) -> None:
        """Long before the deadline: renewals come every third of the ttl."""
        client, other = await driver.connect(), await driver.connect()

        async def lose(ttl: Seconds) -> None:
            name, told, signal = driver.name(), [], driver.signal()

            def on_lost(_: object, reason: str) -> None:
                told.append(reason)
                signal.set()

            lease = await client.lock(name, ttl=2 * ttl, on_lost=on_lost).acquire(PATIENCE)
            assert await other.break_lock(name) or lease.lost

            assert await lease.wait_lost(driver.timing.beyond(2 * ttl))
            await signal.wait()

            assert told[0] in REASONS
            if told[0] in {"expired", "paused"}:
                lease.check()
            with pytest.raises(lockkit.LockLost):
                await lease.release()

        await driver.renewed(lose)

    @case()
    async def test_renewal_does_not_take_a_lost_lock_back(self, driver: FaceDriver) -> None:
        """A lock that was broken stays free although its old holder goes on renewing."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.kept).acquire(PATIENCE)
        assert await other.break_lock(name)

        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        assert await other.holders(name) == []
        assert not await lease.confirm()

    @case()
    async def test_callbacks_are_called_once_each(self, driver: FaceDriver) -> None:
        """Of the lock and of the lease, also one that is registered after the loss; with lease and reason."""
        client = await driver.connect()
        calls: list[tuple[str, int, str]] = []
        lock = client.lock(
            driver.name(),
            ttl=driver.timing.short,
            renew=False,
            on_lost=lambda lease, reason: calls.append(("lock", lease.token, reason)),
        )
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
    async def test_callback_is_not_called_without_a_loss(self, driver: FaceDriver) -> None:
        """A release is no loss."""
        client = await driver.connect()
        calls: list[str] = []
        lock = client.lock(driver.name(), ttl=driver.timing.long, on_lost=lambda _, reason: calls.append(reason))

        async with lock:
            pass
        lease = await lock.acquire(20)
        await client.close()

        assert not lease.held
        assert calls == []

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

    @case(faces=["asyncio"])
    async def test_cancellation_from_outside_is_not_mistaken_for_a_loss(self, driver: FaceDriver) -> None:
        """With cancel_on_lost a task that somebody else cancels ends cancelled, and its lock is free."""
        client = await driver.connect()
        name = driver.name()
        inside = asyncio.Event()

        async def work() -> None:
            async with client.lock(name, ttl=driver.timing.long, cancel_on_lost=True):
                inside.set()
                await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.holders(name) == []

    @case()
    async def test_confirm_asks_the_backend(self, driver: FaceDriver) -> None:
        """A no marks the lease as lost, though its deadline has not passed."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        assert await lease.confirm()

        assert await other.break_lock(name)

        assert not await lease.confirm()
        assert lease.lost
        with pytest.raises(lockkit.LockLost):
            lease.check()

    @case()
    async def test_extend_of_a_broken_lease_raises(self, driver: FaceDriver) -> None:
        """And does not create the lock anew."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        assert await other.break_lock(name)

        with pytest.raises(lockkit.LockLost):
            await lease.extend()

        assert lease.lost
        assert await other.holders(name) == []

    @case()
    async def test_extend_of_a_lease_leaves_the_next_holder_alone(self, driver: FaceDriver) -> None:
        """The owner is compared at the backend: a lease whose lock another client holds is lost and extends nothing."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        assert await other.break_lock(name)
        after = await other.lock(name, ttl=driver.timing.kept, renew=False).acquire(PATIENCE)

        with pytest.raises(lockkit.LockLost):
            await lease.extend()

        assert lease.lost
        async with client.lock(name, ttl=driver.timing.long, timeout=driver.timing.beyond(after.ttl)):
            assert not after.held

    @case()
    async def test_loss_is_logged(self, driver: FaceDriver, caplog: pytest.LogCaptureFixture) -> None:
        """One WARNING that names the lock."""
        client = await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.short, renew=False).acquire(20)

        with caplog.at_level(logging.WARNING, "lockkit"):
            assert await lease.wait_lost(driver.timing.beyond(lease.ttl))
            # The holder is notified first, so a log that is slow delays nobody.
            await driver.eventually(lambda: any(name in one.getMessage() for one in caplog.records), "the message")
            await client.close()

        records = [record for record in caplog.records if name in record.getMessage()]
        assert [record.levelname for record in records] == ["WARNING"]
