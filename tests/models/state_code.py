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
from math import inf
from typing import TypeVar

from lockkit.aio import Client, Lease
from lockkit.backend import CALL_SECONDS, Busy, Grant, Note, Renewal, Renewed, Request
from lockkit.backends.lock_state import LockState
from lockkit.engine.semaphore import CAPS_NAME
from lockkit.errors import BackendUnavailable, LockError, StaleToken
from lockkit.fencing import TokenGuard
from lockkit.primitives.once import Once
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation import Conditions, Network, Node, Process, SimulatedRuntime, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.claims import ClaimBackend, ClaimServer, ProcessClaim
from tests.models.replay import Event, Recorder
from tests.models.schedules import TTL, Plan, crash, run

T = TypeVar("T")
State = LockState[ProcessClaim]

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
        self.network = network
        self._recorder = recorder
        self._chance = node.world.chance("pauses")
        self.lock = state()
        self.paused_max = 1.2 * TTL
        self.note: Note | None = None

    def _lock(self, name: str) -> State:
        """There is one."""
        del name
        return self.lock

    def _note(self, kind: str, owner: str, operation: Callable[[], T], value: Callable[[T], int | None]) -> T:
        """Do what is asked for; note it unless its value is None."""
        self._recorder.look()
        answer, now = operation(), self.node.now()
        self._recorder.ends = {
            owner: self.node.clock.true_time(lease.until)
            for owner, lease in self.lock.leases.items()
            if now < lease.until
        }
        if (said := value(answer)) is not None:
            self._recorder.add(kind, owner, said)
        return answer

    def acquire(self, name: str, claim: ProcessClaim, *, queue: bool) -> Grant | Busy:
        """Note the grant, by its token."""
        outcome = self._note(
            "ACQUIRED", claim.owner, lambda: super(NotingServer, self).acquire(name, claim, queue=queue), self._rank
        )
        if isinstance(outcome, Grant):
            self._pause(claim.process)
        return outcome

    def _rank(self, outcome: Grant | Busy | None) -> int:
        return self._recorder.token(outcome.token) if isinstance(outcome, Grant) else 0

    def _pause(self, process: Process) -> None:
        if self._chance.random() < 0.1:
            process.pause()
            self.node.world.call_in(self._chance.uniform(0.0, self.paused_max), process.resume)

    def abandon(self, name: str, owner: str) -> None:
        """Note whether a place in the queue is given up, or the lock."""
        waits = any(claim.owner == owner for claim in self.lock.queue)
        kind = "ABANDONED" if waits else "RELEASED"
        held = waits or any(owner == holder.owner for holder in self.lock.holders(self.node.now()))
        self._note(kind, owner, lambda: super(NotingServer, self).abandon(name, owner), lambda _: 0 if held else None)

    def release(self, name: str, owner: str) -> bool:
        """Note it if the owner held the lock."""
        return self._note(
            "RELEASED", owner, lambda: super(NotingServer, self).release(name, owner), lambda held: 0 if held else None
        )

    def take_over(self, claim: ProcessClaim, owner: str) -> Grant | None:
        """Note the grant, by its token."""

        def take() -> Grant | None:
            return self.lock.take_over(NAME, owner, claim, self.node.now(), self.node.wall_us())

        return self._note("ACQUIRED", claim.owner, take, self._rank)

    def renew(self, name: str, owner: str, ttl: Seconds) -> Renewal:
        """Note whether the owner held the lock."""
        return self._note(
            "RENEWED", owner, lambda: super(NotingServer, self).renew(name, owner, ttl),
            lambda outcome: int(isinstance(outcome, Renewed)),
        )  # fmt: skip

    def read_note(self, process: Process) -> Note | None:
        """Note whether there is one."""
        self._recorder.does(process, "READS", int(self.note is not None))
        self._pause(process)
        return self.note

    def write_note(self, owner: str, note: Note) -> bool:
        """Keep it if the owner holds the lock, as the backend for files does."""

        def write() -> bool:
            held = self.lock.confirm(owner, self.node.now()) is None
            self.note = note if held else self.note
            return held

        return self._note("WRITTEN", owner, write, int)


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
            message = f"the {lost} is lost"
            raise BackendUnavailable(message)
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

    async def read_note(self, name: str) -> Note | None:
        return None if name == CAPS_NAME else await self._call(lambda: self._server.read_note(self._process))

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


