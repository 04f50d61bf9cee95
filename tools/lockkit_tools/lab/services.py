"""
The lock services of the lab: for each backend its simulated servers, and clients of them.

What decides is the code that users run, wherever its connections can be simulated: the engine always, and the backend
of Redlock. For the others a model of a lock service stands in, and `Service.parts` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar

from lockkit.aio import Client
from lockkit.backend import Busy, Grant, Host, LockBackend, LossReason, Request
from lockkit.backends.redlock.backend import OPTIONS as REDLOCK_OPTIONS
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, Op
from lockkit.units import Instant, Seconds
from lockkit_tools.lab.record import Mark, Message, Record, Span
from lockkit_tools.lab.scenario import TTL, Backend, Scene
from lockkit_tools.simulation.backend import SimulatedBackend, client_of
from lockkit_tools.simulation.network import Conditions, Network, Node
from lockkit_tools.simulation.redlock import Hosting, SimulatedNodes, VotingNode
from lockkit_tools.simulation.server import LockServer
from lockkit_tools.simulation.server import Record as LockRecord
from lockkit_tools.simulation.world import Process, World

NAME = "report"
"""The lock of every scene."""

WALL_CLOCK = -1_700_000_000.0 + 1.0
"""The servers' time of day starts at 1 s, so that tokens are small numbers."""

RUNNING_SINCE = 3600.0
"""Nodes of a Redlock have been running for so long when a scene starts, seconds: longer than any lease."""


CALL_SECONDS = 1.0
"""Seconds that a client of a model waits for an answer. Shorter than drivers do, so that pictures stay short."""

REPLICATION_SECONDS = 0.001

ACKNOWLEDGE_SECONDS = 0.4
"""Seconds that a client waits for replicas to acknowledge."""


class RecordingNetwork(Network):
    """
    Takes down every message.

    Attributes:
        kind: What the message that is sent next is for.
    """

    def __init__(self, world: World, conditions: Conditions, record: Record) -> None:
        super().__init__(world, conditions)
        self.kind = ""
        self._record = record

    def _carry(self, way: tuple[str, str, bool], function: Callable[..., object], *arguments: object) -> None:
        process, node, is_request = way
        source, target = (process, node) if is_request else (node, process)
        message = Message(source, target, self.world.now, None, self.kind)
        self._record.messages.append(message)

        def arrive() -> None:
            message.arrives = self.world.now
            before, self.kind = self.kind, message.kind
            function(*arguments)
            self.kind = before

        super()._carry(way, arrive)


class Keeping:
    """For whom a server keeps the lock, as spans of its lane."""

    def __init__(self, record: Record, node: Node) -> None:
        self._record = record
        self._node = node
        self._span: Span | None = None
        self._value = ""
        self._until = inf
        self.owners: dict[int, str] = {}

    def put(self, value: str, until: Instant) -> None:
        """The lock is kept for an owner, until its clock shows `until`."""
        self.settle()
        if self._span is None or value != self._value:
            self.drop()
            offered = value.startswith("next:")
            self._span = Span(self._node.name, "offered" if offered else "kept", self._node.world.now, inf)
            self._span.who = value.removeprefix("next:").partition(".")[0]
            self._record.spans.append(self._span)
        self._value, self._until = value, until

    def drop(self) -> None:
        """The lock is free, or the scene ends."""
        self.settle()
        self._close(self._node.world.now)

    def settle(self) -> None:
        """Close what has expired. Call it before the clock jumps."""
        if self._span is not None and self._until < inf:
            at = self._node.clock.true_time(self._until)
            if at <= self._node.world.now:
                self._close(at)

    def jumped(self) -> None:
        """Close what the jump of the clock has ended."""
        if self._node.now() >= self._until:
            self._close(self._node.world.now)

    def _close(self, at: float) -> None:
        if self._span is not None:
            self._span.end = max(at, self._span.start)
            self._span = None


