"""
Clients that hold a lock beside one another, on simulated time: readers and writers, and permits of a semaphore.

Each client acquires, accesses a storage that compares tokens, and releases, again and again.
In a *calm* schedule nothing goes wrong, and a waiting client must be served soon although the others come and go
without a pause.
In the other schedules processes are paused and crash, the server pauses, the network is cut, callers give up or are
cancelled, and leases run out under their bodies. Each client that waits after all that has healed must be served too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lockkit.aio import Client, Lease, Lock
from lockkit.backend import LockBackend
from lockkit.backends.lock_state import LockState
from lockkit.errors import LockError, StaleToken
from lockkit.fencing import TokenGuard
from lockkit_tools.simulation import Conditions, History, Network, NoAnswer, Node, Process, World
from lockkit_tools.simulation import beliefs as judge
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.beliefs import Access, Watch, Witness
from lockkit_tools.simulation.checker import Problem
from lockkit_tools.simulation.claims import ClaimBackend, ClaimServer, ProcessClaim
from lockkit_tools.simulation.redlock import VotingNode
from lockkit_tools.simulation.world import Cancelled
from tests.simulation.redlock import NODES, redlock_at
from tests.simulation.support import sleep

NAME = "x"
CLIENTS = 5
TTL = 3.0
CALM_TTL = 30.0
HEALED_AT = 25.0
SECONDS = 55.0
CALM_SECONDS = 30.0
LONGEST_WAIT = 20.0
"""Of a wait for five others, who hold for two seconds at most when nothing is wrong any more: more than any needs, and
less than the time for which they come and go."""


@dataclass(frozen=True)
class Parts:
    """What a mutant replaces."""

    state: type[LockState[ProcessClaim]] = LockState
    guard: type[TokenGuard] = TokenGuard


class Storage:
    """A node that keeps data, with a guard for each slot. What is sent to it can be under way for long."""

    def __init__(self, world: World, witness: Witness, guard: type[TokenGuard]) -> None:
        """Start with guards that have seen no token."""
        self._node = Node(world, "storage")
        self._network = Network(world, Conditions(slow=0.2, slow_max=2 * TTL))
        self._witness = witness
        self._make_guard = guard
        self._guards: dict[int | None, TokenGuard] = {}

    async def access(self, process: Process, lease: Lease) -> None:
        """Write, or read if the lease is a reader's."""
        owner, token, slot, shared = lease.owner, lease.token, lease.slot, lease.mode == "shared"

        def compare() -> None:
            guard = self._guards.setdefault(slot, self._make_guard())
            try:
                guard.accept(token, shared=shared)
                accepted = True
            except StaleToken:
                accepted = False
            self._witness.accesses.append(Access(self._node.world.now, NAME, owner, token, slot, shared, accepted))

        try:
            await self._network.call(process, self._node, compare, 0.2)
        except NoAnswer:
            return  # it arrives later


