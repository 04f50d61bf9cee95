"""
One Redis on simulated time, with replicas: it does what the Lua scripts do, and the backend's own code asks it.

`lockkit.backends.redis.backend` runs unchanged; only the server and the connections to it are models. What is modelled
is exclusive locks: readers and permits are refused. The sign in a record, by which the scripts know that there is no
queue, is not modelled: here the queue is looked at each time. That the scripts do the same is shown on a real server
in ``tests/simulation/test_redis.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NoReturn

from lockkit.backend import Request, seconds_left
from lockkit.backends.redis.node import NotReplicatedError, RedisNode, Topology
from lockkit.backends.redis.options import OPTIONS
from lockkit.backends.redis.resp import Reply
from lockkit.backends.redis.script import Command, Script
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.world import Process, World

CALL_SECONDS = 1.0
"""Seconds that a client waits for an answer. Shorter than the driver's own default, so that pictures stay short."""

WAIT_SECONDS = 0.4
"""Seconds that a client waits for replicas to acknowledge."""

_KEYS = {"acquire": 5, "release": 5, "abandon": 5, "renew": 5, "holders": 5, "read_note": 1}
"""How many of its words are keys, for each script."""

_NAMES = {Script(name, keys=["lock"], arguments=0).sha: name for name in _KEYS}

DEFAULTS: Mapping[str, Any] = {name: option.default for name, option in OPTIONS.items()}
"""Options of the backend."""


