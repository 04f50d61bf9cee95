"""
The state machine of memory and file under random schedules, for the replay against models of what is built on it.

The engine and the primitives ship, and so does `LockState`, which a simulated node runs (`ClaimServer`). No message is
lost, and each is faster than an offer: what the models do not have does not happen.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from lockkit.aio import Client, Lease, Term
from lockkit.backend import CALL_SECONDS, Busy, Grant, Note, Renewal, Renewed, Request
from lockkit.backends.lock_state import LockState
from lockkit.engine.semaphore import CAPS_NAME
from lockkit.errors import BackendUnavailable, LockError, StaleToken
from lockkit.fencing import TokenGuard
from lockkit.primitives.once import Attempt, Once
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation import Conditions, Network, Node, Process, SimulatedRuntime, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.claims import ClaimBackend, ClaimServer, ProcessClaim
from tests.models.replay import Event, Recorder
from tests.models.schedules import TTL, Plan, crash, run

T = TypeVar("T")
State = LockState[ProcessClaim]
End = Callable[[], Awaitable[None]]

NAME = "x"
PERMITS = 2
LATENCY = 0.2
"""Longest time of a message, seconds: a waiter comes within its offer."""

STOPPED_MAX = 4.0
"""How long the server of notes stops, seconds: not so long that an answer counts as lost."""

GRACE = 6.0
"""Of leaders, seconds."""


class NotingServer(ClaimServer):
    """Notes what it does. After some grants it pauses the client, which gets the answer late."""

    def __init__(self, node: Node, network: Network, recorder: Recorder, state: type[State]) -> None:
        super().__init__(node, network, [], state=state)
        self._recorder = recorder
        self._chance = node.world.chance("pauses")
        self.lock = state()
        self.note: Note | None = None
        self.paused_max = 1.2 * TTL

    def _lock(self, name: str) -> State:
        """There is one, with which each request begins."""
        del name
        self._recorder.look()
        return self.lock

    def _did(self, kind: str, owner: str, value: int | None) -> None:
        """Note what was done, unless the value is None."""
        now = self.node.now()
        self._recorder.ends = {
            owner: self.node.clock.true_time(lease.until)
            for owner, lease in self.lock.leases.items()
            if now < lease.until
        }
        if value is not None:
            self._recorder.add(kind, owner, value)

    def _pause(self, process: Process) -> None:
        if self._chance.random() < 0.1:
            process.pause()
            self.node.world.call_in(self._chance.uniform(0.0, self.paused_max), process.resume)

    def acquire(self, name: str, claim: ProcessClaim, *, queue: bool) -> Grant | Busy:
        """Note the grant, by its token."""
        outcome = super().acquire(name, claim, queue=queue)
        granted = isinstance(outcome, Grant)
        self._did("ACQUIRED", claim.owner, self._recorder.token(self.lock.token) if granted else 0)
        if granted:
            self._pause(claim.process)
        return outcome

    def take_over(self, claim: ProcessClaim, owner: str) -> Grant | None:
        """Note the grant, by its token."""
        grant = self._lock(NAME).take_over(NAME, owner, claim, self.node.now(), self.node.wall_us())
        self._did("ACQUIRED", claim.owner, 0 if grant is None else self._recorder.token(grant.token))
        return grant

    def abandon(self, name: str, owner: str) -> None:
        """Note whether a place in the queue is given up, or the lock."""
        waits = any(claim.owner == owner for claim in self.lock.queue)
        held = any(holder.owner == owner for holder in self.lock.holders(self.node.now()))
        super().abandon(name, owner)
        self._did("ABANDONED" if waits else "RELEASED", owner, 0 if waits or held else None)

    def release(self, name: str, owner: str) -> bool:
        """Note it if the owner held the lock."""
        held = super().release(name, owner)
        self._did("RELEASED", owner, 0 if held else None)
        return held

    def renew(self, name: str, owner: str, ttl: Seconds) -> Renewal:
        """Note whether the owner held the lock."""
        outcome = super().renew(name, owner, ttl)
        self._did("RENEWED", owner, int(isinstance(outcome, Renewed)))
        return outcome

    def read_note(self, process: Process) -> Note | None:
        """Note whether there is one."""
        self._recorder.does(process, "READS", int(self.note is not None))
        self._pause(process)
        return self.note

    def write_note(self, owner: str, note: Note) -> bool:
        """Keep it if the owner holds the lock, as the backend for files does."""
        held = self._lock(NAME).confirm(owner, self.node.now()) is None
        self.note = note if held else self.note
        self._did("WRITTEN", owner, int(held))
        return held


class NotingBackend(ClaimBackend):
    """Notes when a request is sent."""

    capabilities = replace(ClaimBackend.capabilities, notes=True, transfer=True)
    recorder: Recorder
    losses_max: int
    _server: NotingServer

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """Ask the server."""
        self.recorder.asks(self._process, request.owner)
        return await super().try_acquire(request)

    async def _risk(self, call: Callable[[], Awaitable[T]]) -> T:
        """Lose the request now and then, or its answer."""
        lost = self._process.random.choice(("request", "answer", "", "")) if self.losses_max > 0 else ""
        answer = None if lost == "request" else await call()
        if lost or answer is None:
            self.losses_max -= 1
            await SimulatedRuntime(self._process).sleep(CALL_SECONDS)
            raise BackendUnavailable(f"the {lost} is lost")
        return answer

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """Renew the one lease that there is."""
        self.recorder.add("RENEWS", grants[0].owner)
        return await self._risk(lambda: super(NotingBackend, self).renew(grants))

    async def detach(self, grant: Grant) -> Renewal:
        """Renew it."""
        (outcome,) = await super().renew([grant])
        return outcome

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        if request.state is None:  # not when it is repeated
            self.recorder.asks(self._process, request.owner)
        request.state = claim = ProcessClaim(
            request.owner, request.ttl, "", request.mode, request.limit, self._process, request.wake.set
        )
        (grant,) = await self._risk(lambda: self._call(lambda: [self._server.take_over(claim, owner)]))
        request.state = None
        return grant

    async def read_note(self, name: str, answer_by: Instant = inf) -> Note | None:
        return None if name == CAPS_NAME else await self._call(lambda: self._server.read_note(self._process), answer_by)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        return await self._call(lambda: self._server.write_note(grant.owner, Note(text, keep)), answer_by)


class Storage:
    """Keeps what readers and writers, or the permit of a slot, write."""

    def __init__(self, network: Network, recorder: Recorder, guard: type[TokenGuard]) -> None:
        self._node = Node(network.world, "storage")
        self._network = network
        self._recorder = recorder
        self._guards = [guard() for _ in range(PERMITS)]

    async def access(self, process: Process, lease: Lease) -> None:
        """Write, or read if the lease is a reader's."""

        def compare() -> None:
            try:
                self._guards[lease.slot or 0].accept(lease.token, shared=lease.mode == "shared")
                accepted = True
            except StaleToken:
                accepted = False
            self._recorder.add("WRITTEN", lease.owner, int(accepted))

        await self._network.call(process, self._node, compare, 2 * TTL)


