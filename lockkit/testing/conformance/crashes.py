"""Processes that are killed, stopped, forked, or end while they hold or wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.testing.conformance.base import Cases, Stage, case, needs
from lockkit.testing.face_driver import PATIENCE

if TYPE_CHECKING:
    from lockkit import aio
    from lockkit.testing.processes import Worker


class Crashes(Cases):
    """What happens to locks when something happens to their holder."""

    @case(needs.processes)
    async def test_killed_holder_is_replaced_after_its_ttl(self, stage: Stage) -> None:
        """At the latest: with SIGKILL nothing of it is released by itself."""
        name = stage.name()
        worker = await stage.process()
        ttl = stage.timing.kept
        held = await stage.call(lambda: worker.acquire(name, ttl=ttl))
        client = await stage.connect()
        waiting = stage.spawn(client.lock(name, ttl=stage.timing.long).acquire())
        await stage.until_waiting(client, name)

        await stage.call(worker.kill)

        lease = await waiting.result(stage.timing.beyond(ttl))
        assert lease.token > held.token
        await lease.release()

    @case(needs.processes, needs.early_crash_release)
    async def test_killed_holder_is_replaced_at_once(self, stage: Stage) -> None:
        """Long before its ttl is over, also for a waiter that was there before."""
        name = stage.name()
        worker = await stage.process()
        await stage.call(lambda: worker.acquire(name, ttl=stage.timing.long))
        client = await stage.connect()
        waiting = stage.spawn(client.lock(name, ttl=stage.timing.long).acquire())
        await stage.until_waiting(client, name)

        await stage.call(worker.kill)

        lease = await waiting.result(PATIENCE)
        await lease.release()

    @case(needs.processes)
    async def test_stopped_holder_is_replaced_and_told(self, stage: Stage) -> None:
        """After SIGSTOP beyond its ttl: on waking it knows that it lost, and frees nobody else's lock."""
        name = stage.name()
        ttl = stage.timing.kept
        worker = await stage.process()
        held = await stage.call(lambda: worker.acquire(name, ttl=ttl))
        client = await stage.connect()

        await stage.call(worker.stop)
        lease = await client.lock(name, ttl=stage.timing.long).acquire(stage.timing.beyond(ttl))
        await stage.call(worker.resume)

        assert lease.token > held.token
        assert not await stage.call(worker.is_held, held)
        with pytest.raises(lockkit.LockLost):
            await stage.call(worker.check, held)
        with pytest.raises(lockkit.LockLost):
            await stage.call(worker.release, held)
        assert await lease.confirm()
        await lease.release()

    @case(needs.processes)
    async def test_stopped_holder_is_told_when_it_leaves_its_block(self, stage: Stage) -> None:
        """Leaving ``with`` normally raises LockLost, and leaves the next holder alone."""
        name = stage.name()
        ttl = stage.timing.kept
        worker = await stage.process()
        await stage.call(lambda: worker.ask("enter", name=name, lock={"ttl": ttl}))
        client = await stage.connect()

        await stage.call(worker.stop)
        lease = await client.lock(name, ttl=stage.timing.long).acquire(stage.timing.beyond(ttl))
        await stage.call(worker.resume)

        with pytest.raises(lockkit.LockLost):
            await stage.call(lambda: worker.ask("leave"))
        assert await lease.confirm()
        await lease.release()

    @case(needs.processes)
    async def test_stopped_first_waiter_blocks_the_second_no_longer_than_a_ttl(self, stage: Stage) -> None:
        """It is granted the lock, or its turn, and does not take it: the one behind comes in after the ttl."""
        name = stage.name()
        ttl = stage.timing.kept
        client = await stage.connect()
        first, second = await stage.process(), await stage.process()
        lease = await client.lock(name, ttl=stage.timing.long).acquire(PATIENCE)
        for worker in (first, second):
            await stage.call(lambda worker=worker: worker.start_acquire(name, ttl=ttl))

        await _stop_between_questions(stage, client, first)
        await lease.release()
        held = await stage.call(second.finish_acquire, stage.timing.beyond(ttl))

        assert held.token > lease.token
        await stage.call(first.resume)
        await stage.call(second.release, held)
        after = await stage.call(first.finish_acquire, stage.timing.beyond(ttl))
        assert after.token > held.token
        await stage.call(first.release, after)

    @case(needs.processes)
    async def test_killed_waiter_is_passed_by(self, stage: Stage) -> None:
        """Who stood behind it gets the lock within the dead waiter's ttl."""
        name = stage.name()
        ttl = stage.timing.kept
        client, other = await stage.connect(), await stage.connect()
        worker = await stage.process()
        lease = await client.lock(name, ttl=stage.timing.long).acquire(PATIENCE)
        await stage.call(lambda: worker.start_acquire(name, ttl=ttl))
        waiting = stage.spawn(other.lock(name, ttl=stage.timing.long).acquire())
        await stage.until_waiting(other, name)

        await stage.call(worker.kill)
        await lease.release()

        await (await waiting.result(stage.timing.beyond(ttl))).release()

    @case(needs.processes)
    async def test_exit_releases_what_is_held(self, stage: Stage) -> None:
        """A program that ends without releasing does not block the others for a ttl."""
        name = stage.name()
        worker = await stage.process()
        await stage.call(lambda: worker.acquire(name, ttl=stage.timing.long))
        client = await stage.connect()

        assert await stage.call(worker.exit) == 0

        async with client.lock(name, ttl=stage.timing.long, timeout=PATIENCE):
            pass

    @case()
    async def test_forked_child_owns_nothing(self, stage: Stage) -> None:
        """Its copy of the lease is lost, and releasing it frees nothing; the parent goes on holding and renewing."""
        name, own_name = stage.name(), stage.name()
        ttl = stage.timing.kept
        worker = await stage.process()
        held = await stage.call(lambda: worker.acquire(name, ttl=ttl))

        found = await stage.call(lambda: worker.ask("fork", number=held.number, name=own_name))

        assert found["held"] is False
        assert found["lost"] is True
        assert (found["check"], found["release"]) == ("LockLost", "LockLost")
        # The child can work with the client that it was born with.
        assert found["own_owners"] is True
        if stage.capabilities.scope != "process":
            assert found["owners"] == [held.owner]
            assert found["parents_lock"] is False
        await stage.sleep(ttl * 1.2)
        assert await stage.call(lambda: worker.ask("confirm", number=held.number))
        await stage.call(worker.check, held)
        await stage.call(worker.release, held)


async def _stop_between_questions(stage: Stage, client: aio.Client, waiter: Worker) -> None:
    """
    Stop a waiter, but not in the middle of a statement.

    One that stands still while it writes to SQLite keeps every other writer out until it goes on: no lock can help.
    """
    while True:
        await stage.call(waiter.stop)
        try:
            lease = await client.lock(stage.name(), ttl=stage.timing.long).acquire(0)
        except lockkit.BackendUnavailable:
            await stage.call(waiter.resume)
        else:
            await lease.release()
            return
