"""
Rolling restarts of a Redlock on simulated time: nodes lose their data one after the other, under leases held for long.

A renewal gives a node its key back as soon as the node may vote (`RedlockBackend._restore`).
All: ``LOCKKIT_SIM_SEED=0-19999 pytest tests/simulation/test_rolling_restart.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockkit.aio import Client, Lease
from lockkit.backend import Gone, Grant, Renewal
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.nodes import ACQUIRE, Answer, Argument, LockKeys, Op
from lockkit.backends.redlock.votes import Held
from lockkit.errors import LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation import (
    CALM,
    Conditions,
    LockServer,
    Network,
    Node,
    Process,
    SimulatedRuntime,
    World,
    connect,
)
from lockkit_tools.simulation.beliefs import Witness, overlap
from lockkit_tools.simulation.redlock import SimulatedNodes, VotingNode
from tests.simulation.redlock import redlock_at
from tests.simulation.support import apart, known_first, sleep

SEEDS = "0-299"
PART = 150
TTL = 1.5
LONGEST_TTL = 3.0
SETTLED_SECONDS = 1.0
"""Time in which a release reaches a node that is up, in a calm network."""

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def is_restoring(op: Op, options: dict[str, Any]) -> bool:
    """Tell a request of a renewal to restore a key from one of an acquisition, which goes to all nodes."""
    return op is ACQUIRE and options.get("only") is not None


@dataclass
class Rolling:
    """
    A world with a Redlock, and what happened in it.

    Attributes:
        up_since: True time since when each node is up, by its index.
        released: True time at which each owner's release had returned.
        problems: What broke a promise.
        lost_count: How many leases were lost.
        snapshots: Some nodes come back with an old snapshot.
    """

    seed: int
    conditions: Conditions
    timeout: Seconds
    nodes_count: int
    world: World = field(init=False)
    up_since: dict[int, Instant] = field(default_factory=dict)
    released: dict[str, Instant] = field(default_factory=dict)
    problems: set[str] = field(default_factory=set)
    lost_count: int = 0
    snapshots: bool = True

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.network = Network(self.world, self.conditions)
        chance = self.world.chance("nodes")
        self.nodes = [
            VotingNode(
                self.world, index, rate=1 + chance.uniform(-0.004, 0.004), wall_offset=chance.uniform(-0.05, 0.05)
            )
            for index in range(self.nodes_count)
        ]
        self.witness = Witness(self.world)
        self.server = LockServer(Node(self.world, "unused"), self.network, [])
        self._restoring: dict[str, Event] = {}
        self.world.call_at(0.9, self._age_marks)

    def _age_marks(self) -> None:
        """Let the first start be long ago: else a node that loses its mark is taken for one that has none yet."""
        for node in self.nodes:
            if node.mark is not None:
                node.mark["since_us"] = 1

    def client(self, process: Process, *, fencing: bool = True) -> Client:
        """Connect a process to all nodes, and watch what it believes."""
        self.witness.join(process)

        def make(*_: Any) -> RedlockBackend:
            backend = redlock_at(process, self.nodes, self.network, self.timeout, fencing=fencing)
            ask = backend._nodes.ask

            async def ask_and_tell(op: Op, *arguments: Any, **options: Any) -> list[Answer]:
                if is_restoring(op, options) and any(self.votes(self.nodes[index]) for index in options["only"]):
                    self.restoring(process).set()
                return await ask(op, *arguments, **options)

            backend._nodes.ask = ask_and_tell  # type: ignore[method-assign]
            return backend

        return connect(process, self.server, self.network, backend=make)

    def votes(self, node: VotingNode) -> bool:
        """Tell whether a node may vote."""
        return node.mark is not None and node._is_marked() and node.mark["until_us"] <= node.node.wall_us()

    def restoring(self, process: Process) -> Event:
        """Give the event that is set when a renewal of this process begins to restore a key."""
        return self._restoring.setdefault(process.name, SimulatedRuntime(process).event())

    async def acquire(self, client: Client, process: Process, ttl: Seconds, timeout: Seconds) -> Lease:
        """Acquire, under the eyes of the witness."""
        lease = await client.lock("x", ttl=ttl).acquire(timeout)
        self.witness.watch(process, lease, "x")
        lease.on_lost(lambda *_: setattr(self, "lost_count", self.lost_count + 1))
        return lease

    async def release(self, lease: Lease) -> None:
        """Release, and take down when that had returned."""
        await lease.release()
        self.released[lease.owner] = self.world.now

    def restart(self, index: int, seconds: Seconds) -> None:
        """Restart a node without its data; not if it were the last that has a mark: that would be a first start."""
        node = self.nodes[index]
        if node.node.up and any(other._is_marked() for other in self.nodes if other is not node):
            node.saves = self.snapshots and self.world.chance(f"snapshot {self.world.now}").random() < 0.3
            node.node.stop(lose_data=True)
            self.up_since.pop(index, None)
            self.world.call_in(seconds, self.start, index)

    def start(self, index: int) -> None:
        """Start a node."""
        self.nodes[index].node.start()
        self.up_since[index] = self.world.now

    def look_at_released(self) -> None:
        """See whether a node still has, or has again, the key of a lease that was released."""
        now = self.world.now
        for index, node in enumerate(self.nodes):
            owner = (node._get("lock", "lockkit:x") or "").partition(".")[0]
            settled = max(self.released.get(owner, now), self.up_since.get(index, now)) + SETTLED_SECONDS
            if owner in self.released and now > settled:
                self.problems.add("a released lock is held")

    def end(self, until: Instant) -> str:
        """Run it to its end; say what is wrong, empty if nothing is."""
        self.world.run(until=until)
        self.world.end()
        beliefs = self.witness.beliefs
        self.problems |= {f"two holders: {problem}" for problem in overlap(beliefs)}
        if any(later.token <= earlier.token for earlier, later in pairwise(beliefs)):
            self.problems.add("a token that is not larger")
        return "; ".join(sorted(self.problems))


async def come_and_go(rolling: Rolling, process: Process, ttl: Seconds, holds: tuple[float, float]) -> None:
    """Acquire, hold for a while, release, pause."""
    client, chance = rolling.client(process), random.Random(f"{process.name} {rolling.seed}")
    while True:
        try:
            lease = await rolling.acquire(client, process, ttl, chance.choice((0.0, 0.5, 2.0)))
            restoring = rolling.restoring(process)
            restoring.clear()
            if await restoring.wait(chance.uniform(*holds)):
                await sleep(process, chance.choice((chance.uniform(0.0, 0.1), chance.uniform(*holds))))
            await rolling.release(lease)
            del lease
        except LockError:
            pass
        await sleep(process, chance.uniform(0.0, 2.0))


def orderly(seed: int) -> Rolling:
    """Restart one node after the other, and wait as the documentation says: no lease is lost."""
    chance = random.Random(f"orderly {seed}")
    rolling = Rolling(seed, CALM, 1.0, chance.choice((3, 3, 5)))
    holder, other, operator = (rolling.world.process(name) for name in ("holder", "other", "operator"))
    rolled, unfinished = SimulatedRuntime(holder).event(), "the restarts have not come to their end"
    rolling.problems.add(unfinished)

    async def hold() -> None:
        client = rolling.client(holder)
        await (await client.lock("longest", ttl=LONGEST_TTL).acquire(5.0)).release()
        lease = await rolling.acquire(client, holder, TTL, 5.0)
        await rolled.wait(None)
        rolling.problems.remove(unfinished)
        if not lease.held:
            rolling.problems.add("a rolling restart has cost a lease")
        await rolling.release(lease)

    async def roll() -> None:
        await sleep(operator, 1.0)
        for index in chance.sample(range(rolling.nodes_count), rolling.nodes_count):
            down = chance.uniform(0.05, 0.5)
            rolling.restart(index, down)
            # Not by the time alone: while its key is in the snapshot of a node, only an acquisition asks for the mark.
            await sleep(operator, down)
            while not all(map(rolling.votes, rolling.nodes)):
                await sleep(operator, 0.1)
            # In this time a renewal restores the key; one may find that a contender has the vote for some ms.
            await sleep(operator, TTL)
        rolled.set()

    holder.start(hold(), "hold")
    other.start(come_and_go(rolling, other, TTL, (0.0, 0.0)), "contend")
    operator.start(roll(), "roll")
    return rolling


def stormy(seed: int) -> Rolling:
    """Restart nodes at any time, stop clients and nodes, cut the network, lose and delay messages."""
    chance = random.Random(f"stormy {seed}")
    lost = chance.choice((0.0, 0.05))
    slow = Conditions(
        latency=(0.001, 0.02), requests_lost=lost, answers_lost=lost, slow=chance.choice((0.05, 0.25)),
        slow_max=chance.uniform(0.5, 3.0),
    )  # fmt: skip
    rolling = Rolling(seed, slow, chance.choice((0.3, 1.0, 3.0)), chance.choice((3, 3, 5)))
    world, clients = rolling.world, [rolling.world.process(name) for name in ("alice", "bob", "carol")]
    for process, ttl, longest in zip(clients, (TTL, TTL, LONGEST_TTL), (8.0, 2.0, 1.0), strict=True):
        process.start(come_and_go(rolling, process, ttl, (0.0, longest)), "come and go")
    for _ in range(chance.choice((3, 6, 9))):
        at, index, seconds = chance.uniform(1.0, 10.0), chance.randrange(rolling.nodes_count), chance.uniform(0.05, 2.0)
        process, kind = chance.choice(clients), chance.random()
        if kind < 0.6:
            world.call_at(at, rolling.restart, index, seconds)
        elif kind < 0.7:
            world.call_at(at, rolling.nodes[index].node.pause)
            world.call_at(at + seconds, rolling.nodes[index].node.resume)
        elif kind < 0.8:
            world.call_at(at, process.pause)
            world.call_at(at + seconds, process.resume)
        else:
            world.call_at(at, rolling.network.cut, process, rolling.nodes[index].node)
            world.call_at(at + 4 * seconds, rolling.network.heal, process, rolling.nodes[index].node)
    return rolling


def releasing(seed: int) -> Rolling:
    """
    Release leases at any time, also while a renewal restores their keys, and never again find them held.

    Messages overtake one another, as on two connections, but none is later than its caller waits.
    """
    chance = random.Random(f"releasing {seed}")
    rolling = Rolling(seed, Conditions(latency=(0.001, 0.01), slow=0.3, slow_max=0.1), 1.0, 3, snapshots=False)
    world = rolling.world
    for name in ("alice", "bob"):
        process = world.process(name)
        process.start(come_and_go(rolling, process, 2.0, (0.0, 4.0)), "come and go")
    for step in range(3):
        world.call_at(1.0 + 3.0 * step, rolling.restart, chance.randrange(3), chance.uniform(0.05, 0.5))
    for step in range(120):
        world.call_at(step / 10, rolling.look_at_released)
    return rolling


KINDS = (orderly, *(stormy, releasing) * 3)
SECONDS = {orderly: 60.0, stormy: 12.0, releasing: 12.0}


def play(seed: int) -> tuple[Rolling, str]:
    """Run the schedule of a seed, of each kind in turn."""
    make = KINDS[seed % len(KINDS)]
    rolling = make(seed)
    return rolling, rolling.end(SECONDS[make])


@pytest.mark.timeout(600)
def test_rolling_restart_makes_no_second_holder_and_costs_no_lease(seeds: range) -> None:
    """Whatever else happens there is one holder; who waits between two restarts loses no lease."""
    for seed in apart(seeds):
        _, problem = play(seed)
        assert not problem, f"seed {seed}: {problem}"


def early(node: VotingNode, lock: str, value: str, ttl_ms: int, *_: Argument) -> Answer:
    """Take a lock at a node, whether it may vote or not."""
    holder = node._get("lock", lock)
    if holder is not None:
        return [0, node._left_ms(lock), holder.encode(), 0]
    node._set("lock", lock, value, ttl_ms)
    return 1


def restore_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes their keys back before they may vote."""
    ask = SimulatedNodes.ask

    async def ask_early(
        self: SimulatedNodes, op: Op, keys: LockKeys, arguments: Sequence[Argument], **options: Any
    ) -> list[Answer]:
        if is_restoring(op, options):
            op = cast("Op", SimpleNamespace(name="early"))
        return await ask(self, op, keys, arguments, **options)

    monkeypatch.setattr(VotingNode, "early", early, raising=False)
    monkeypatch.setattr(SimulatedNodes, "ask", ask_early)


