"""A lease that ends before its holder wanted: who is notified, when, and how often."""

from __future__ import annotations

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
        _, other, lease = await driver.held(ttl=driver.timing.kept)
        assert await other.break_lock(lease.name) or lease.lost

        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        assert await other.holders(lease.name) == []
        assert not await lease.confirm()

    @case()
    async def test_confirm_asks_the_backend(self, driver: FaceDriver) -> None:
        """A no marks the lease as lost, though its deadline has not passed."""
        _, other, lease = await driver.held(renew=False)
        assert await lease.confirm()

        assert await other.break_lock(lease.name)

        assert not await lease.confirm()
        assert lease.lost
        with pytest.raises(lockkit.LockLost):
            lease.check()

    @case()
    async def test_extend_of_a_broken_lease_raises(self, driver: FaceDriver) -> None:
        """And does not create the lock anew."""
        _, other, lease = await driver.held(renew=False)
        assert await other.break_lock(lease.name)

        with pytest.raises(lockkit.LockLost):
            await lease.extend()

        assert lease.lost
        assert await other.holders(lease.name) == []

    @case()
    async def test_extend_of_a_lease_leaves_the_next_holder_alone(self, driver: FaceDriver) -> None:
        """The owner is compared at the backend: a lease whose lock another client holds is lost and extends nothing."""
        client, other, lease = await driver.held(renew=False)
        assert await other.break_lock(lease.name)
        after = await other.lock(lease.name, ttl=driver.timing.short, renew=False).acquire(PATIENCE)

        with pytest.raises(lockkit.LockLost):
            await lease.extend()

        assert lease.lost
        async with client.lock(lease.name, ttl=driver.timing.long, timeout=driver.timing.beyond(after.ttl)):
            assert not after.held
