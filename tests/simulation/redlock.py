"""
Redlock on simulated time: nodes that do what the Lua scripts do, and the backend's own code asking them.

Everything that decides is the code that users run: `lockkit.backends.redlock.backend` and its treatment of restarted
nodes, and the engine above them. Only the nodes and the connections to them are models. That the scripts do what is
modelled here is shown on real nodes in ``tests/backends/redlock/test_backend.py``.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from lockkit.backends.redlock.backend import OPTIONS, RedlockBackend
from lockkit.backends.redlock.nodes import NodeDown, Nodes
from lockkit.errors import BackendUnavailable, Unsupported
from lockkit.simulation import (
    CHECKS,
    Fault,
    LockServer,
    NoAnswer,
    Node,
    SimulatedRuntime,
    Simulation,
    Verdict,
    draw,
)
from lockkit.simulation.checker import Problem
from lockkit.simulation.evidence import read
from lockkit.simulation.history import Quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lockkit.backend import Busy, Grant, LossReason, Request
    from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, Op
    from lockkit.simulation import History, Network, Process, Schedule, World
    from lockkit.simulation.evidence import Seen
    from lockkit.simulation.member import Member

NODES = 5

RESET = "the connection was ended by a restart"


SAVE_CHANCE = 0.02
"""How probably a node writes a snapshot after a command."""


class VotingNode:
    """
    One Redis node: its keys, and each Lua file as a method.

    Attributes:
        saves: What it forgets, it forgets back to its last snapshot.
    """

    def __init__(self, world: World, index: int, *, rate: float, wall_offset: float, info: bool = True) -> None:
        """
        Start without data.

        Args:
            world: Where it is.
            index: Its number.
            rate: Of its clock.
            wall_offset: Of its time of day, seconds.
            info: Clients may ask for its run id.
        """
        self.node = Node(world, f"node{index}", rate=rate, wall_offset=wall_offset)
        self.node.stopped.append(self._stopped)
        self.run = 1
        self.saves = False
        self._info = info
        self._chance = world.chance(f"snapshots of node{index}")
        self._forget()
        self._snapshot = self._data()

    def _forget(self) -> None:
        self._strings: dict[tuple[str, str], tuple[str, float]] = {}
        self._fences: dict[str, int] = {}
        self.mark: dict[str, int] | None = None

    def _data(self) -> tuple[dict[tuple[str, str], tuple[str, float]], dict[str, int], dict[str, int] | None]:
        return dict(self._strings), dict(self._fences), None if self.mark is None else dict(self.mark)

    def _stopped(self, lose_data: bool) -> None:  # noqa: FBT001 - as Node says it
        self.run += 1
        if lose_data and self.saves:
            self._strings, self._fences, self.mark = self._snapshot
            self._snapshot = self._data()
        elif lose_data:
            self._forget()

    def _is_marked(self) -> bool:
        """Whether there is a mark of the present run, as far as a client can tell."""
        return self.mark is not None and (self.mark["run"] == self.run or not self._info)

    def execute(self, run: int, op: Op, lock: str, arguments: Sequence[Argument]) -> Answer | str:
        """Do what came by a connection that was opened in a certain run of this server."""
        if run != self.run:
            return RESET
        method: Callable[..., Answer] = getattr(self, op.name)
        answer = method(lock, *arguments)
        if self._chance.random() < SAVE_CHANCE:
            self.save()
        return answer

    def save(self) -> None:
        """Write a snapshot."""
        self._snapshot = self._data()

    def _get(self, what: str, lock: str) -> str | None:
        value, until = self._strings.get((what, lock), (None, 0.0))
        return value if until > self.node.now() else None

    def _left_ms(self, lock: str) -> int:
        return math.ceil((self._strings["lock", lock][1] - self.node.now()) * 1000)

    def _set(self, what: str, lock: str, value: str, ttl_ms: int) -> None:
        self._strings[what, lock] = value, self.node.now() + ttl_ms / 1000

    def _delete(self, lock: str) -> None:
        del self._strings["lock", lock]

    def acquire(self, lock: str, value: str, ttl_ms: int, metadata: str, place: str) -> Answer:
        """See ``acquire.lua``."""
        del metadata, place
        mark = self.mark
        if mark is None or not self._is_marked():
            return [-1]
        wait_us = mark["until_us"] - self.node.wall_us()
        if wait_us > 0:
            return [-2, math.ceil(wait_us / 1000)]
        holder = self._get("lock", lock)
        if holder is not None:
            return [0, self._left_ms(lock), holder.encode(), 0]
        mark["ttl_ms"] = max(mark["ttl_ms"], ttl_ms)
        self._set("lock", lock, value, ttl_ms)
        return max(self._fences.get(lock, 0), self.node.wall_us())

    def fence(self, lock: str, value: str, token: int, fence_ms: int) -> Answer:
        """See ``fence.lua``."""
        del fence_ms
        if self._get("lock", lock) != value:
            return 0
        self._fences[lock] = max(self._fences.get(lock, 0), token)
        return 1

    def renew(self, lock: str, value: str, ttl_ms: int, fence_ms: int) -> Answer:
        """See ``renew.lua``."""
        del fence_ms
        holder = self._get("lock", lock)
        if holder == value:
            self._set("lock", lock, value, ttl_ms)
            if self.mark is not None:
                self.mark["ttl_ms"] = max(self.mark["ttl_ms"], ttl_ms)
            return 1
        return 0 if holder is None else -1

    def release(self, lock: str, value: str) -> Answer:
        """See ``release.lua``."""
        if self._get("lock", lock) != value:
            return 0
        self._delete(lock)
        return 1

    undo = release

    def holders(self, lock: str) -> Answer:
        """See ``holders.lua``."""
        holder = self._get("lock", lock)
        if holder is None:
            return []
        return [holder.encode(), self._left_ms(lock), str(self._fences.get(lock, "")).encode(), b"", 0]

    def look(self, lock: str) -> Answer:
        """See ``look.lua``."""
        del lock
        mark = self.mark
        if mark is None:
            return [0, 0, 0, 0]
        now_us = self.node.wall_us()
        wait_ms = max(0, math.ceil((mark["until_us"] - now_us) / 1000))
        return [1 if self._is_marked() else 2, wait_ms, mark["ttl_ms"], (now_us - mark["since_us"]) // 1000]

    def admit(self, lock: str, wait_ms: int, ttl_ms: int) -> Answer:
        """See ``admit.lua``."""
        del lock
        if self._is_marked():
            return 0
        known_ms = 0 if self.mark is None else self.mark["ttl_ms"]
        now_us = self.node.wall_us()
        self.mark = {
            "run": self.run, "ttl_ms": max(known_ms, ttl_ms), "since_us": now_us, "until_us": now_us + wait_ms * 1000,
        }  # fmt: skip
        return 1


class SimulatedNodes(Nodes):
    """One process's connections to the nodes. A message is lost or late as the network has it; nobody is woken."""

    def __init__(self, process: Process, nodes: Sequence[VotingNode], network: Network, timeout: float) -> None:
        """Connect."""
        self.labels = [node.node.name for node in nodes]
        self._process = process
        self._nodes = nodes
        self._network = network
        self._timeout = timeout
        self._runs = [node.run for node in nodes]

    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        last_arguments: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        send_later_seconds: float = 0.0,
        until: float = math.inf,
    ) -> list[Answer]:
        """See `Nodes.ask`."""
        answers: list[Answer] = [None] * len(self._nodes)
        tasks = {}
        for index in range(len(self._nodes)) if only is None else only:
            values = arguments if last_arguments is None else [*arguments, last_arguments[index]]
            call = self._ask_one(index, op, keys.lock, values, until)
            tasks[index] = self._process.start(call, f"ask {op.name} {index}", awaited=True)
        for index, task in tasks.items():
            await task.join()
            answers[index] = task.result()
            if send_later_seconds and isinstance(answers[index], BackendUnavailable):
                values = arguments if last_arguments is None else [*arguments, last_arguments[index]]
                self._process.start(self._flush(index, op, keys.lock, values, send_later_seconds), "flush")
        return answers

    async def _ask_one(
        self, index: int, op: Op, lock: str, arguments: Sequence[Argument], until: float = math.inf
    ) -> Answer:
        node, run = self._nodes[index], self._runs[index]
        timeout = max(0.0, min(self._timeout, until - SimulatedRuntime(self._process).now()))
        try:
            answer = await self._network.call(
                self._process, node.node, lambda: node.execute(run, op, lock, arguments), timeout
            )
        except NoAnswer as error:
            unavailable = BackendUnavailable(str(error))
            # Refused: nothing was sent.
            return NodeDown(unavailable) if "refused" in str(error) else unavailable
        if answer is RESET:
            # The connection is opened anew, which is when the node's run is learnt.
            self._runs[index] = node.run
            return NodeDown(BackendUnavailable(RESET))
        return answer  # type: ignore[return-value]  # no other str

    async def _flush(self, index: int, op: Op, lock: str, arguments: Sequence[Argument], seconds: float) -> None:
        """Ask again until there is an answer."""
        runtime = SimulatedRuntime(self._process)
        until = runtime.now() + seconds
        while runtime.now() < until:
            await runtime.sleep(runtime.random.uniform(0.01, 0.3))
            if not isinstance(await self._ask_one(index, op, lock, arguments), BackendUnavailable):
                return

    async def retry(self) -> None:
        """See `Nodes.retry`. Each question is sent to all nodes anyway."""

    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: float = math.inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        """See `Nodes.ask_many`."""
        del last
        by_call = [await self.ask(op, keys, arguments, until=until) for keys, arguments in calls]
        return [list(answers) for answers in zip(*by_call, strict=True)]

    def queue_entries(self, request: Request) -> list[str]:
        """See `Nodes.queue_entries`."""
        raise NotImplementedError

    async def listen(self, until: float) -> bool:
        """See `Nodes.listen`. Waiters look now and then."""
        del until
        return False

    def forget(self, request: Request) -> None:
        """See `Nodes.forget`."""

    def scan(self, index: int, prefix: str, name_prefix: str) -> NoReturn:
        """See `Nodes.scan`."""
        raise Unsupported(f"simulated node {index} does not list {prefix}:{name_prefix}")

    async def erase(self, prefix: str) -> None:
        """See `Nodes.erase`."""
        raise Unsupported(f"a simulated node ends with its world, and {prefix!r} with it")

    async def close(self) -> None:
        """See `Nodes.close`."""


