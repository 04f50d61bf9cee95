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
from lockkit.backend import Busy, Grant, Host, LockBackend, Request
from lockkit.backends.redlock.backend import OPTIONS as REDLOCK_OPTIONS
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, Op
from lockkit.units import Instant, Seconds
from lockkit_tools.lab.record import Mark, Message, Record, Span, SpanKind
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
    """Takes down every message."""

    def __init__(self, world: World, conditions: Conditions, record: Record) -> None:
        super().__init__(world, conditions)
        self.kind = ""  # what the message that is sent next is for
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


Kept = tuple[SpanKind, str, Instant]
"""``kept`` or ``offered``, for whom, and until when by the machine's clock."""


class Keeping:
    """For whom a machine keeps the lock, as spans of its lane."""

    def __init__(self, record: Record, node: Node, ask: Callable[[], Kept | None]) -> None:
        self._record = record
        self._node = node
        self._ask = ask
        self._span: Span | None = None
        self._was: Kept | None = None
        self._looked_at = 0.0

    def look(self) -> None:
        """Take down what has changed since the last look: after everything that happens, and before a clock jumps."""
        now, kept, was = self._node.world.now, self._ask(), self._was
        if self._span is not None and was is not None:
            if kept is not None and kept[:2] == was[:2]:
                was = self._was = kept
            if was is not kept or self._node.now() >= was[2]:
                expired = max(self._looked_at, self._node.clock.true_time(was[2])) if was[2] < inf else inf
                self._span.end = min(now, expired)
                self._span = None
        if self._span is None and kept is not None and self._node.now() < kept[2]:
            self._was = kept
            self._span = Span(self._node.name, kept[0], now, inf, kept[1].partition(".")[0])
            self._record.spans.append(self._span)
        self._looked_at = now


class Service:
    """A lock service."""

    parts: ClassVar[str]  # which code is lockkit's own, and what is a model
    expires_by_time_of_day: ClassVar[bool] = True

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        self.world = world
        self.network = network
        self.record = record
        self.scene = scene
        self.backend: Backend = scene.backends[0]
        self.nodes: dict[str, Node] = {}
        self.keeping: dict[str, Keeping] = {}  # whom each of them keeps the lock for
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

    def add(self, node: Node, ask: Callable[[], Kept | None]) -> None:
        """Make a machine known, and whom it keeps the lock for."""
        self.nodes[node.name] = node
        node.wall_clock.jump(WALL_CLOCK)
        self.keeping[node.name] = Keeping(self.record, node, ask)

    def look(self) -> None:
        """Look what has changed at the machines."""
        for keeping in self.keeping.values():
            keeping.look()

    def jump(self, name: str, seconds: Seconds) -> None:
        """Set a machine's clock."""
        node = self.nodes[name]
        self.look()
        node.wall_clock.jump(seconds)
        if self.expires_by_time_of_day:
            node.clock.jump(seconds)

    def start(self, name: str) -> None:
        """Let it run again."""
        self.nodes[name].start()

    def promote(self) -> None:
        """Let the other machine serve: for services that have one."""

    def set_lag(self, lag: Seconds | None) -> None:
        """Stall replication (`inf`), or let it go on (None)."""

    def finish(self) -> None:
        """Name the clients in the spans. One that is open lasts until the end."""
        self.look()
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
    """A node of a Redlock that says for whom it keeps the lock, and for how long it does not vote."""

    started: float = 0.0
    record: Record

    def kept(self) -> Kept | None:
        """Say for whom it keeps the lock."""
        found = [kept for (what, _), kept in self._strings.items() if what == "lock"]
        return ("kept", *found[0]) if found else None

    def admit(self, lock: str, wait_ms: int, ttl_ms: int, looked_at: bytes) -> Answer:
        answer = super().admit(lock, wait_ms, ttl_ms, looked_at)
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
            self.add(voting.node, voting.kept)
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
    """A server that says for whom it keeps the lock, or to whom it offers it."""

    def kept(self) -> Kept | None:
        """Say for whom it keeps the lock."""
        if record := self.records.get(NAME):
            return "kept", record.owner, record.until
        if (queue := self._queues.get(NAME)) and NAME in self._offered_until:
            return "offered", queue[0].owner, self._offered_until[NAME]
        return None


class ModelBackend(SimulatedBackend):
    """A client of the server that is the master now; with ``replicas``, it holds only what the replica has too."""

    def __init__(self, process: Process, service: ModelService) -> None:
        super().__init__(process, service.master, service.network, CALL_SECONDS)
        self._service = service

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
        service, until = self._service, self._process.now() + ACKNOWLEDGE_SECONDS
        version = service.version
        while service.backend.option("replicas", 0) and service.replicated < version:
            if self._process.now() >= until:
                return False
            await self._process.waiter(0.01).park()
        return True


class ModelService(Service):
    """A server, or one with a replica, which has every change of it later."""

    parts = "lockkit's engine; a model stands in for the backend and its servers"

    def __init__(self, world: World, network: RecordingNetwork, record: Record, scene: Scene) -> None:
        super().__init__(world, network, record, scene)
        self._servers = [ModelServer(Node(world, name), network, []) for name in self.backend.nodes]
        for server in self._servers:
            self.add(server.node, server.kept)
        self._backends: list[ModelBackend] = []
        self.master, self._replica = self._servers[0], self._servers[-1]
        self.lag = REPLICATION_SECONDS  # seconds until the replica has a change; `inf` while replication is cut
        self.version = self.replicated = 0  # numbers of the last change, and of the last that the replica has
        self._sent: object = None

    def look(self) -> None:
        super().look()
        records = {name: replace(record) for name, record in self.master.records.items()}
        if self._replica is not self.master and (records, self.master.tokens) != self._sent:
            self.version += 1
            self._sent = records, dict(self.master.tokens)
            if self.lag < inf:
                self.world.call_in(self.lag, self._replicate, self._replica, self.version, *self._sent)

    def _replicate(
        self, replica: ModelServer, version: int, records: dict[str, LockRecord], tokens: dict[str, int]
    ) -> None:
        if replica is self._replica and version > self.replicated and self.lag < inf and replica.node.up:
            replica.records, replica.tokens, self.replicated = records, tokens, version

    def promote(self) -> None:
        self.master, self._replica = self._replica, self.master
        self.lag, self.version, self.replicated, self._sent = REPLICATION_SECONDS, 0, 0, None
        for backend in self._backends:
            backend.follow(self.master)

    def start(self, name: str) -> None:
        """See `Service.start`. A replica asks its master for everything first."""
        super().start(name)
        self._sent = None

    def set_lag(self, lag: Seconds | None) -> None:
        self.lag = REPLICATION_SECONDS if lag is None else lag

    def _backend(self, process: Process, host: Host) -> LockBackend:
        del host
        self._backends.append(ModelBackend(process, self))
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
        self._key = ("", -inf)
        self.add(self.node, lambda: ("kept", *self._key))

    def get(self) -> str | None:
        """Run ``GET``."""
        value, until = self._key
        return value if until > self.node.now() else None

    def set_if_absent(self, value: str, seconds: Seconds = inf) -> bool:
        """Run ``SET key value NX PX``."""
        if self.get() is not None:
            return False
        self._key = value, self.node.now() + seconds
        return True

    def swap(self, value: str) -> str | None:
        """Run ``GETSET``."""
        old = self.get()
        self.delete()
        self.set_if_absent(value)
        return old

    def delete(self) -> None:
        """Run ``DEL``."""
        self._key = ("", -inf)


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