class Service:
    """
    A lock service.

    Attributes:
        parts: Which code is lockkit's own, and what is a model.
        keeping: Whom each of them keeps the lock for.
    """

    parts: ClassVar[str]
    expires_by_time_of_day: ClassVar[bool] = True

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        self.world = world
        self.network = network
        self.record = record
        self.scene = scene
        self.backend: Backend = scene.backends[0]
        self.nodes: dict[str, Node] = {}
        self.keeping: dict[str, Keeping] = {}
        self.owners: dict[str, str] = {}

    def connect(self, process: Process) -> Client:
        """Make a client in a process."""

        def make(host: Host) -> LockBackend:
            backend = self._backend(process, host)
            acquire = backend.try_acquire

            async def try_acquire(request: Request) -> Grant | Busy:
                self.owners[request.owner] = process.name
                return await acquire(request)

            backend.try_acquire = try_acquire  # type: ignore[method-assign]  # of this one only, to know whose it is
            return backend

        return client_of(process, make, ttl=TTL)

    def add(self, node: Node) -> Keeping:
        """Make a machine known."""
        self.nodes[node.name] = node
        node.wall_clock.jump(WALL_CLOCK)
        self.keeping[node.name] = Keeping(self.record, node)
        return self.keeping[node.name]

    def jump(self, name: str, seconds: Seconds) -> None:
        """Set a machine's clock."""
        node = self.nodes[name]
        self.keeping[name].settle()
        node.wall_clock.jump(seconds)
        if self.expires_by_time_of_day:
            node.clock.jump(seconds)
            self.keeping[name].jumped()

    def start(self, name: str) -> None:
        """Let it run again."""
        self.nodes[name].start()

    def promote(self) -> None:
        """Let the other machine serve: for services that have one."""

    def set_lag(self, lag: Seconds | None) -> None:
        """Stall replication (`inf`), or let it go on (None)."""

    def finish(self) -> None:
        """End the spans, and name the clients in them."""
        for keeping in self.keeping.values():
            keeping.drop()
        for span in self.record.spans:
            if span.kind in {"kept", "offered"}:
                span.who = self.owners.get(span.who, span.who)

    def _backend(self, process: Process, host: Host) -> LockBackend:
        raise NotImplementedError


def label_of(name: str) -> str:
    """Name a machine for readers."""
    return f"node {name[4:]}" if name.startswith("node") else name


# -- Redlock ----------------------------------------------------------------------------------------------------------


class _WatchedNode(VotingNode):
    """A node of a Redlock whose lock is watched."""

    keeping: Keeping | None = None
    started: float = 0.0
    record: Record

    def _set(self, what: str, lock: str, value: str, ttl_ms: int) -> None:
        super()._set(what, lock, value, ttl_ms)
        if what == "lock" and self.keeping is not None:
            self.keeping.put(value, self._strings[what, lock][1])

    def _delete(self, lock: str) -> None:
        super()._delete(lock)
        if self.keeping is not None:
            self.keeping.drop()

    def _forget(self) -> None:
        super()._forget()
        if self.keeping is not None:
            self.keeping.drop()

    def save(self) -> None:
        """Write no snapshot: what a node of the lab forgets is everything."""

    def admit(self, lock: str, wait_ms: int, ttl_ms: int) -> Answer:
        answer = super().admit(lock, wait_ms, ttl_ms)
        if answer == 1 and self.mark is not None:
            until = self.node.wall_clock.true_time(self.mark["until_us"] / 1e6)
            if until > self.node.world.now:
                self.record.spans.append(Span(self.node.name, "silent", self.started, until))
        return answer


class _WatchedNodes(SimulatedNodes):
    """Tells the network what its messages are for, and the story which round begins."""

    record: Record | None = None

    async def ask(self, op: Op, keys: LockKeys, arguments: Sequence[Argument], **options: Any) -> list[Answer]:
        if self.record is not None and op.name in _ROUNDS:
            count = len(options.get("only") or self.labels)
            name = self._process.name
            text = _ROUNDS[op.name].format(name=name, count=count)
            self.record.marks.append(Mark(self._process.world.now, name, text))
        return await super().ask(op, keys, arguments, **options)

    async def _ask_one(
        self, index: int, op: Op, lock: str, arguments: Sequence[Argument], until: Instant = inf
    ) -> Answer:
        assert isinstance(self._network, RecordingNetwork), "made by RedlockService"
        self._network.kind = op.name
        return await super()._ask_one(index, op, lock, arguments, until)