def restore_without_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all nodes their keys back, also if no majority has said that it has them: it may have been released."""
    renew = RedlockBackend.renew

    async def renew_anyhow(self: RedlockBackend, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes = await renew(self, grants)
        for grant, outcome in zip(grants, outcomes, strict=True):
            if isinstance(outcome, Gone):
                held: Held = grant.state
                arguments = held.value, round(grant.ttl * 1000), 1, held.metadata, grant.token
                await self._nodes.ask(ACQUIRE, held.keys, arguments, last_arguments=self._no_entries)
        return outcomes

    monkeypatch.setattr(RedlockBackend, "renew", renew_anyhow)


def restore_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not see that a lease is released while its key is being restored."""
    monkeypatch.setattr(Held, "ended", property(lambda _: False, lambda *_: None))


class LateAtNode1(Network):
    """Carries messages, but what carol sends to node 1 is under way for three seconds, from some time on."""

    late = False

    def _carry(self, way: tuple[str, str, bool], function: Callable[..., object], *arguments: object) -> None:
        if way == ("carol", "node1", True) and self.late:
            self.world.call_in(3.0, function, *arguments)
        else:
            super()._carry(way, function, *arguments)


def forgotten_vote() -> Rolling:
    """
    Restart a node without its data while it has voted for an acquisition that is still under way.

    Alice holds 0 and 1. Carol's vote of 2 is forgotten; her message to 1 arrives when alice's key there has expired,
    because alice is cut off from 1. If 2 has become alice's by then, both have a majority. (In two rounds carol would
    notice.)
    """
    rolling = Rolling(1, CALM, 0.3, 3)
    world, nodes = rolling.world, rolling.nodes
    rolling.network = network = LateAtNode1(world)
    alice, carol = world.process("alice"), world.process("carol")
    ready = SimulatedRuntime(carol).event()

    async def hold() -> None:
        client = rolling.client(alice)
        await (await client.lock("longest", ttl=6.0).acquire(5.0)).release()
        await sleep(alice, 1.0)
        lease = await rolling.acquire(client, alice, TTL, 5.0)
        nodes[2]._delete("lockkit:x")
        network.late = True
        ready.set()
        await sleep(alice, 0.1)
        rolling.restart(2, 0.05)
        await sleep(alice, 1.2)
        rolling.network.cut(alice, nodes[1].node)
        await sleep(alice, 5.0)
        await lease.release()

    async def contend() -> None:
        await sleep(carol, 0.5)
        rolling.timeout = 5.0
        client = rolling.client(carol, fencing=False)
        await (await client.lock("first", ttl=6.0).acquire(5.0)).release()  # in two rounds; later ones take one
        await ready.wait(None)
        lease = await rolling.acquire(client, carol, 6.0, 5.0)
        await sleep(carol, 1.0)
        await lease.release()

    alice.start(hold(), "hold")
    carol.start(contend(), "contend")
    return rolling


@pytest.mark.parametrize("is_early", [False, True], ids=["when it may vote", "at once"])
def test_node_that_may_not_vote_must_not_get_its_key_back(monkeypatch: pytest.MonkeyPatch, *, is_early: bool) -> None:
    """What it has forgotten may be a vote for another client."""
    if is_early:
        restore_early(monkeypatch)
    rolling = forgotten_vote()
    problem = rolling.end(10.0)
    assert ("two holders" in problem) is is_early, problem
    assert {belief.client for belief in rolling.witness.beliefs} == {"alice", "carol"}


@pytest.mark.parametrize(
    ("mutant", "known"),
    [(restore_without_majority, 160), (restore_released, 37)],
    ids=["without a majority", "released meanwhile"],
)
def test_mutant_that_takes_a_released_lock_back_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody believes in it, but nobody else gets it for a ttl."""
    mutant(monkeypatch)
    seeds = (seed for seed in known_first(known, range(3000)) if KINDS[seed % len(KINDS)] is releasing)
    assert any("a released lock is held" in play(seed)[1] for seed in apart(seeds))