class Hosting:
    """The engine's side, as far as the backend needs it here."""

    def __init__(self, process: Process) -> None:
        """Serve a process."""
        self.runtime = SimulatedRuntime(process)

    def lost(self, owner: str, reason: LossReason) -> None:
        """See `lockkit.backend.Host.lost`. Not used by this backend."""
        raise NotImplementedError

    def confirm_soon(self) -> None:
        """See `lockkit.backend.Host.confirm_soon`."""


class RecordingBackend(RedlockBackend):
    """Takes down each grant, also of those that come too late to be handed out."""

    grants: list[tuple[str, int]]

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        outcome = await super().try_acquire(request)
        if hasattr(outcome, "token"):
            self.grants.append((request.name, outcome.token))
        return outcome


class SimulatedServers(LockServer):
    """All the nodes, in the place of the one server that the simulation knows."""

    def __init__(self, node: Node, network: Network, history: History, **options: Any) -> None:
        """Start with no nodes; the simulation makes them."""
        super().__init__(node, network, history, **options)
        self.nodes: list[VotingNode] = []
        self.grants: list[tuple[str, int]] = []

    def left(self, *, final: bool) -> Quiet:
        """See `LockServer.left`. Of no interest here."""
        return Quiet(self.node.world.now, final, (), ())