_ROUNDS = {
    "acquire": "Round 1: {name} asks all {count} nodes for the lock.",
    "fence": "{name} has {count} votes. Round 2: it writes the highest token plus one to those nodes.",
}
"""What is said about the rounds of a request, where messages are drawn."""


class RedlockService(Service):
    """Five independent nodes."""

    parts = "lockkit's engine and Redlock backend on five simulated nodes"

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        super().__init__(world, network, record, scene)
        self.voting: dict[str, _WatchedNode] = {}
        for index, name in enumerate(self.backend.nodes, 1):
            voting = self.voting[name] = _WatchedNode(world, index, rate=1.0, wall_offset=0.0)
            voting.record = record
            voting.keeping = self.add(voting.node)
            since_us = voting.node.wall_us() - int(RUNNING_SINCE * 1e6)
            ttl_ms = int(TTL * 1000)
            voting.mark = {"run": 1, "ttl_ms": ttl_ms, "since_us": since_us, "until_us": since_us + ttl_ms * 1000}

    def start(self, name: str) -> None:
        super().start(name)
        self.voting[name].started = self.world.now

    def _backend(self, process: Process, host: Host) -> LockBackend:
        options: dict[str, Any] = {name: option.default for name, option in REDLOCK_OPTIONS.items()}
        options.update(self.backend.options)
        timeout = max(float(options["node_timeout"]), 4 * self.scene.latency[1])
        nodes = _WatchedNodes(process, list(self.voting.values()), self.network, timeout)
        if self.scene.messages:
            nodes.record = self.record
        del host  # `Hosting` serves this backend, which reports no losses by itself
        return RedlockBackend("redlock://simulated", nodes, options, Hosting(process))


# -- a model of the others --------------------------------------------------------------------------------------------


class ModelServer(LockServer):
    """
    A server whose lock is watched, and which sends every change to its replicas, later.

    Attributes:
        replicas: The servers that follow it.
        lag: Seconds until this server has a change of its master; `inf` while replication is cut.
        version: Number of its last change.
        has: Number of the last change of its master that it has.
    """

    def __init__(self, node: Node, network: RecordingNetwork, keeping: Keeping) -> None:
        super().__init__(node, network, [])
        self.keeping = keeping
        self.replicas: list[ModelServer] = []
        self.lag = REPLICATION_SECONDS
        self.version = 0
        self.has = 0

    def renew(self, name: str, owner: str, ttl: Seconds) -> LossReason | None:
        reason = super().renew(name, owner, ttl)
        self._changed()
        return reason

    def replicate(self) -> None:
        """Send everything to the replicas."""
        self.version += 1
        for replica in self.replicas:
            if replica.lag < inf:
                records = {name: replace(record) for name, record in self.records.items()}
                self.node.world.call_in(replica.lag, replica._receive, self.version, records, dict(self.tokens))

    def _receive(self, version: int, records: dict[str, LockRecord], tokens: dict[str, int]) -> None:
        if version > self.has and self.lag < inf and self.node.up:
            self.has, self.records, self.tokens = version, records, tokens
            self._show()

    def _put(self, name: str, record: LockRecord) -> None:
        super()._put(name, record)
        self._changed()

    def _free(self, name: str, record: LockRecord, by: str, how: str) -> None:
        super()._free(name, record, by, how)
        self._changed()

    def _wake(self, name: str, since: Instant | None = None) -> None:
        super()._wake(name, since)
        if queue := self._queues.get(name):
            self.keeping.put(f"next:{queue[0].owner}", self._offered_until[name])

    def _stopped(self, lose_data: bool) -> None:  # noqa: FBT001 - as Node says it
        super()._stopped(lose_data)
        self._show()

    def _changed(self) -> None:
        self._show()
        self.replicate()

    def _show(self) -> None:
        """Draw whom it keeps the lock for; to whom it is offered, `_wake` draws."""
        for record in self.records.values():
            self.keeping.put(record.owner, record.until)
        if not self.records and not any(self._queues.values()):
            self.keeping.drop()