class Schedule:
    """One schedule: each client takes the lock again and again, and keeps it for a while."""

    clients = 0  # as many as the plan says
    faults = False
    paused_max = 1.2 * TTL
    losses_max = 1000

    def __init__(self, seed: int, state: type[State] = State, guard: type[TokenGuard] = TokenGuard) -> None:
        drawn = Plan.draw(seed)
        self.plan = replace(
            drawn, clients=self.clients or drawn.clients, conditions=Conditions(latency=(0.001, LATENCY)),
            crashes=False, faults=self.faults, use=self.use,
        )  # fmt: skip
        self.world = World(seed)
        self.network = Network(self.world, self.plan.conditions)
        self.processes = self.plan.processes(self.world)
        self.recorder = Recorder(self.world, self.processes)
        self.recorder.show = self.shown
        self.server = NotingServer(Node(self.world, "server"), self.network, self.recorder, state)
        self.server.paused_max = self.paused_max
        self.storage = Storage(self.network, self.recorder, guard)
        self.permits = drawn.clients == 2
        self.crashing = self.plan.chance.choice((None, *self.processes))

    @classmethod
    def trace(cls, seed: int, **parts: Any) -> list[Event]:
        """Run the schedule of a seed."""
        one = cls(seed, **parts)
        run(one.plan, {process: one.connected(process) for process in one.processes}, one.recorder, one.network)
        return one.recorder.events

    def connected(self, process: Process) -> Client:
        """Make the client of a process."""
        backend = NotingBackend(process, self.server, self.network, 2 * TTL)
        backend.recorder, backend.losses_max = self.recorder, self.losses_max
        return client_of(process, lambda _: backend, ttl=TTL, unavailable_after=60.0)

    def shown(self) -> int:
        """Return the holder."""
        return sum(map(self.recorder.number, self.recorder.ends))

    async def use(self, chance: random.Random, process: Process, client: Client) -> None:
        """Use the lock."""
        sleep = SimulatedRuntime(process).sleep
        while True:
            # Longer than the server keeps a lease that its client has lost.
            await sleep(chance.uniform(1.0, 8.0))
            try:
                lease, end = await self.begin(process, client, chance.choice((5.0, 3 * TTL)))
            except LockError:
                continue
            if lease is None:
                continue
            self.recorder.holds(process, lease)
            await self.hold(chance, process, lease)
            if process is self.crashing and chance.random() < 0.3:
                self.world.call_in(0.0, self._crash, process, lease)
                await sleep(1.0)
            with suppress(LockError):
                await end()

    def _crash(self, process: Process, lease: Lease) -> None:
        if not lease._record.renewal.in_flight:  # which would come late
            crash(process, self.recorder)

    async def begin(self, process: Process, client: Client, timeout: Seconds) -> tuple[Lease | None, End]:
        """Acquire a lease; return it, and what ends it."""
        raise NotImplementedError

    async def hold(self, chance: random.Random, process: Process, lease: Lease) -> None:
        """Hold it for a while."""
        sleep = SimulatedRuntime(process).sleep
        await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.0, 1.5 * TTL))))
        if not self.permits and process is not self.crashing and chance.random() < 0.7:
            await self.storage.access(process, lease)
        await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0))))