def redlock_at(
    process: Process, nodes: Sequence[VotingNode], network: Network, timeout: float, **options: object
) -> RecordingBackend:
    """Make the backend of a process; `options` in place of the defaults."""
    given = {name: option.default for name, option in OPTIONS.items()} | options
    simulated = SimulatedNodes(process, nodes, network, timeout)
    backend = RecordingBackend("redlock://simulated", simulated, given, Hosting(process))
    backend.grants = []
    return backend


class RedlockSimulation(Simulation):
    """A random schedule on several nodes."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        fencing: bool = True,
        durable: bool = False,
        snapshots: bool = True,
        node_rate: float | None = None,
        wall_offset: float | None = None,
        spared: int = 1,
    ) -> None:
        """
        Make the world of a schedule.

        Args:
            schedule: What will happen. Faults of the server are those of one of the nodes.
            fencing: Two rounds.
            durable: Restarted nodes vote at once.
            snapshots: Of restarted nodes that lose data, half come back with an old snapshot; else all are empty.
            node_rate: Of all nodes' clocks; None: each its own, as wrong as the schedule allows.
            wall_offset: How wrong their times of day are at most; None: see `_wall_offset`.
            spared: So many nodes never lose their data: all at once is what no majority can survive.
        """
        self.spared = spared
        self.snapshots = snapshots

        def connect(process: Process, server: LockServer, network: Network, call_timeout: float) -> RedlockBackend:
            assert isinstance(server, SimulatedServers)
            if not server.nodes:
                server.nodes = self._make_nodes(schedule, node_rate, wall_offset)
            made = redlock_at(process, server.nodes, network, call_timeout, fencing=fencing, durable=durable)
            made.grants = server.grants
            return made

        super().__init__(schedule, server=SimulatedServers, backend=connect)
        assert isinstance(self.server, SimulatedServers)
        self.servers = self.server

    def _make_nodes(self, schedule: Schedule, rate: float | None, offset: float | None) -> list[VotingNode]:
        chance = self.world.chance("nodes")
        offset = _wall_offset(schedule) if offset is None else offset
        drift = abs(schedule.server_rate - 1.0)
        return [
            VotingNode(
                self.world,
                index,
                rate=1.0 + chance.uniform(-drift, drift) if rate is None else rate,
                wall_offset=chance.uniform(-offset, offset),
            )
            for index in range(NODES)
        ]

    def _apply(self, fault: Fault) -> None:
        nodes = self.servers.nodes
        # Several at a time, now and then more than a majority.
        chance = self.world.chance(f"fault {fault.at}")
        chosen = chance.sample(range(NODES), chance.choice((1, 1, 2, 2, 3, 4)))
        if self.healed:
            return
        if fault.kind == "server pause":
            for index in chosen:
                nodes[index].node.pause()
                self.world.call_in(fault.seconds, nodes[index].node.resume)
        elif fault.kind == "server restart":
            for index in chosen:
                nodes[index].saves = self.snapshots and chance.random() < 0.5
                nodes[index].node.stop(lose_data=fault.variant < 0.5 and index >= self.spared)
                self.world.call_in(fault.seconds * chance.random(), nodes[index].node.start)
        elif fault.kind == "clock jump":
            nodes[chosen[0]].node.wall_clock.jump(fault.seconds)
        elif fault.kind == "cut":
            for index in chosen:
                self._cut_node(self.clients[fault.client], nodes[index].node, fault)
        else:
            super()._apply(fault)

    def _cut_node(self, member: Member, node: Node, fault: Fault) -> None:
        requests, answers = fault.variant < 0.67, fault.variant > 0.33
        self.network.cut(member.process, node, requests=requests, answers=answers)
        self.world.call_in(fault.seconds, self.network.heal, member.process, node)

    def _heal(self) -> None:
        if not self.healed:
            for voting in self.servers.nodes:
                voting.node.start()
                voting.node.resume()
                for member in self.clients:
                    self.network.heal(member.process, voting.node)
        super()._heal()

    def judge(self) -> Verdict:
        """Run it, and judge by what clients believed and were given; there is no single server to compare with."""
        self.run()
        try:
            seen = read(self.history)
        except Exception as error:  # noqa: BLE001 - nothing is known about this history
            return Verdict("unknown", reason=f"{type(error).__name__}: {error}")
        problems = [
            problem
            for name in ("exclusion", "deadlines", "loss", "storage")
            for problem in CHECKS[name](seen, self.limits)
        ]
        problems += [Problem("progress", bug.at, repr(bug)) for bug in seen.bugs]
        problems += self._token_problems(seen)
        return Verdict("invalid", tuple(problems)) if problems else Verdict("valid")

    def _token_problems(self, seen: Seen) -> list[Problem]:
        problems = [
            Problem(
                "tokens",
                0.0,
                f"lock {name!r}: token {token} was granted {self.servers.grants.count((name, token))} times",
            )
            for name, token in {*self.servers.grants}
            if self.servers.grants.count((name, token)) > 1
        ]
        newest: dict[str, int] = {}
        for lease in sorted(seen.leases.values(), key=lambda lease: lease.acquired.at):
            acquired = lease.acquired
            if acquired.token <= newest.get(acquired.name, 0):
                text = f"lock {acquired.name!r}: token {acquired.token} after {newest[acquired.name]}"
                problems.append(Problem("tokens", acquired.at, text))
            newest[acquired.name] = max(acquired.token, newest.get(acquired.name, 0))
        return problems


def _loses_data(schedule: Schedule) -> bool:
    return any(fault.kind == "server restart" and fault.variant < 0.5 for fault in schedule.faults)


def _wall_offset(schedule: Schedule) -> float:
    """
    How far the nodes' times of day are apart: it does not matter unless data are lost.

    After a loss, tokens stand on the time of day: apart by less than the shortest wait of a restarted node.
    """
    return 0.05 * schedule.ttl if _loses_data(schedule) else 1000.0


def schedule_of(seed: int) -> Schedule:
    """
    Draw the schedule of a seed, for several nodes.

    Without `break_lock`, which makes second holders on purpose; without clocks that jump where data are lost, because
    the wait after a restart is timed by the node's own clock. With more faults than of a single server.
    """
    schedule = draw(seed)
    chance = random.Random(f"{seed} nodes")
    more = [
        Fault(
            chance.uniform(0.0, schedule.healed_at),
            chance.choice(("server restart", "server pause")),
            0,
            chance.uniform(0.05, 1.0) * schedule.ttl,
            chance.random(),
        )
        for _ in range(chance.choice((0, 1, 2, 4)))
    ]
    schedule = replace(schedule, faults=tuple(sorted([*schedule.faults, *more])))
    kinds = {"break", "clock jump"} if _loses_data(schedule) else {"break"}
    return replace(schedule, faults=tuple(fault for fault in schedule.faults if fault.kind not in kinds))
