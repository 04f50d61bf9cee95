"""One task that uses a client as badly as it may be used: what a random schedule is made of."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from lockkit.aio import Lease, Lock
from lockkit.engine.lease_record import UNCONFIRMED
from lockkit.errors import LockError, LockLost
from lockkit.units import Seconds
from lockkit_tools.simulation.history import Acquired, Called, Dropped, Failed, Looked, Released, Told
from lockkit_tools.simulation.member import Member
from lockkit_tools.simulation.schedule import EXTENDED_MAX
from lockkit_tools.simulation.world import Cancelled, Task

if TYPE_CHECKING:
    import random


T = TypeVar("T")


def start_workers(member: Member) -> list[Task[None]]:
    """Start the tasks that use a client."""
    workers = []
    for number in range(member.schedule.workers[member.index]):
        worker = Worker(member, member.world.chance(f"worker {member.index} {number}"))
        workers.append(member.start(worker.work(), f"worker{number}"))
    return workers


class Worker:
    """One task that uses a client: acquires, works, and gives back, in random ways."""

    def __init__(self, member: Member, chance: random.Random) -> None:
        self.member = member
        self.schedule = member.schedule
        self.world = member.world
        self.history = member.history
        self.process = member.process
        self.chance = chance

    async def work(self) -> None:
        """Do the rounds."""
        for _ in range(self.schedule.rounds):
            if self.member.closed:
                return
            await self._sleep(0.3)
            await self._round()

    async def _round(self) -> None:
        chance, ttl = self.chance, self.schedule.ttl
        name = chance.choice(self.schedule.names)
        told_wanted, reentrant = chance.random() < 0.6, chance.random() < 0.1
        try:
            lock = self.member.client.lock(
                name,
                ttl=ttl if chance.random() < 0.8 else ttl * chance.uniform(0.3, 1.0),
                renew=chance.random() < 0.75,
                max_hold=ttl * chance.uniform(0.2, 2.0) if chance.random() < 0.1 else None,
                reentrant=reentrant,
                on_lost=self._told if told_wanted else None,
            )
        except LockError:
            return  # closed meanwhile
        timeout = chance.choice((0.0, None, None, chance.uniform(0.05, 3.0) * ttl))
        lease = await self._acquire(name, lock.acquire(timeout), timeout, told_wanted=told_wanted, reentrant=reentrant)
        if lease is not None:
            if reentrant:
                await self._enter_again(lock, lease)
            await self._hold(lease, reentrant=reentrant)

    async def _enter_again(self, lock: Lock, lease: Lease) -> None:
        """Acquire what this task holds already: at once, the same lease, unless it was lost meanwhile."""
        try:
            again = await lock.acquire(0)
        except LockLost:
            self._look(lease)
        else:
            assert again is lease, "another lease for the same holder"
            self._look(lease)
            await lease.release()
            self._look(lease)

    async def _acquire(
        self,
        name: str,
        acquiring: Coroutine[Any, Any, Lease],
        timeout: Seconds | None,
        *,
        told_wanted: bool,
        reentrant: bool,
    ) -> Lease | None:
        call = next(self.member.calls)
        self.history.append(Called(self.world.now, call, self.process.name, name, timeout))
        try:
            # A reentrant lease belongs to the task that acquired it.
            if self.chance.random() < 0.15 and not reentrant:
                lease = await self._cancelled(acquiring, "acquire")
            else:
                lease = await acquiring
        except LockError as error:
            self.history.append(Failed(self.world.now, call, type(error).__name__))
            return None
        except Cancelled:
            self.history.append(Failed(self.world.now, call, "Cancelled"))
            if self.member.exiting:
                raise
            return None
        record = lease._record
        until = self.process.clock.true_time(record.valid_until)
        self.history.append(
            Acquired(self.world.now, call, self.process.name, name, lease.owner, lease.token, until, told_wanted)
        )
        self.member.watch(record)
        return lease

    async def _cancelled(self, calling: Coroutine[Any, Any, T], name: str) -> T:
        """Make a call in a task of its own, that is cancelled after a while."""
        task = self.process.start(calling, name, awaited=True)
        late = self.chance.random() < 0.3
        self.world.call_in(self.chance.uniform(0.0, 2 * self.schedule.ttl if late else 0.01), task.cancel)
        await task.join()
        return task.result()

    async def _hold(self, lease: Lease, *, reentrant: bool) -> None:
        """Use the lease, and end it in one of the ways that there are."""
        if self.chance.random() < 0.2:
            self.process.start(self._use_on(lease, 3), "assistant")
        elif self.chance.random() < 0.05:
            await self._use_on(lease, 1)
            self.history.append(Dropped(self.world.now, lease.owner))
            return
        try:
            await self._use_on(lease, self.chance.choice((0, 1, 1, 2, 3)))
        except Cancelled:
            if self.member.exiting and not reentrant:
                await self._clean_up(lease)
            raise
        await self._release(lease)

    async def _clean_up(self, lease: Lease) -> None:
        """The event loop ends; this body takes longer than its ttl to end, and is protected for as long."""
        for _ in range(self.chance.choice((0, 2, 4))):
            await self._sleep(1.0)
            self._look(lease)
            closed = self.member.client._engine.client.closed
            assert lease.held or lease.lost or closed, "released under a body that runs"
        await self._release(lease)

    async def _use_on(self, lease: Lease, times: int) -> None:
        """Use the lease some times, or until it is lost."""
        for _ in range(times):
            try:
                await self._use(lease)
            except LockError:
                self._look(lease)
                if self.chance.random() < 0.7:
                    return

    async def _use(self, lease: Lease) -> None:
        chance, ttl = self.chance, self.schedule.ttl
        action = chance.random()
        if action < 0.45:
            await self._sleep(1.0 if chance.random() < 0.8 else 3.0)
            self._look(lease)
        elif action < 0.7:
            lease.check()
            # Between the look and the write anything may happen: that is what the token is for.
            await self.member.storage.write(self.process, lease.name, lease.token, ttl)
        elif action < 0.8:
            await lease.extend(ttl * chance.uniform(0.15, EXTENDED_MAX) if chance.random() < 0.8 else None)
        elif action < 0.9:
            await lease.confirm()
        else:
            await lease.wait_lost(chance.uniform(0.0, 2.0) * ttl)
            self._look(lease)

    def _look(self, lease: Lease) -> None:
        look = self.chance.randrange(4)
        if look == 0:
            held = lease.held
        elif look == 1:
            held = not lease.lost and lease.held
        elif look == 2:
            held = lease.remaining() > 0.0
        else:
            try:
                lease.check()
                held = True
            except LockLost:
                held = False
        self.history.append(Looked(self.world.now, lease.owner, held))

    async def _release(self, lease: Lease) -> None:
        outcome, way = "ok", self.chance.random()
        try:
            if way < 0.2:
                await lease.__aexit__(None, None, None)
                if lease._record.state is UNCONFIRMED:
                    outcome = "BackendUnavailable"  # which leaving a block only logs
            elif way < 0.3:
                await self._cancelled(lease.release(), "release")
            else:
                await lease.release()
        except LockError as error:
            outcome = type(error).__name__
        except Cancelled:
            outcome = "Cancelled"
            if self.member.exiting:
                raise
        self.history.append(Released(self.world.now, lease.owner, outcome))
        if outcome == "BackendUnavailable" and self.chance.random() < 0.5:
            await self._sleep(0.5)
            await self._release(lease)

    def _told(self, lease: Lease, reason: str) -> None:
        self.history.append(Told(self.world.now, lease.owner, reason))

    async def _sleep(self, ttls: float) -> None:
        await self.process.waiter(self.chance.uniform(0.0, ttls) * self.schedule.ttl).park()