def prepared(seed: int, clients: int) -> tuple[Plan, World, Network, list[Process]]:
    """Draw what happens; nothing is lost, and nobody is paused but by the server."""
    conditions = Conditions(latency=(0.001, LATENCY))
    plan = replace(Plan.draw(seed), clients=clients, conditions=conditions, crashes=False)
    world = World(seed)
    return plan, world, Network(world, plan.conditions), plan.processes(world)


def connected(process: Process, server: NotingServer, recorder: Recorder, losses_max: int = 1000) -> Client:
    """Make the client of a process."""
    backend = NotingBackend(process, server, server.network, 2 * TTL)
    backend.recorder, backend.losses_max = recorder, losses_max
    return client_of(process, lambda _: backend, ttl=TTL, unavailable_after=60.0)


def share(seed: int, state: type[State] = State, guard: type[TokenGuard] = TokenGuard) -> list[Event]:
    """Run two readers and a writer; or three clients of a semaphore, where the plan has two clients."""
    plan, world, network, processes = prepared(seed, 3)
    recorder = Recorder(world, processes)
    server = NotingServer(Node(world, "server"), network, recorder, state)
    storage = Storage(network, recorder, guard)
    permits = Plan.draw(seed).clients == 2
    crashing = plan.chance.choice((None, *processes))

    def shown() -> int:
        lock = server.lock
        held = {recorder.client(owner): lock.leases[owner].slot or 0 for owner in recorder.ends}
        head = 1 + recorder.client(lock.queue[0].owner) if lock.queue else 0
        slots = sum((slot & 1) << client for client, slot in held.items())
        return ((sum(1 << client for client in held) * 8 + slots) * 4 + len(lock.queue)) * 4 + head

    recorder.show = shown

    async def use(chance: random.Random, process: Process, client: Client) -> None:
        sleep = SimulatedRuntime(process).sleep
        while True:
            # Longer than the server keeps a lease that its client has lost.
            await sleep(chance.uniform(1.0, 8.0))
            rwlock = client.rwlock(NAME, renew=False)
            lock = rwlock.write() if process is processes[2] else rwlock.read()
            if permits:
                lock = client.semaphore(NAME, limit=PERMITS, renew=False)
            try:
                lease = await lock.acquire(chance.choice((5.0, 3 * TTL)))
            except LockError:
                continue
            recorder.holds(process, lease)
            await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.0, 1.5 * TTL))))
            if process is crashing and chance.random() < 0.2:
                world.call_in(0.0, crash, process, recorder)
            elif not permits and chance.random() < 0.7:
                await storage.access(process, lease)
            await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0))))
            with suppress(LockError):
                await lease.release()

    clients = {process: connected(process, server, recorder) for process in processes}
    run(replace(plan, faults=False, use=use), clients, recorder, network)
    return recorder.events


def once(seed: int, state: type[State] = State) -> list[Event]:
    """Attempt a piece of work. The server stops before some notes, so that they come late."""
    plan, world, network, processes = prepared(seed, Plan.draw(seed).clients)
    recorder = Recorder(world, processes)
    server = NotingServer(Node(world, "server"), network, recorder, state)
    crashing = plan.chance.choice((None, *processes))
    recorder.show = lambda: sum(map(recorder.number, recorder.ends)) * 2 + (server.note is not None)

    async def use(chance: random.Random, process: Process, client: Client) -> None:
        sleep = SimulatedRuntime(process).sleep
        work = Once.described(
            client._engine, NAME, keep=86400.0, ttl=None, timeout=None, match=None, store_errors=(),
        )  # fmt: skip
        while True:
            await sleep(chance.uniform(1.0, 8.0))
            lock = replace(work.lock, renew=False, timeout=chance.choice((5.0, 3 * TTL)))
            try:
                attempt = await replace(work, lock=lock).begin()
            except LockError:
                continue
            if attempt.lease is None:
                continue
            recorder.holds(process, attempt.lease)
            await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.9 * TTL, TTL))))
            if process is crashing and chance.random() < 0.3:
                world.call_in(0.0, crash, process, recorder)
                await sleep(1.0)
            with suppress(LockError):
                if chance.random() < 0.5:
                    server.node.pause()
                    world.call_in(chance.choice((0.0, chance.uniform(0.0, STOPPED_MAX))), server.node.resume)
                    await attempt.done(None)
            with suppress(LockError):
                await attempt.leave(None)

    clients = {process: connected(process, server, recorder) for process in processes}
    run(replace(plan, use=use), clients, recorder, network)
    return recorder.events


