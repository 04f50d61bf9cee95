"""
Redis's backend and scripts under random schedules, for the replay against `models/redis.pml`.

The engine, `RedisBackend` and its listener for wake-ups ship, and so do the scripts, which a real Redis runs.
Simulated are time, the network and the faults of clients. The real server's clock does not go on as the simulated one
does: between two commands its keys have no expiry, and before each they get the rest of theirs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, cast

from lockkit.aio import Client
from lockkit.backend import CALL_SECONDS, seconds_left
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.connection import Connection
from lockkit.backends.redis.keys import Command, LockKeys, Script, side_key
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.options import OPTIONS
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant
from lockkit_tools.servers import RedisServer
from lockkit_tools.servers.resp import RespConnection
from lockkit_tools.simulation import Network, NoAnswer, Node, Process, SimulatedRuntime, World
from lockkit_tools.simulation.backend import client_of
from tests.models.replay import Event, Recorder
from tests.models.schedules import TTL, Plan, run

LOCK = LockKeys("lockkit", "x").lock
QUEUE = side_key(LOCK, "queue")
STEP_SECONDS = 0.1
"""What a script sets an expiry to is a multiple of it. A shorter real delay does not count."""


class SteppedRedis:
    """A real Redis whose keys live by the clock of a simulated node; it notes what each script does."""

    def __init__(self, server: RedisServer, node: Node, recorder: Recorder) -> None:
        self._admin = RespConnection((server.host, server.port))
        self._server = server
        self._node = node
        self._recorder = recorder
        self._ends: dict[str, float] = {}  # by key, on the node's clock
        self._subscriptions: list[Subscription] = []
        self._holder = ""
        self._entries: list[str] = []
        recorder.show = self._show
        self._admin.call("FLUSHALL")

    def close(self) -> None:
        """Close the connections."""
        for process in {subscription.process for subscription in self._subscriptions}:
            self.unsubscribe(process)
        self._admin.close()

    def subscribe(self, subscription: Subscription, packed: bytes) -> None:
        """Open a subscription at the server."""
        subscription.real = RespConnection((self._server.host, self._server.port))
        subscription.take(subscription.real.ask(packed))
        subscription.take(subscription.real.receive())
        self._subscriptions.append(subscription)

    def unsubscribe(self, process: Process) -> None:
        """End those of a process, as the server does when it notices that the connection has gone."""
        for subscription in [one for one in self._subscriptions if one.process is process]:
            self._subscriptions.remove(subscription)
            cast("RespConnection", subscription.real).close()

    def execute(self, script: Command, body: bytes) -> Reply:
        """Run a script."""
        self._recorder.look()
        now = self._node.now()
        started_ms = self._clock_ms()
        for key, end in list(self._ends.items()):
            if end <= now:
                self._admin.call("DEL", key)
            else:
                # Not to the millisecond: a key that lives on must not end while the real server works.
                self._admin.call("PEXPIRE", key, round((end - now) * 1000) + 50)
        reply = self._admin.ask(self.packed(script, body))
        for key in (LOCK, QUEUE):
            self._stop(key, now, started_ms)
        self._note(cast("Script", script), body, reply)
        for subscription in self._subscriptions:
            subscription.fetch()
        if cast("Script", script).name == "acquire" and isinstance(reply, list) and LOCK in self._ends:
            reply[0] = round((self._ends[LOCK] - now) * 1000)  # as PTTL would say
        return reply

    def packed(self, script: Command, body: bytes) -> bytes:
        """Pack a call."""
        return script.loading_command(body)

    def _clock_ms(self) -> int:
        seconds, micros = self._admin.call_list("TIME")
        return int(str(seconds)) * 1000 + int(str(micros)) // 1000

    def _stop(self, key: str, now: float, started_ms: int) -> None:
        """Take down when a key ends, and keep it until then."""
        former = self._ends.pop(key, 0.0)
        at_ms = int(str(self._admin.call("PEXPIRETIME", key)))
        if at_ms > 0:
            # Without the time for which the real one needed: what scripts set are tenths of a second.
            end = now + (at_ms - started_ms) // 100 / 10
            self._ends[key] = former if abs(end - former) <= STEP_SECONDS else end
            self._admin.call("PERSIST", key)

    def _note(self, script: Script, body: bytes, reply: Reply) -> None:
        if script.name == "holders":
            return  # it changes nothing
        owner = _owner_in(script, body)
        before = self._holder if self._recorder.ends else "", self._entries
        self._holder = str(self._admin.call("GET", LOCK) or "")
        self._entries = [str(entry) for entry in self._admin.call_list("LRANGE", QUEUE, 0, -1)]
        changed = before != (self._holder, self._entries)
        recorder = self._recorder
        recorder.ends = {self._owner: self._node.clock.true_time(self._ends[LOCK])} if self._holder else {}
        if script.name == "acquire":
            recorder.add("ACQUIRED", owner, recorder.token(reply) if isinstance(reply, int) else 0)
        elif script.name == "renew":
            recorder.add("RENEWED", owner, int(reply == 1))
        elif changed:
            recorder.add({"release": "RELEASED", "abandon": "ABANDONED"}[script.name], owner)

    @property
    def _owner(self) -> str:
        return self._holder.removeprefix("next:")

    def _show(self) -> int:
        owner = self._recorder.number(self._owner) if self._recorder.ends else 0
        return (owner * 2 + (owner > 0 and self._holder != self._owner)) * 8 + len(self._entries)


def _owner_in(script: Script, body: bytes) -> str:
    """Find the first argument of a script behind its keys."""
    return body.split(b"\r\n")[2 * len(script.keys) + 1].decode()


class Subscription(Connection):
    """The connection on which one client hears of wake-ups. What is said there is never lost, only late."""

    timeout = CALL_SECONDS

    def __init__(self, process: Process, redis: SteppedRedis, network: Network) -> None:
        self.process = process
        self._redis = redis
        self._network = network
        self._messages: deque[Reply] = deque()
        self._arrived = SimulatedRuntime(process).event()
        self.real: RespConnection | None = None

    async def call(self, packed: bytes, until: Instant = inf) -> Reply:
        """Publish: nobody hears it."""
        del packed, until
        return 0

    def subscribe(self, packed: bytes, until: Instant) -> None:
        """Subscribe, or answer a PING at once."""
        del until
        if packed == pack("PING"):
            self.take([b"pong", b""])
        else:
            self._redis.subscribe(self, packed)

    def fetch(self) -> None:
        """Send what the server has published so far."""
        assert self.real is not None
        message = self.real.ask(pack("PING"))
        while message != [b"pong", b""]:
            self.take(message)
            message = self.real.receive()

    def take(self, message: Reply) -> None:
        """Send one message on its way."""
        self.process.world.call_in(0.001, self.process.receive, lambda: self._deliver(message))

    def _deliver(self, message: Reply) -> None:
        self._messages.append(message)
        self._arrived.set()

    async def receive(self, until: Instant) -> Reply:
        """Wait for a message."""
        while not self._messages:
            self._arrived.clear()
            left = until - self.process.now()
            if left <= 0 or not await self._arrived.wait(None if until == inf else left):
                raise TimeoutError
        return self._messages.popleft()

    def close(self) -> None:
        """End the subscription."""
        self._redis.unsubscribe(self.process)


class SimulatedNode(RedisNode):
    """One client's way to the server: a script is lost or late as the network has it."""

    def __init__(self, process: Process, redis: SteppedRedis, node: Node, network: Network, recorder: Recorder) -> None:
        super().__init__(SimulatedRuntime(process), Target.anywhere({}, tls=False))
        self._process = process
        self._redis = redis
        self._node = node
        self._network = network
        self._recorder = recorder

    async def run(self, script: Command, key: str, body: bytes, *, answer_by: float = inf, **options: Any) -> Reply:
        """Run a script; see `Topology.run`."""
        del key, options
        if isinstance(script, Script) and script.name == "acquire":
            self._recorder.asks(self._process, _owner_in(script, body))
        seconds = min(CALL_SECONDS, seconds_left(answer_by, self._process.now()))
        try:
            reply = await self._network.call(
                self._process, self._node, lambda: self._redis.execute(script, body), seconds
            )
        except NoAnswer as error:
            raise BackendUnavailable(str(error)) from error
        assert not isinstance(reply, ServerSaid), reply
        return reply

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], **options: Any
    ) -> list[Reply | LockError]:
        """Renew the one lease that there is; see `Topology.run_many`."""
        ((key, body),) = calls
        assert isinstance(script, Script)
        self._recorder.add("RENEWS", _owner_in(script, body))
        try:
            return [await self.run(script, key, body, answer_by=options["answer_by"])]
        except BackendUnavailable as error:
            return [error]

    async def connect(self, until: Instant = inf) -> Connection:
        """Open a connection for wake-ups."""
        del until
        return Subscription(self._process, self._redis, self._network)


def trace(seed: int, server: RedisServer, kind: type[SteppedRedis] = SteppedRedis) -> list[Event]:
    """Run the schedule of a seed."""
    plan = Plan.draw(seed)
    world = World(seed)
    node, network = Node(world, "server"), Network(world, plan.conditions)
    processes = plan.processes(world)
    recorder = Recorder(world, processes)
    redis = kind(server, node, recorder)
    options = {name: option.default for name, option in OPTIONS.items()}

    def connected(process: Process) -> Client:
        topology = SimulatedNode(process, redis, node, network, recorder)
        if random.Random(f"{seed} {process.name}").random() < 0.5:
            process.at_crash.append(lambda: redis.unsubscribe(process))
        return client_of(
            process, lambda host: RedisBackend("redis://simulated", topology, options, host), ttl=TTL,
            unavailable_after=60.0,
        )  # fmt: skip

    try:
        run(plan, {process: connected(process) for process in processes}, recorder, network, [node])
    finally:
        redis.close()
    return recorder.events
