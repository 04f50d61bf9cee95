"""Processes that are killed, stopped, forked, or end while they hold or wait."""

from __future__ import annotations

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.face_driver import waiting_count
from lockkit.testing.processes import Worker
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds


class Crashes(Cases):
    """What happens to locks when something happens to their holder."""

    backend_part = (
        "The server frees the lock of a dead or stopped client after the ttl, without help from any client, even if a "
        "stopped waiter is first in the queue. `Capabilities.crash_release` says if it does so earlier."
    )

    @case(needs.processes)
    async def test_killed_holder_is_replaced_after_its_ttl(self, driver: FaceDriver) -> None:
        """At the latest: with SIGKILL nothing of it is released by itself."""
        await self._replaced(driver, driver.timing.kept, driver.timing.beyond(driver.timing.kept))

    @case(needs.processes, needs.early_crash_release)
    async def test_killed_holder_is_replaced_at_once(self, driver: FaceDriver) -> None:
        """Long before its ttl is over, also for a waiter that was there before."""
        await self._replaced(driver, driver.timing.long, PATIENCE)

    @staticmethod
    async def _replaced(driver: FaceDriver, ttl: Seconds, within: Seconds) -> None:
        """Kill a holder while another client waits, and check that this one gets the lock in time."""
        name = driver.name()
        worker = await driver.process()
        held = await driver.call(lambda: worker.acquire(name, ttl=ttl))
        client = await driver.connect()
        waiting = driver.spawn(client.lock(name, ttl=driver.timing.long).acquire())
        # The machine may stand still for longer than the ttl before the client asks.
        await driver.eventually(lambda: waiting.done or waiting_count(client, name) > 0, "the client waits")

        await driver.call(worker.kill)

        lease = await waiting.result(within)
        assert lease.token > held.token
        await lease.release()

    @case(needs.processes)
    async def test_stopped_holder_is_replaced_and_told(self, driver: FaceDriver) -> None:
        """After SIGSTOP beyond its ttl: on waking it knows that it lost, and frees nobody else's lock."""
        name = driver.name()
        ttl = driver.timing.kept
        worker = await driver.process()
        held = await driver.call(lambda: worker.acquire(name, ttl=ttl))
        client = await driver.connect()

        await driver.call(worker.stop)
        lease = await client.lock(name, ttl=driver.timing.long).acquire(driver.timing.beyond(ttl))
        await driver.call(worker.resume)

        assert lease.token > held.token
        assert not await driver.call(worker.is_held, held)
        with pytest.raises(lockkit.LockLost):
            await driver.call(worker.check, held)
        with pytest.raises(lockkit.LockLost):
            await driver.call(worker.release, held)
        assert await lease.confirm()
        await lease.release()

    @case(needs.processes)
    async def test_stopped_holder_is_told_when_it_leaves_its_block(self, driver: FaceDriver) -> None:
        """Leaving ``with`` normally raises LockLost, and leaves the next holder alone."""
        name = driver.name()
        ttl = driver.timing.kept
        worker = await driver.process()
        await driver.call(lambda: worker.ask("enter", name=name, lock={"ttl": ttl}))
        client = await driver.connect()

        await driver.call(worker.stop)
        lease = await client.lock(name, ttl=driver.timing.long).acquire(driver.timing.beyond(ttl))
        await driver.call(worker.resume)

        with pytest.raises(lockkit.LockLost):
            await driver.call(lambda: worker.ask("leave"))
        assert await lease.confirm()
        await lease.release()

    @case(needs.processes)
    async def test_stopped_first_waiter_blocks_the_second_no_longer_than_a_ttl(self, driver: FaceDriver) -> None:
        """It is granted the lock, or its turn, and does not take it: the one behind comes in after the ttl."""
        client = await driver.connect()

        async def pass_by(ttl: Seconds) -> None:
            name = driver.name()
            first, second = await driver.process(), await driver.process()
            lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
            for worker in (first, second):
                await driver.call(lambda worker=worker: worker.start_acquire(name, ttl=ttl))

            await _stop_between_questions(driver, client, first)
            await lease.release()
            held = await driver.call(second.finish_acquire, driver.timing.beyond(ttl))

            assert held.token > lease.token
            await driver.call(first.resume)
            await driver.call(second.release, held)
            after = await driver.call(first.finish_acquire, driver.timing.beyond(ttl))
            assert after.token > held.token
            await driver.call(first.release, after)

        await driver.renewed(pass_by)

    @case(needs.processes)
    async def test_killed_waiter_is_passed_by(self, driver: FaceDriver) -> None:
        """Who stood behind it gets the lock within the dead waiter's ttl."""
        name = driver.name()
        ttl = driver.timing.kept
        client, other = await driver.connect(), await driver.connect()
        worker = await driver.process()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        await driver.call(lambda: worker.start_acquire(name, ttl=ttl))
        waiting = driver.spawn(other.lock(name, ttl=driver.timing.long).acquire())
        await driver.until_waiting(other, name)

        await driver.call(worker.kill)
        await lease.release()

        await (await waiting.result(driver.timing.beyond(ttl))).release()

    @case(needs.processes)
    async def test_exit_releases_what_is_held(self, driver: FaceDriver) -> None:
        """A program that ends without releasing does not block the others for a ttl."""
        name = driver.name()
        worker = await driver.process()
        await driver.call(lambda: worker.acquire(name, ttl=driver.timing.long))
        client = await driver.connect()

        assert await driver.call(worker.exit) == 0

        await driver.pass_through(client, name)

    @case()
    async def test_forked_child_owns_nothing(self, driver: FaceDriver) -> None:
        """Its copy of the lease is lost, and releasing it frees nothing; the parent goes on holding and renewing."""
        worker = await driver.process()

        async def fork(ttl: Seconds) -> None:
            name, own_name = driver.name(), driver.name()
            held = await driver.call(lambda: worker.acquire(name, ttl=ttl))

            found = await driver.call(lambda: worker.ask("fork", number=held.number, name=own_name))

            assert found["held"] is False
            assert found["lost"] is True
            assert (found["check"], found["release"]) == ("LockLost", "LockLost")
            await driver.call(worker.check, held)
            if not driver.capabilities.usable_after_fork:
                assert "spawn" in str(found["refused"])  # at once, and says what to do
            else:
                # The child can work with the client that it was born with.
                assert found["own_owners"] is True
            if driver.capabilities.usable_after_fork and driver.capabilities.scope != "process":
                assert found["owners"] == [held.owner]
                assert found["parents_lock"] is False
            await driver.sleep(ttl * 1.2)
            await driver.call(lambda: worker.ask("confirm", number=held.number))
            await driver.call(worker.check, held)
            await driver.call(worker.release, held)

        await driver.renewed(fork)


async def _stop_between_questions(driver: FaceDriver, client: aio.Client, waiter: Worker) -> None:
    """
    Stop a waiter, but not in the middle of a statement.

    One that stands still while it writes to SQLite keeps every other writer out until it goes on: no lock can help.
    """
    while True:
        await driver.call(waiter.stop)
        try:
            lease = await client.lock(driver.name(), ttl=driver.timing.long).acquire(0)
        except lockkit.BackendUnavailable:
            await driver.call(waiter.resume)
        else:
            await lease.release()
            return