class Shares(Schedule):
    """Two readers and a writer; or three clients of a semaphore, where the plan has two clients."""

    clients = 3

    def shown(self) -> int:
        lock, client = self.server.lock, self.recorder.client
        held = {client(owner): lock.leases[owner].slot or 0 for owner in self.recorder.ends}
        head = 1 + client(lock.queue[0].owner) if lock.queue else 0
        slots = sum((slot & 1) << index for index, slot in held.items())
        return ((sum(1 << index for index in held) * 8 + slots) * 4 + len(lock.queue)) * 4 + head

    async def begin(self, process: Process, client: Client, timeout: Seconds) -> tuple[Lease | None, End]:
        rwlock = client.rwlock(NAME, renew=False)
        lock = rwlock.write() if process is self.processes[2] else rwlock.read()
        if self.permits:
            lock = client.semaphore(NAME, limit=PERMITS, renew=False)
        lease = await lock.acquire(timeout)
        return lease, lease.release


class OnceRuns(Schedule):
    """A piece of work. The server stops before some notes, so that they come late."""

    faults = True

    def shown(self) -> int:
        return super().shown() * 2 + (self.server.note is not None)

    async def begin(self, process: Process, client: Client, timeout: Seconds) -> tuple[Lease | None, End]:
        del process
        work = Once.described(
            client._engine, NAME, keep=86400.0, ttl=None, timeout=timeout, match=None, store_errors=()
        )
        attempt = await replace(work, lock=replace(work.lock, renew=False)).begin()
        return attempt.lease, partial(self._end, attempt)

    async def _end(self, attempt: Attempt) -> None:
        chance, node = self.plan.chance, self.server.node
        try:
            if chance.random() < 0.5:
                node.pause()
                self.world.call_in(chance.uniform(0.0, STOPPED_MAX), node.resume)
                await attempt.done(None)
        finally:
            await attempt.leave(None)

    async def hold(self, chance: random.Random, process: Process, lease: Lease) -> None:
        del lease
        seconds = chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.9 * TTL, TTL)))
        await SimulatedRuntime(process).sleep(seconds)


class Elections(Schedule):
    """Leaders, who take up to their grace to stop."""

    paused_max = 0.4 * TTL  # after a longer pause a candidate renews before it takes office

    async def begin(self, process: Process, client: Client, timeout: Seconds) -> tuple[Lease | None, End]:
        del process
        term = await client.election(NAME, grace=GRACE).campaign(timeout)
        return term, term.resign

    async def hold(self, chance: random.Random, process: Process, lease: Lease) -> None:
        assert isinstance(lease, Term)
        must_stop = await lease.must_stop(chance.choice((0.0, chance.uniform(0.0, 10.0), 2 * TTL)))
        if must_stop and lease.held:
            self.recorder.add("STOPS", lease.owner)
            await SimulatedRuntime(process).sleep(chance.uniform(0.0, GRACE - 1.0))
            if not await lease.must_stop():  # in a mutant alone
                self.recorder.holds(process, lease)


class HandOvers(Schedule):
    """A giver, two takers of its ticket, and a waiter."""

    clients = 4
    paused_max = 0.4 * TTL
    losses_max = 2

    def __init__(self, seed: int, **parts: Any) -> None:
        super().__init__(seed, **parts)
        self._tickets: list[str] = []

    async def use(self, chance: random.Random, process: Process, client: Client) -> None:
        """Play one of the roles."""
        sleep, role, tickets = SimulatedRuntime(process).sleep, self.processes.index(process), self._tickets
        takes = role in {1, 2}
        while takes and not tickets:
            await sleep(0.1)
        await sleep(chance.choice((chance.uniform(0.0, 2.0), chance.uniform(0.0, 1.3 * TTL))) if takes else role)
        try:
            lock = client.lock(NAME, renew=False)
            lease = await (client.take(tickets[0], renew=False) if takes else lock.acquire())
            self.recorder.holds(process, lease)
            await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.0, 1.5 * TTL))))
            if role == 0:
                tickets.append(await lease.ticket())
                await sleep(chance.uniform(0.0, TTL))
            if chance.random() < 0.7:
                await self.storage.access(process, lease)
            if role > 0:
                await lease.release()
        except LockError:
            return
