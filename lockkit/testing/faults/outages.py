"""A server that is dead, frozen or restarted: what each call does meanwhile, and what is true afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import FaceDriver, case, needs
from lockkit.testing.face_driver import Signal, waiting_count
from lockkit.testing.faults.base import (
    FaultCases,
    Faults,
    connect_calm,
    during_fault,
    expect_hand_over,
    expect_message,
    expect_no_second_holder,
)
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds

BUSY_SECONDS = 1.0
"""How much later than promised a call may be back: the machine that runs the tests is busy with others."""

ACQUIRE_SECONDS = 0.5 + BUSY_SECONDS
CALL_SECONDS = 5.0 + BUSY_SECONDS
NOTICE_SECONDS = 0.5 + BUSY_SECONDS
"""From the deadline of a lease to its holder's notice."""


def outage_ttl(driver: FaceDriver) -> Seconds:
    """Give the ttl of a lease that is to end in an outage: the shortest that outlives the steps before it."""
    return max(0.6, driver.timing.short)


async def fails(call: Awaitable[object], within: Seconds, secret: str) -> None:
    """Wait for a call that must say in time that there is no backend."""
    watch = Stopwatch()
    try:
        await call
    except lockkit.BackendUnavailable as error:
        assert watch.stop() < within, f"{watch.stop():.2f} s"
        expect_message(error, secret)
    else:
        raise AssertionError("the call succeeded without a server")


async def told(lease: aio.Lease, reasons: list[str], within: Seconds) -> None:
    """Wait until a holder is notified that its lease has ended."""
    watch = Stopwatch()
    assert await lease.wait_lost(within + PATIENCE)
    assert watch.stop() < within, f"the holder was notified after {watch.stop():.2f} s"
    assert not lease.held
    assert len(reasons) < 2, reasons