class ModelBackend(SimulatedBackend):
    """A client of the server that is the master now; with replicas, it holds only what so many of them have too."""

    def __init__(self, process: Process, service: ModelService, replicas: int) -> None:
        super().__init__(process, service.master, service.network, CALL_SECONDS)
        self._replicas = replicas

    def follow(self, master: ModelServer) -> None:
        """Ask another server from now on."""
        self._server = master

    async def try_acquire(self, request: Request) -> Grant | Busy:
        outcome = await super().try_acquire(request)
        if isinstance(outcome, Grant) and not await self._is_replicated():
            await self.abandon(request)
            return Busy(ACKNOWLEDGE_SECONDS)
        return outcome

    async def _is_replicated(self) -> bool:
        master, until = self._server, self._process.now() + ACKNOWLEDGE_SECONDS
        assert isinstance(master, ModelServer), "made by ModelService"
        version = master.version
        while sum(replica.has >= version for replica in master.replicas) < self._replicas:
            if self._process.now() >= until:
                return False
            await self._process.waiter(0.01).park()
        return True


class ModelService(Service):
    """A server, or one with a replica."""

    parts = "lockkit's engine; a model stands in for the backend and its servers"

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        super().__init__(world, network, record, scene)
        nodes = [Node(world, name) for name in self.backend.nodes]
        self._servers = [ModelServer(node, network, self.add(node)) for node in nodes]
        self._backends: list[ModelBackend] = []
        self.master = self._servers[0]
        self.master.replicas += self._servers[1:]

    def promote(self) -> None:
        former, self.master = self.master, self._servers[-1]
        former.replicas, self.master.replicas, self.master.lag = [], [former], former.lag
        for backend in self._backends:
            backend.follow(self.master)

    def start(self, name: str) -> None:
        """See `Service.start`. A replica asks its master for everything first."""
        super().start(name)
        self.master.replicate()

    def set_lag(self, lag: Seconds | None) -> None:
        for server in self._servers[1:]:
            server.lag = REPLICATION_SECONDS if lag is None else lag

    def _backend(self, process: Process, host: Host) -> LockBackend:
        del host
        self._backends.append(ModelBackend(process, self, self.backend.option("replicas", 0)))
        return self._backends[-1]


class QuorumService(ModelService):
    """A service whose members agree before they answer: the loss of one of them loses nothing."""

    expires_by_time_of_day = False


class ByHand(Service):
    """One Redis, used by plain commands on one key instead of lockkit."""

    parts = "no lockkit: a lock written by hand, on a simulated Redis"

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        super().__init__(world, network, record, scene)
        self.node = Node(world, *self.backend.nodes)
        self._keeping = self.add(self.node)
        self._key = ("", -inf)

    def look(self) -> str | None:
        """Run ``GET``."""
        value, until = self._key
        return value if until > self.node.now() else None

    def set_if_absent(self, value: str, seconds: Seconds = inf) -> bool:
        """Run ``SET key value NX PX``."""
        if self.look() is not None:
            return False
        self._key = value, self.node.now() + seconds
        self._keeping.put(*self._key)
        return True

    def swap(self, value: str) -> str | None:
        """Run ``GETSET``."""
        old = self.look()
        self.delete()
        self.set_if_absent(value)
        return old

    def delete(self) -> None:
        """Run ``DEL``."""
        self._key = ("", -inf)
        self._keeping.drop()


_SERVICES: dict[str, type[Service]] = {
    "redis": ModelService,
    "redis+sentinel": ModelService,
    "redlock": RedlockService,
    "etcd": QuorumService,
    "zookeeper": QuorumService,
    "by-hand": ByHand,
}


def open_service(world: World, network: RecordingNetwork, record: Record, scene: Scene) -> Service:
    """Start the service of a scene: that of its first backend."""
    return _SERVICES[scene.backends[0].kind](world, network, record, scene)


def parts_of(kind: str) -> str:
    """Say which code of a backend in the lab is lockkit's own, and what is a model."""
    return _SERVICES[kind].parts
