"""Leases that run out, leases that are renewed, and the time left."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case, needs
from lockkit.testing.timing import PATIENCE
from lockkit.testing.witness import Witness
from lockkit.units import Seconds

EXPIRIES = 3
CONTENDERS = 4


class Expiry(Cases):
    """The ttl, at the client and at the backend."""

    backend_part = (
        "`try_acquire` stores the ttl, and the server frees the lock by its own clock, never earlier. `renew` "
        "compares the owner and sets the time left to `grant.ttl` (which `extend` changes); it never adds."
    )

    @case()
    async def test_lease_that_nobody_renews_ends(self, driver: FaceDriver) -> None:
        """With renew=False the lock is free for others when the ttl is over, without anybody's doing."""
        _, other, lease = await driver.held(ttl=driver.timing.short, renew=False)

        after = await other.lock(lease.name, ttl=driver.timing.long).acquire(driver.timing.beyond(lease.ttl))

        assert lease.lost
        assert not lease.held
        assert lease.remaining() == 0.0
        assert after.token > lease.token
        await after.release()

    @case()
    async def test_expired_lock_goes_to_one_of_many(self, driver: FaceDriver, tmp_path: Path) -> None:
        """However many clients ask for it in the moment in which its ttl ends, they hold it one after the other."""
        name = driver.name()
        holder = await driver.connect()
        witness = Witness(tmp_path)
        timeout = driver.timing.beyond(driver.timing.short)

        async def contend(who: str) -> None:
            client = await driver.connect()
            async with client.lock(name, ttl=driver.timing.long, timeout=timeout) as lease:
                witness.enter(who, lease.token)
                await driver.sleep(0.02)
                witness.leave(who, lease.token)

        for number in range(EXPIRIES):
            lease = await holder.lock(name, ttl=driver.timing.short, renew=False).acquire(PATIENCE)
            actors = [driver.spawn(contend(f"client{number}.{index}")) for index in range(CONTENDERS)]
            for actor in actors:
                await actor.result(timeout + PATIENCE)
            assert not lease.held

        witness.report().expect_exclusion(EXPIRIES * CONTENDERS)

    @case()
    async def test_holder_never_believes_longer_than_the_ttl(self, driver: FaceDriver) -> None:
        """The deadline counts from before the request: `held` is False at least as early as the ttl is over."""
        client = await driver.connect()
        lease = await client.lock(driver.name(), ttl=driver.timing.short, renew=False).acquire(20)
        granted = driver.now()

        while True:
            before = driver.now()
            if not lease.held:
                break
            assert before < granted + lease.ttl
            await driver.sleep(0.01)

        with pytest.raises(lockkit.LockLost):
            lease.check()

    @case()
    async def test_nobody_is_granted_the_lock_while_its_holder_believes(self, driver: FaceDriver) -> None:
        """The backend keeps the lock at least as long as its holder may believe in it."""
        _, other, lease = await driver.held(ttl=driver.timing.short, renew=False)
        lock = other.lock(lease.name, ttl=driver.timing.long)
        deadline = driver.now() + driver.timing.beyond(lease.ttl)

        after = None
        while after is None:
            after = await driver.answered(lock.try_acquire)
            assert after is None or not lease.held
            assert driver.now() < deadline
            await driver.sleep(0.005)

        await after.release()

    @case()
    async def test_renewal_keeps_the_lock_beyond_its_ttl(self, driver: FaceDriver) -> None:
        """Leases in use do not end, nobody else gets their locks, and only the one that was broken is lost."""
        client, other = await driver.connect(), await driver.connect()

        async def keep(ttl: Seconds) -> None:
            leases = [await client.lock(driver.name(), ttl=ttl).acquire(PATIENCE) for _ in range(8)]
            broken = leases.pop(3)
            assert await other.break_lock(broken.name) or broken.lost

            try:
                await _is_kept(leases[0], other.lock(leases[0].name, ttl=ttl), ttl * 1.5)
                assert broken.lost
                for lease in leases:
                    await lease.confirm()
                    lease.check()
            finally:
                for lease in leases:
                    with suppress(lockkit.LockLost):
                        await lease.release()

        await driver.renewed(keep)

    @case()
    async def test_max_hold_ends_renewal(self, driver: FaceDriver) -> None:
        """A stuck holder loses the lock, although renewal is on."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        max_hold = driver.timing.short * 2
        lease = await client.lock(name, ttl=driver.timing.short, max_hold=max_hold).acquire(20)

        assert await lease.wait_lost(driver.timing.beyond(max_hold + lease.ttl))
        after = await other.lock(name, ttl=driver.timing.long).acquire(driver.timing.beyond(lease.ttl))

        assert after.token > lease.token
        await after.release()

    @case()
    async def test_holder_without_progress_loses_the_lock(self, driver: FaceDriver) -> None:
        """Beats keep it beyond its ttl; without them renewal ends, and others get the lock."""
        client, other = await driver.connect(), await driver.connect()

        async def stop_beating(ttl: Seconds) -> None:
            name, reasons = driver.name(), []
            signal = driver.signal()

            def on_lost(_: object, reason: str) -> None:
                reasons.append(reason)
                signal.set()

            lease = await client.lock(name, ttl=ttl, stall=ttl, on_lost=on_lost).acquire(PATIENCE)
            for _ in range(4):
                await driver.sleep(ttl / 2)
                lease.beat()

            assert await lease.wait_lost(driver.timing.beyond(3 * ttl))
            await signal.wait()
            after = await other.lock(name, ttl=driver.timing.long).acquire(driver.timing.beyond(ttl))

            assert lease.stalled or reasons[0] == "paused"
            assert after.token > lease.token
            await after.release()

        await driver.renewed(stop_beating)

    @case()
    async def test_remaining_counts_down_and_never_exceeds_the_ttl(self, driver: FaceDriver) -> None:
        """Seconds to the deadline."""
        client = await driver.connect()
        lease = await client.lock(driver.name(), ttl=driver.timing.long, renew=False).acquire(PATIENCE)

        first = lease.remaining()
        await driver.sleep(0.02)
        second = lease.remaining()

        assert 0 < second < first < lease.ttl
        assert lease.ttl >= driver.timing.long
        await lease.release()
        assert lease.remaining() == 0.0

    @case()
    async def test_extend_sets_the_time_left_and_never_adds(self, driver: FaceDriver) -> None:
        """Extending twice gives no more than extending once, and a shorter time is taken at its word."""
        client = await driver.connect()
        long, short = driver.timing.long, driver.timing.short
        lease = await client.lock(driver.name(), ttl=long, renew=False).acquire(PATIENCE)

        await lease.extend(long / 2)
        await lease.extend(timedelta(seconds=long / 2))
        assert short < lease.remaining() < long / 2
        assert lease.ttl >= long / 2

        with suppress(lockkit.LockLost):  # an answer after that time
            await lease.extend(short)
        assert lease.remaining() < short
        assert await lease.wait_lost(driver.timing.beyond(short))

    @case(needs.own_ttl)
    async def test_extend_may_ask_for_more_than_the_first_ttl(self, driver: FaceDriver) -> None:
        """And still adds nothing."""
        client = await driver.connect()
        long = driver.timing.long
        lease = await client.lock(driver.name(), ttl=long, renew=False).acquire(PATIENCE)

        await lease.extend(long * 2)
        await lease.extend(timedelta(seconds=long * 2))

        assert long < lease.remaining() < long * 2
        assert lease.ttl >= long * 2
        await lease.release()

    @case()
    async def test_extend_is_heard_by_the_backend(self, driver: FaceDriver) -> None:
        """A lock whose lease was cut short is soon free for others."""
        _, other, lease = await driver.held(renew=False)

        with suppress(lockkit.LockLost):  # an answer after that time
            await lease.extend(driver.timing.short)

        async with other.lock(lease.name, ttl=driver.timing.long, timeout=driver.timing.beyond(driver.timing.short)):
            assert lease.lost

    @case(needs.own_ttl)
    async def test_extended_lease_outlives_its_first_ttl(self, driver: FaceDriver) -> None:
        """Without renewal, the extension alone keeps the lock."""
        client, other = await driver.connect(), await driver.connect()

        async def extend(ttl: Seconds) -> tuple[aio.Lease, Seconds]:
            lease = await client.lock(driver.name(), ttl=ttl, renew=False).acquire(PATIENCE)
            await lease.extend(driver.timing.long)
            return lease, ttl

        lease, first_ttl = await driver.renewed(extend)

        lock = other.lock(lease.name, ttl=driver.timing.long)
        assert await driver.answered(lock.try_acquire, first_ttl * 1.2) is None
        assert lease.held
        await lease.release()

    @case()
    async def test_extend_of_a_lost_lease_raises(self, driver: FaceDriver) -> None:
        """Nothing brings a lost lease back."""
        name = driver.name()
        client = await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.short, renew=False).acquire(20)
        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        with pytest.raises(lockkit.LockLost):
            await lease.extend(driver.timing.long)

        await driver.pass_through(client, name)

    @case()
    async def test_wall_clock_decides_nothing_at_the_client(
        self, driver: FaceDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time of day may jump by hours: leases are held, renewed and waited for as before."""
        client, other = await driver.connect(), await driver.connect()
        real, jump = time.time, [0.0]

        def jumping() -> float:
            jump[0] = 7200.0 if jump[0] <= 0 else -7200.0
            return real() + jump[0]

        monkeypatch.setattr(time, "time", jumping)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))

        async def keep(ttl: Seconds) -> aio.Lease:
            lease = await client.lock(driver.name(), ttl=ttl).acquire(PATIENCE)
            await _is_kept(lease, other.lock(lease.name, ttl=ttl), ttl * 1.2)
            assert lease.remaining() <= ttl
            await lease.release()
            return lease

        lease = await driver.renewed(keep)
        async with other.lock(lease.name, ttl=driver.timing.long, timeout=PATIENCE) as after:
            assert after.token > lease.token


async def _is_kept(lease: aio.Lease, lock: aio.Lock, seconds: Seconds) -> None:
    """Check that another client waits in vain for a lock that is held."""
    try:
        taken = await lock.acquire(seconds)
    except NOT_GRANTED:
        await lease.confirm()
        lease.check()
    else:
        held = lease.held
        with suppress(lockkit.LockLost):
            await taken.release()
        assert not held, "two hold the lock"
        lease.check()