class Outages(FaultCases):
    """The server answers nobody."""

    @case(faults=["stop"])
    async def test_dead_server(self, driver: FaceDriver, faults: Faults) -> None:
        """Calls end with a clear error, the holder is notified by its deadline, and the client goes on afterwards."""
        await self._outage(driver, faults, faults.stop, faults.start)

    @case(faults=["freeze"])
    async def test_frozen_server(self, driver: FaceDriver, faults: Faults) -> None:
        """The same where connections stay open, and requests are executed long after they were given up."""
        await self._outage(driver, faults, faults.freeze, faults.thaw)

    async def _outage(
        self, driver: FaceDriver, faults: Faults, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        ttl, long = outage_ttl(driver), driver.timing.long
        holder, leaver, warm, cold = [await driver.connect() for _ in range(4)]
        held, left, wanted, queued = (driver.name(text) for text in ("held", "left", "wanted", "queued"))
        await driver.pass_through(warm, wanted)
        inside, go = driver.signal(), driver.signal()
        leaving = driver.spawn(
            self._leave(leaver.lock(left, ttl=long, timeout=PATIENCE, raise_on_lost=False), inside, go)
        )
        await inside.wait()
        kept = await leaver.lock(queued, ttl=long, timeout=PATIENCE).acquire()
        waiter = driver.spawn(self._wait(warm, queued, 2 * ttl))
        await driver.eventually(lambda: waiter.done or waiting_count(warm, queued) > 0, "the waiter waits")
        reasons: list[str] = []
        lease = await holder.lock(held, ttl=ttl, on_lost=lambda _, reason: reasons.append(reason)).acquire(PATIENCE)

        async with during_fault(driver, begin, end):
            calls = [
                driver.spawn(fails(call, within, faults.secret))
                for call, within in (
                    (warm.lock(wanted, ttl=long).acquire(0.3), 0.3 + ACQUIRE_SECONDS),
                    (cold.lock(wanted, ttl=long).acquire(0), ACQUIRE_SECONDS),
                )
            ]
            go.set()
            await told(lease, reasons, ttl + NOTICE_SECONDS)
            for call in (*calls, waiter):
                await call.result()
        await leaving.result()

        again = await warm.lock(held, ttl=long).acquire(PATIENCE)
        assert again.token > lease.token
        assert not await lease.confirm()
        await again.release()
        with suppress(lockkit.LockLost):
            await driver.answered(kept.release)
        # Nothing stays held for a ttl: neither by a call that was given up, executed or not, nor by the block.
        for client, name in ((cold, wanted), (warm, left), (cold, queued)):
            await driver.pass_through(client, name)

    @staticmethod
    async def _wait(client: aio.Client, name: str, timeout: Seconds) -> None:
        """Wait for a lock that nobody releases. It may or may not be noticed that the server is away."""
        watch = Stopwatch()
        try:
            await client.lock(name, ttl=30).acquire(timeout)
        except (lockkit.BackendUnavailable, lockkit.LockTimeout):
            assert watch.stop() < timeout + ACQUIRE_SECONDS, f"{watch.stop():.2f} s"
        else:
            raise AssertionError("acquired a lock that is held")

    @staticmethod
    async def _leave(lock: aio.Lock, inside: Signal, go: Signal) -> None:
        """Leave a block while nothing answers: that takes no longer than promised, and is repeated afterwards."""
        async with lock:
            inside.set()
            await go.wait()
            watch = Stopwatch()
        assert watch.stop() < CALL_SECONDS, f"{watch.stop():.2f} s"

    @case(faults=["freeze"])
    async def test_server_that_is_frozen_for_a_moment_ends_nothing(self, driver: FaceDriver, faults: Faults) -> None:
        """Less than the ttl: the lease goes on, and a waiter still waits."""
        holder, waiter = await driver.connect(), await driver.connect()

        async def outlast(ttl: Seconds) -> None:
            lease, waiting = await driver.contended(holder, waiter, ttl=2 * ttl)
            async with during_fault(driver, faults.freeze, faults.thaw):
                await driver.sleep(ttl / 3)
            await driver.answered(lease.extend)
            assert not waiting.done
            await driver.answered(lease.release)
            await (await waiting.result()).release()

        await driver.renewed(outlast)

    @case(faults=["partition"])
    async def test_partition(self, driver: FaceDriver, faults: Faults) -> None:
        """Another client is granted the lock after the ttl, and not before its holder has lost it."""
        holder, calm = await driver.connect(), await connect_calm(driver, faults)
        name, ttl = driver.name(), outage_ttl(driver)
        reasons: list[str] = []
        lease = await holder.lock(name, ttl=ttl, on_lost=lambda _, reason: reasons.append(reason)).acquire(PATIENCE)

        async with during_fault(driver, faults.partition, faults.heal):
            waiting = driver.spawn(self._acquire(calm, lease, driver.timing.long))
            await told(lease, reasons, ttl + NOTICE_SECONDS)
            second = await waiting.result(2 * PATIENCE)
            assert second.token > lease.token
        await second.release()
        await driver.pass_through(holder, name)

    @staticmethod
    async def _acquire(client: aio.Client, lease: aio.Lease, ttl: Seconds) -> aio.Lease:
        second = await client.lock(lease.name, ttl=ttl).acquire(2 * PATIENCE)
        assert not lease.held, "two hold the lock"
        return second


class Restarts(FaultCases):
    """The server comes back."""

    @case(faults=["stop"])
    async def test_restart_with_data(self, driver: FaceDriver, faults: Faults) -> None:
        """The lease goes on, or its holder is notified; the waiter gets the lock after that, with a higher token."""
        holder, other, calm = await driver.connect(), await driver.connect(), await connect_calm(driver, faults)
        lease, waiting = await driver.contended(holder, other)

        async with during_fault(driver, faults.stop, faults.start):
            pass

        await expect_no_second_holder(driver, lease, calm)
        await expect_hand_over(driver, lease, waiting)

    @case(faults=["stop", "erase"])
    async def test_restart_without_data(self, driver: FaceDriver, faults: Faults) -> None:
        """The holder is notified by its deadline, and its release frees nobody else's lock."""
        holder, other = await driver.connect(), await driver.connect()
        name, ttl = driver.name(), 2 * outage_ttl(driver)
        reasons: list[str] = []
        lease = await holder.lock(name, ttl=ttl, on_lost=lambda _, reason: reasons.append(reason)).acquire(PATIENCE)

        def erase() -> None:
            faults.stop()
            faults.erase()

        async with during_fault(driver, erase, faults.start):
            pass

        await told(lease, reasons, ttl + NOTICE_SECONDS)
        second = await other.lock(name, ttl=driver.timing.long).acquire(2 * PATIENCE)
        if driver.capabilities.survives_data_loss:
            assert second.token > lease.token
        with suppress(lockkit.LockLost):
            await driver.answered(lease.release)
        assert await driver.answered(second.confirm)
        await second.release()

    @case(needs.survives_node_loss, faults=["stop_one"])
    async def test_loss_of_one_server_of_several(self, driver: FaceDriver, faults: Faults) -> None:
        """Nobody loses anything: the holder keeps its lease, the waiter its turn, and new locks are granted."""
        holder, other = await driver.connect(), await driver.connect()
        lease, waiting = await driver.contended(holder, other)
        # A majority granted it; a renewal gives it to a server that was too slow for that, and may be needed now.
        await driver.answered(lease.extend)

        async with during_fault(driver, faults.stop_one, faults.start):
            assert await driver.answered(lease.confirm)
            await driver.answered(lease.extend)
            assert not waiting.done
            await driver.pass_through(other, driver.name())
            await driver.answered(lease.release)
            second = await waiting.result(2 * PATIENCE)
            assert second.token > lease.token
            await second.release()
