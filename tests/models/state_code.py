"""
The state machine of memory and file under random schedules, for the replay against models of what is built on it.

The engine and the primitives ship, and so does `LockState`, which a simulated node runs (`ClaimServer`). No message is
lost, and each is faster than an offer: what the models do not have does not happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from lockkit.aio import Client, Lease
from lockkit.backend import Busy, Grant, Request
from lockkit.backends.lock_state import LockState
from lockkit.errors import LockError, StaleToken
from lockkit.fencing import TokenGuard
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


class NotingServer(ClaimServer):
    """Notes what it does. After some grants it pauses the client, which gets the answer late."""

    def __init__(self, node: Node, network: Network, recorder: Recorder, state: type[State]) -> None:
        super().__init__(node, network, [], state=state)
        self.network = network
        self._recorder = recorder
        self._chance = node.world.chance("pauses")
        self.lock = state()

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

        def token(outcome: Grant | Busy) -> int:
            return self._recorder.token(outcome.token) if isinstance(outcome, Grant) else 0

        outcome = self._note(
            "ACQUIRED", claim.owner, lambda: super(NotingServer, self).acquire(name, claim, queue=queue), token
        )
        if isinstance(outcome, Grant) and self._chance.random() < 0.1:
            claim.process.pause()
            self.node.world.call_in(self._chance.uniform(0.0, 1.2 * TTL), claim.process.resume)
        return outcome

    def abandon(self, name: str, owner: str) -> None:
        """Note whether a place in the queue is given up, or the lock."""
        waits = any(claim.owner == owner for claim in self.lock.queue)
        kind = "ABANDONED" if waits else "RELEASED"
        held = waits or self.lock.confirm(owner, self.node.now()) is None
        self._note(kind, owner, lambda: super(NotingServer, self).abandon(name, owner), lambda _: 0 if held else None)

    def release(self, name: str, owner: str) -> bool:
        """Note it if the owner held the lock."""
        return self._note(
            "RELEASED", owner, lambda: super(NotingServer, self).release(name, owner), lambda held: 0 if held else None
        )


class NotingBackend(ClaimBackend):
    """Notes when a request is sent."""

    recorder: Recorder

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """Ask the server."""
        self.recorder.asks(self._process, request.owner)
        return await super().try_acquire(request)


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
    plan = replace(Plan.draw(seed), clients=clients, conditions=conditions, faults=False, crashes=False)
    world = World(seed)
    return plan, world, Network(world, plan.conditions), plan.processes(world)


def connected(process: Process, server: NotingServer, recorder: Recorder) -> Client:
    """Make the client of a process."""
    backend = NotingBackend(process, server, server.network, 2 * TTL)
    backend.recorder = recorder
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
    run(replace(plan, use=use), clients, recorder, network)
    return recorder.events