def elect(seed: int, state: type[State] = State) -> list[Event]:
    """Hold an election. Leaders take up to their grace to stop."""
    plan, world, network, processes = prepared(seed, Plan.draw(seed).clients)
    recorder = Recorder(world, processes)
    server = NotingServer(Node(world, "server"), network, recorder, state)
    server.paused_max = 0.4 * TTL  # after a longer pause a candidate renews before it takes office
    crashing = plan.chance.choice((None, *processes))
    recorder.show = lambda: sum(map(recorder.number, recorder.ends))

    async def use(chance: random.Random, process: Process, client: Client) -> None:
        sleep = SimulatedRuntime(process).sleep
        while True:
            await sleep(chance.uniform(1.0, 8.0))
            try:
                term = await client.election(NAME, grace=GRACE).campaign(chance.choice((5.0, 3 * TTL)))
            except LockError:
                continue
            recorder.holds(process, term)
            must_stop = await term.must_stop(chance.choice((0.0, chance.uniform(0.0, 10.0), 2 * TTL)))
            if must_stop and term.held:
                recorder.add("STOPS", term.owner)
                await sleep(chance.uniform(0.0, GRACE - 1.0))
                if not await term.must_stop():  # it is told to go on
                    recorder.holds(process, term)
            if process is crashing and chance.random() < 0.3:
                world.call_in(0.0, crash, process, recorder)
                await sleep(1.0)
            with suppress(LockError):
                await term.resign()

    clients = {process: connected(process, server, recorder) for process in processes}
    run(replace(plan, faults=False, use=use), clients, recorder, network)
    return recorder.events


def hand_over(seed: int, state: type[State] = State) -> list[Event]:
    """Hand the lock over by a ticket, which two takers get."""
    plan, world, network, processes = prepared(seed, 4)
    recorder = Recorder(world, processes)
    server = NotingServer(Node(world, "server"), network, recorder, state)
    server.paused_max = 0.4 * TTL
    storage = Storage(network, recorder, TokenGuard)
    recorder.show = lambda: sum(map(recorder.number, recorder.ends))
    tickets: list[str] = []

    async def use(chance: random.Random, process: Process, client: Client) -> None:
        sleep, role = SimulatedRuntime(process).sleep, processes.index(process)
        if role in {1, 2}:
            while not tickets:
                await sleep(0.1)
            await sleep(chance.choice((chance.uniform(0.0, 2.0), chance.uniform(0.0, 1.3 * TTL))))
        elif role == 3:
            await sleep(chance.uniform(1.0, 5.0))
        try:
            lease = await (
                client.take(tickets[0], renew=False) if role in {1, 2} else client.lock(NAME, renew=False).acquire()
            )
            recorder.holds(process, lease)
            await sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.0, 1.5 * TTL))))
            if role == 0:
                tickets.append(await lease.ticket())
                await sleep(chance.uniform(0.0, TTL))
        except LockError:
            return
        if chance.random() < 0.7:
            await storage.access(process, lease)
        if role > 0:
            with suppress(LockError):
                await lease.release()

    run(
        replace(plan, faults=False, use=use),
        {one: connected(one, server, recorder, 2) for one in processes},
        recorder,
        network,
    )
    return recorder.events