class Crowd:
    """The clients of one schedule."""

    def __init__(self, seed: int, kind: str, *, calm: bool, guard: type[TokenGuard]) -> None:
        """Start without clients."""
        self.world = World(seed)
        self.chance = self.world.chance(kind)
        self.calm = calm
        self.ttl = CALM_TTL if calm else TTL
        self.seconds = CALM_SECONDS if calm else SECONDS
        self.network = Network(self.world, Conditions() if calm else Conditions(latency=(0.001, 0.2)))
        self.nodes: list[Node] = []
        self.witness = Witness(self.world)
        self.storage = Storage(self.world, self.witness, guard)
        self.processes: list[Process] = []

    def client(self, name: str, make: Callable[[Process], LockBackend]) -> tuple[Process, Client]:
        """Start a process with a client."""
        process = self.world.process(name, rate=1 + self.chance.uniform(-0.004, 0.004), offset=100.0)
        self.witness.join(process)
        self.processes.append(process)
        return process, client_of(process, lambda _: make(process), ttl=self.ttl, unavailable_after=30.0)

    def run(self) -> None:
        """Let it happen."""
        if not self.calm:
            for process in self.processes:
                self._plan_faults(process)
            for node in self.nodes[: (len(self.nodes) + 1) // 2]:
                at = self.chance.uniform(0.0, HEALED_AT)
                self.world.call_at(at, node.pause)
                self.world.call_at(at + self.chance.uniform(0.0, TTL), node.resume)
        self.world.run(until=self.seconds)
        self.world.end()
        assert not self.world.failures, self.world.failures

    def _plan_faults(self, process: Process) -> None:
        """Cut the process off or pause it, several times; now and then it crashes."""
        chance, world = self.chance, self.world
        at = 0.0
        while (at := at + chance.uniform(1.0, 6.0) * TTL) < HEALED_AT:
            lasts = chance.uniform(0.1, 1.5) * TTL
            if chance.random() < 0.6:
                world.call_at(at, process.pause)
                world.call_at(at + lasts, process.resume)
            else:
                for node in chance.sample(self.nodes, (len(self.nodes) + 1) // 2):
                    cut = partial(self.network.cut, process, node, requests=chance.random() < 0.5)
                    world.call_at(at, cut)
                    world.call_at(at + lasts, self.network.heal, process, node)
        if chance.random() < 0.2:
            world.call_at(chance.uniform(0.0, HEALED_AT), process.crash)

    async def work(self, process: Process, choose: Callable[[], Lock]) -> None:
        """Acquire, hold and release, without a pause if calm."""
        chance = self.world.chance(f"work of {process.name}")
        while True:
            lock = choose()
            if not self.calm and chance.random() < 0.2:
                task = process.start(self._round(process, lock, chance), "round", awaited=True)
                self.world.call_in(chance.uniform(0.0, TTL), task.cancel)
                await task.join()
                with suppress(Cancelled):
                    task.result()
            else:
                await self._round(process, lock, chance)
            if not self.calm:
                await sleep(process, chance.uniform(0.0, 0.2))

    async def _round(self, process: Process, lock: Lock, chance: random.Random) -> None:
        timeout = None if self.calm else chance.choice((None, None, 0.0, chance.uniform(0.0, TTL)))
        wait = self.witness.wait(process, NAME, lock._settings.mode)
        try:
            lease = await lock.acquire(timeout)
        except LockError:
            await sleep(process, 0.1)
            return
        finally:
            if not process.dead:
                wait.end = self.world.now
        watch = self.witness.watch(process, lease, NAME)
        try:
            await self._hold(process, lease, watch, chance)
        finally:
            try:
                await lease.release()
            except LockError:
                await sleep(process, 0.1)

    async def _hold(self, process: Process, lease: Lease, watch: Watch, chance: random.Random) -> None:
        """Come by at the storage some times, without looking whether the lease is still held."""
        longest = 0.5 if self.calm or self.world.now > HEALED_AT else TTL
        downgrades = lease.mode == "exclusive" and lease.slot is None and chance.random() < 0.4
        for _ in range(2):
            await sleep(process, chance.uniform(0.0, longest))
            await self._deliver(process, lease, chance)
        if downgrades:
            watch.weaken()
            try:
                await lease.downgrade()
            except LockError:
                return
            await sleep(process, chance.uniform(0.0, longest))
            await self._deliver(process, lease, chance)

    async def _deliver(self, process: Process, lease: Lease, chance: random.Random) -> None:
        if chance.random() < 0.8:
            await self.storage.access(process, lease)

    def progress(self) -> list[Problem]:
        """Judge the waits."""
        since = 0.0 if self.calm else HEALED_AT + 2 * TTL
        return list(judge.progress(self.witness.waits, LONGEST_WAIT, since=since, until=self.seconds))


def use_rwlock(seed: int, parts: Parts, *, calm: bool) -> tuple[Crowd, list[Problem]]:
    """Run four readers and two writers; return what happened, and what is wrong with it."""
    crowd = Crowd(seed, "rwlock", calm=calm, guard=parts.guard)
    history, server = _serve(crowd, parts)
    for index in range(6):
        process, client = crowd.client(
            f"client{index}", lambda process: ClaimBackend(process, server, crowd.network, 0.5)
        )
        process.start(crowd.work(process, _choose_mode(crowd, client, process, index)), "work")
    crowd.run()
    witness = crowd.witness
    return crowd, [
        *judge.overlap(witness.beliefs),
        *judge.tokens(history, witness.beliefs),  # type: ignore[arg-type]  # nothing else is in it
        *judge.guard(witness.accesses, witness.beliefs),
        *crowd.progress(),
    ]


def _choose_mode(crowd: Crowd, client: Client, process: Process, index: int) -> Callable[[], Lock]:
    chance = crowd.world.chance(f"modes of {process.name}")

    def choose() -> Lock:
        lock = client.rwlock(NAME, ttl=crowd.ttl, renew=crowd.calm or chance.random() < 0.7)
        writes = index >= 4 if crowd.calm or chance.random() < 0.8 else index < 4
        return lock.write() if writes else lock.read()

    return choose


def use_permits(seed: int, parts: Parts, *, calm: bool) -> tuple[Crowd, list[Problem]]:
    """Run five clients of a semaphore with native permits; in half of the schedules each has a limit of its own."""
    crowd = Crowd(seed, "permits", calm=calm, guard=parts.guard)
    history, server = _serve(crowd, parts)
    permits = [crowd.chance.randint(1, 3)] * CLIENTS
    if crowd.chance.random() < 0.5:
        permits = [crowd.chance.randint(1, 3) for _ in permits]
    _start_holders(crowd, permits, lambda process: ClaimBackend(process, server, crowd.network, 0.5))
    crowd.run()
    witness = crowd.witness
    limits = {process.name: limit for process, limit in zip(crowd.processes, permits, strict=True)}
    return crowd, [
        *judge.slots(witness.beliefs),
        *judge.limit(witness.beliefs, max(permits)),
        *judge.own_limits(witness.beliefs, limits),
        *judge.tokens(history, witness.beliefs),  # type: ignore[arg-type]  # nothing else is in it
        *judge.guard(witness.accesses, witness.beliefs),
        *crowd.progress(),
    ]


def use_slots(seed: int, parts: Parts, *, calm: bool) -> tuple[Crowd, list[Problem]]:
    """Run clients of a semaphore whose slots are locks on several Redis nodes. Never calm: they are not fair."""
    del calm
    crowd = Crowd(seed, "slots", calm=False, guard=parts.guard)
    crowd.seconds = HEALED_AT + 2 * TTL  # nothing that begins later is judged
    crowd.network.conditions = Conditions(latency=(0.001, 0.03))  # a lock takes several round trips
    drift = 0.004
    nodes = [
        VotingNode(
            crowd.world, index, rate=1 + crowd.chance.uniform(-drift, drift), wall_offset=crowd.chance.uniform(-99, 99)
        )
        for index in range(NODES)
    ]
    crowd.nodes = [node.node for node in nodes]
    permits = crowd.chance.randint(1, 3)
    _start_holders(crowd, [permits] * CLIENTS, lambda process: redlock_at(process, nodes, crowd.network, 0.5))
    crowd.run()
    witness = crowd.witness
    problems = [
        *judge.slots(witness.beliefs),
        *judge.limit(witness.beliefs, permits),
        *judge.guard(witness.accesses, witness.beliefs),
    ]
    return crowd, problems


def _start_holders(crowd: Crowd, permits: list[int], make: Callable[[Process], LockBackend]) -> None:
    for index, limit in enumerate(permits):
        process, client = crowd.client(f"client{index}", make)
        process.start(crowd.work(process, _choose_renewal(crowd, client, process, limit)), "work")


def _choose_renewal(crowd: Crowd, client: Client, process: Process, permits: int) -> Callable[[], Lock]:
    chance = crowd.world.chance(f"renewals of {process.name}")

    def choose() -> Lock:
        return client.semaphore(NAME, limit=permits, ttl=crowd.ttl, renew=crowd.calm or chance.random() < 0.7)

    return choose


def _serve(crowd: Crowd, parts: Parts) -> tuple[History, ClaimServer]:
    """Start the server of one node."""
    node = Node(crowd.world, "server", rate=1 + crowd.chance.uniform(-0.004, 0.004))
    crowd.nodes = [node]
    history: History = []
    notices = crowd.chance.random() < 0.5
    return history, ClaimServer(node, crowd.network, history, notices_death=notices, state=parts.state)