class RedisModel:
    """
    One Redis server: its keys, and each Lua file as a method.

    Attributes:
        node: Where it runs.
        strings: Values and when they end, on the node's clock.
        queues: Lists.
        replicas: They get every change, later.
        lag: Seconds until a replica has a change; `inf` while replication is cut.
        version: Number of its last change.
        has: Number of the last change of its master that this replica has.
    """

    def __init__(self, world: World, name: str, network: Network, *, lag: Seconds = 0.001) -> None:
        """Start without data and without replicas."""
        self.node = Node(world, name)
        self.node.stopped.append(self._stopped)
        self.strings: dict[str, tuple[str, float]] = {}
        self.queues: dict[str, list[str]] = {}
        self.replicas: list[RedisModel] = []
        self.lag = lag
        self.version = 0
        self.has = 0
        self._network = network
        self._listeners: dict[str, SimulatedListener] = {}

    # -- keys ------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        """Give a value, unless it has expired."""
        value, until = self.strings.get(key, ("", -inf))
        return value if until > self.node.now() else None

    def put(self, key: str, value: str, seconds: Seconds = inf) -> None:
        """Set a value, for some seconds."""
        self.strings[key] = value, self.node.now() + seconds

    def drop(self, key: str) -> None:
        """Delete a value."""
        self.strings.pop(key, None)

    def forget(self) -> None:
        """Lose everything."""
        self.strings, self.queues = {}, {}

    def left_ms(self, key: str) -> int:
        """Give how long a value will be there; -1: for ever."""
        left = self.strings[key][1] - self.node.now()
        return -1 if left == inf else math.ceil(left * 1000)

    # -- scripts ---------------------------------------------------------------------------------------------------

    def execute(self, script: str, words: Sequence[str]) -> Reply:
        """Run a Lua file, and send what it changed to the replicas."""
        method: Callable[[Sequence[str], Sequence[str]], Reply] = getattr(self, script)
        reply = method(words[: _KEYS[script]], words[_KEYS[script] :])
        self.replicate()
        return reply

    def acquire(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        lock, fence, queue, *_ = keys
        owner, ttl_ms, metadata, _, waiter, limit = arguments
        if limit:
            message = "the simulated Redis has no readers and no permits"
            raise Unsupported(message)
        seconds = int(ttl_ms) / 1000
        holder = self.get(lock)
        if holder is None:
            holder = self._offer(lock, queue, owner)
        if holder in {None, owner, f"next:{owner}"}:
            self.put(lock, owner, seconds)
            token = max(self._record(fence)[0] + 1, self.node.wall_us())
            self.put(fence, f"{token} {owner} {metadata}")
            return token
        assert holder is not None, "else it was granted"
        entry = f"{owner} {waiter}"
        if waiter and entry not in self.queues.setdefault(queue, []):
            self.queues[queue].append(entry)
        offered = holder.startswith("next:")
        foreign = not offered and self._record(fence)[1] != holder
        return [self.left_ms(lock), b"" if offered else holder.encode(), int(foreign)]

    def release(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        lock, _, queue, *_ = keys
        owner, _ = arguments
        if self.get(lock) != owner:
            return 0
        return self._pass_on(lock, queue)

    def abandon(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        lock, _, queue, *_ = keys
        owner, entry = arguments
        if entry and f"{owner} {entry}" in self.queues.get(queue, []):
            self.queues[queue].remove(f"{owner} {entry}")
        if self.get(lock) not in {owner, f"next:{owner}"}:
            return 0
        return self._pass_on(lock, queue)

    def renew(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        lock, *_ = keys
        owner, ttl_ms, *_ = arguments
        holder = self.get(lock)
        if holder != owner:
            return 0 if holder is None else -1
        self.put(lock, owner, int(ttl_ms) / 1000)
        return 1

    def holders(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        del arguments
        lock, fence, queue, *_ = keys
        holder = self.get(lock)
        if holder is None or holder.startswith("next:"):
            return []
        token, owner, metadata = self._record(fence)
        found = (b"%d" % token, metadata.encode()) if owner == holder else (b"", b"")
        waiting = sum(self._listens(entry.split(" ", 2)[2]) for entry in self.queues.get(queue, []))
        return [holder.encode(), self.left_ms(lock), *found, waiting]

    def read_note(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        """See ``read_note.lua``. There is none."""
        del keys, arguments
        return []

    def _record(self, fence: str) -> tuple[int, str, str]:
        """Read the record of the last grant: token, owner, metadata."""
        token, owner, metadata = (self.get(fence) or "0  ").split(" ", 2)
        return int(token), owner, metadata

    def _pass_on(self, lock: str, queue: str) -> Reply:
        if self._offer(lock, queue) is None:
            self.drop(lock)
        return 1

    def _offer(self, lock: str, queue: str, me: str | None = None) -> str | None:
        entries = self.queues.get(queue, [])
        while entries:
            owner, grace_ms, channel = entries.pop(0).split(" ", 2)
            if owner == me:
                return me
            if self._publish(channel, owner):
                self.put(lock, f"next:{owner}", int(grace_ms) / 1000)
                if entries:
                    following, _, other = entries[0].split(" ", 2)
                    self._publish(other, f"{following} {grace_ms}")
                return f"next:{owner}"
        return None

    # -- subscriptions ---------------------------------------------------------------------------------------------

    def subscribe(self, listener: SimulatedListener) -> None:
        """Send messages to a client from now on."""
        self._listeners[listener.name] = listener

    def _listens(self, channel: str) -> bool:
        return channel in self._listeners and not self._listeners[channel].process.dead

    def _publish(self, channel: str, text: str) -> bool:
        if not self._listens(channel):
            return False
        listener = self._listeners[channel]
        self._network.push(self.node, listener.process, lambda: listener.receive(text))
        return True

    def _stopped(self, lose_data: bool) -> None:  # noqa: FBT001 - as Node says it
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            self.node.world.call_in(0.0, listener.end)
        if lose_data:
            self.forget()

    # -- replication -----------------------------------------------------------------------------------------------

    def replicate(self) -> None:
        """Send everything to the replicas."""
        self.version += 1
        for replica in self.replicas:
            if replica.lag < inf:
                arguments = self.version, dict(self.strings), {name: list(queue) for name, queue in self.queues.items()}
                self.node.world.call_in(replica.lag, replica._receive, *arguments)

    def _receive(self, version: int, strings: dict[str, tuple[str, float]], queues: dict[str, list[str]]) -> None:
        if version > self.has and self.lag < inf and self.node.up:
            self.has, self.strings, self.queues = version, strings, queues


class SimulatedListener:
    """
    The subscription of one client at one server; does what `WakeupListener` does.

    Attributes:
        name: The channel's name.
        channel: The same while it is subscribed; None otherwise.
        denied: None: each client may subscribe.
        process: The client's.
    """

    denied = None

    def __init__(self, process: Process) -> None:
        """Do not subscribe yet."""
        self.name = f"wake:{process.name}"
        self.channel: str | None = None
        self.process = process
        self._waiting: dict[str, Event] = {}

    def expect(self, request: Request, key: str = "") -> None:
        del key
        self._waiting[request.owner] = request.wake

    def forget(self, request: Request) -> None:
        self._waiting.pop(request.owner, None)

    def receive(self, text: str) -> None:
        """Wake the request that a message names."""
        owner, _, delay_ms = text.partition(" ")
        event = self._waiting.get(owner)
        if event is not None:
            self.process.world.call_in(int(delay_ms or 0) / 1000 + (0.005 if delay_ms else 0.0), self._wake, event)

    def end(self) -> None:
        """The connection has ended: all waiting requests retry."""
        self.channel = None
        for event in self._waiting.values():
            self._wake(event)

    def _wake(self, event: Event) -> None:
        if not self.process.dead:
            event.set()


class SimulatedTopology(Topology):
    """One process's connections to a master, which another server may become."""

    def __init__(self, process: Process, master: Callable[[], RedisModel], network: Network) -> None:
        """Connect."""
        self._process = process
        self._master = master
        self._network = network
        self._listener = SimulatedListener(process)

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: Instant = inf
    ) -> Reply:
        del key, resend
        name, arguments = _NAMES[script.sha], _words(body)
        reply: Reply = await self._call(lambda master: master.execute(name, arguments), answer_by)
        return reply

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: Instant = inf
    ) -> list[Reply | LockError]:
        replies: list[Reply | LockError] = []
        for key, body in calls:
            try:
                replies.append(await self._run_replicated(script, key, body, replicas, answer_by))
            except BackendUnavailable as error:
                replies.append(error)
        return replies

    async def _run_replicated(self, script: Command, key: str, body: bytes, replicas: int, answer_by: Instant) -> Reply:
        master = self._master()
        reply = await self.run(script, key, body, answer_by=answer_by)
        if isinstance(reply, list) or not replicas:
            return reply
        version, until = master.version, self._process.now() + WAIT_SECONDS
        while (count := sum(one.has >= version for one in master.replicas)) < replicas:
            if self._process.now() >= until:
                raise NotReplicatedError(f"{count} of {replicas} replicas acknowledged in time")
            await self._process.waiter(0.01).park()
        return reply

    async def listen(self, key: str, answer_by: Instant) -> None:
        del key
        if self._listener.channel is None:
            await self._call(lambda master: master.subscribe(self._listener), answer_by)
            self._listener.channel = self._listener.name
        self.listening = True

    def listener_for(self, key: str) -> WakeupListener:
        del key
        return self._listener  # type: ignore[return-value]  # it has what the backend uses

    async def node_for(self, key: str, answer_by: Instant = inf) -> RedisNode:
        """Refuse: there is no connection."""
        del key, answer_by
        self._refuse()

    async def ping(self) -> None:
        await self._call(lambda master: master.node.name, inf)

    async def close(self) -> None:
        """See `Topology.close`."""

    def _refuse(self) -> NoReturn:
        message = "a simulated Redis runs the scripts of locks only"
        raise Unsupported(message)

    async def _call(self, operation: Callable[[RedisModel], Any], answer_by: Instant) -> Any:  # noqa: ANN401
        master = self._master()
        seconds = min(CALL_SECONDS, seconds_left(answer_by, self._process.now()))
        try:
            return await self._network.call(self._process, master.node, lambda: operation(master), seconds)
        except NoAnswer as error:
            raise BackendUnavailable(str(error)) from error


def _words(body: bytes) -> list[str]:
    """Unpack arguments that `bulk` packed."""
    words, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        length = int(body[at + 1 : end])
        words.append(body[end + 2 : end + 2 + length].decode())
        at = end + length + 4
    return words
