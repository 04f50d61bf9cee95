"""
Talking to one Redis node on both faces: the pieces that the Redis backends share.

::

    target = Target.of(url.hosts[0], arguments, tls=False)  # where, and redis-py's connection arguments
    node = open_node(runtime, target)  # no I/O
    reply = await node.call(pack("PING"))  # raises LockError; see _redis_errors
    reply = await node.run(script, body, resend=True)  # EVALSHA, and EVAL where the server does not have it yet
    replies = await node.call_many([...])  # pipelined; error replies are values
    await node.close()

    wire = await node.wire()  # a connection of one's own: WAIT, scatter and gather
    wire.send(packed)  # to many nodes, then
    reply = await runtime.io(wire.receive())  # from each
    node.give_back(wire)  # or wire.close() after any exception

`wire` and what is done with it raise `DRIVER_ERRORS`; `translate` makes them ours.

- Blocking: each call has a connection for itself; connections are kept. A `BlockingWire` has a ``fileno()`` for poll.
- asyncio: all tasks share one connection. Replies come in the order of the commands, so a cancelled call only leaves a
  future behind that nobody waits for, never half a reply on a connection that somebody takes next.
- `PoolNode` takes connections from a pool of the application's, through redis-py's public methods only.

Beside it: `_redis_resp` (the protocol), `_redis_wire` (one connection), `_redis_target` (how to connect),
`_redis_script` (keys and Lua files), `_redis_errors` (the table of errors).
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import redis

from lockkit.backends._redis_errors import DRIVER_ERRORS, server_said, translate
from lockkit.backends._redis_resp import Push, Reply, ServerSaid, bulk, pack
from lockkit.backends._redis_script import Script, lock_key, side_key
from lockkit.backends._redis_target import DEFAULT_PORT, SOCKET_TIMEOUT, Target
from lockkit.backends._redis_wire import NO_ANSWER, AsyncioWire, BlockingWire, Wire, open_wire, take_over

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = [
    "DEFAULT_PORT",
    "DRIVER_ERRORS",
    "AsyncioWire",
    "BlockingWire",
    "Node",
    "PoolNode",
    "Push",
    "Reply",
    "Script",
    "ServerSaid",
    "Target",
    "Wire",
    "WireNode",
    "bulk",
    "lock_key",
    "open_node",
    "open_wire",
    "pack",
    "side_key",
    "take_over",
    "translate",
    "wait_command",
]

KEPT_MAX = 64
"""Idle connections that are kept. More holds sockets after a burst of threads, fewer reconnects in the next one."""

BATCH = 256
"""Commands sent before their replies are read. Many more could fill both directions' buffers: nobody would read."""

TRUSTED_SECONDS = 0.005
"""A connection that was used so long ago is looked at before it is used again: the server may have closed it. Longer
finds fewer closed ones, shorter looks (a system call) more often."""

REPLICAS_MS = 1000
"""How long replicas have to acknowledge. Longer delays a grant while one is slow; shorter takes a slow one for gone."""

Connect: TypeAlias = Callable[[Wire], Awaitable[None]]
"""Called with each new connection before it is used."""


class Node(ABC):
    """
    One server. All methods raise our errors; see `lockkit.backends._redis_errors.translate`.

    Attributes:
        label: ``host:port``, for messages.
    """

    label: str

    async def call(self, packed: bytes, *, resend: bool = False) -> Reply:
        """
        Send one command and give its reply.

        Args:
            packed: The command.
            resend: It does no harm to send it twice. Then a kept connection that turns out to be closed is replaced.

        Raises:
            BackendUnavailable: No usable answer.
            ConfigurationError: Wrong credentials, missing rights and the like.
        """
        try:
            return await self._call(packed, resend=resend)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    async def run(self, script: Script, key: str, body: bytes, /, *, resend: bool = False) -> Reply:
        """
        Run a script, as `call`. A server that does not know it (new, restarted, SCRIPT FLUSH) is taught it.

        Args:
            script: What to run.
            key: Of which lock, for whoever has to choose a node; here nobody.
            body: Its keys and arguments, each packed by `bulk`.
            resend: As for `call`.
        """
        del key
        try:
            try:
                return await self._call(script.command(body), resend=resend)
            except ServerSaid as error:
                if error.code != "NOSCRIPT":
                    raise
            return await self._call(script.loading_command(body), resend=resend)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    async def run_many(self, script: Script, bodies: Sequence[bytes], *, replicas: int = 0) -> list[Reply]:
        """
        Run a script several times, pipelined. Error replies are values (`ServerSaid`).

        Args:
            script: What to run.
            bodies: Its keys and arguments, for each time.
            replicas: With more than 0 the result ends with the number of replicas that have acknowledged all of it.
        """
        waiting = [wait_command(replicas)] if replicas else []
        commands = [script.command(body) for body in bodies]
        replies = await self.call_many([*commands, *waiting], alone=replicas > 0)
        unknown = [
            index for index, reply in enumerate(replies) if isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT"
        ]
        if unknown:
            # The first teaches the server, so that the text travels once.
            again = [script.loading_command(bodies[unknown[0]])]
            again += [script.command(bodies[index]) for index in unknown[1:]]
            late = await self.call_many([*again, *waiting], alone=replicas > 0)
            for index, reply in zip(unknown, late, strict=False):
                replies[index] = reply
            if waiting:
                replies[-1] = late[-1]
        return replies

    async def run_replicated(self, script: Script, body: bytes, replicas: int) -> tuple[Reply, int]:
        """
        Run a script that changes something if it returns an int, and wait until replicas have it.

        Returns:
            Its reply, and how many replicas have acknowledged it: fewer than `replicas` when the time was over, 0 when
            nothing was changed.
        """
        waiting = False

        def follow(reply: Reply) -> bytes | None:
            nonlocal waiting
            if isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT":
                return script.loading_command(body)
            # The reply to WAIT is an int, too.
            if waiting or not isinstance(reply, int):
                return None
            waiting = True
            return wait_command(replicas)

        try:
            first, *others = await self._call_chain(script.command(body), follow)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error
        if isinstance(first, ServerSaid) and others:
            first, *others = others
        if isinstance(first, ServerSaid):
            raise translate(first, self.label) from first
        acknowledged = others[0] if others else 0
        if isinstance(acknowledged, ServerSaid):
            raise translate(acknowledged, self.label) from acknowledged
        return first, cast("int", acknowledged)

    async def call_many(self, commands: Sequence[bytes], *, alone: bool = False) -> list[Reply]:
        """
        Send commands pipelined on one connection and give their replies. Error replies are values (`ServerSaid`).

        Args:
            commands: Each packed.
            alone: Nobody else uses that connection meanwhile (one of them may block it).
        """
        batches = [commands[start : start + BATCH] for start in range(0, len(commands), BATCH)]
        try:
            return await self._call_batches([(b"".join(batch), len(batch)) for batch in batches], alone=alone)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    @abstractmethod
    async def _call(self, packed: bytes, *, resend: bool) -> Reply:
        """As `call`, with the driver's errors; an error reply is raised as `ServerSaid`."""

    @abstractmethod
    async def _call_batches(self, batches: Sequence[tuple[bytes, int]], *, alone: bool) -> list[Reply]:
        """As `call_many`, with the driver's errors; each batch is several commands in one piece, and their number."""

    @abstractmethod
    async def _call_chain(self, packed: bytes, follow: Callable[[Reply], bytes | None]) -> list[Reply]:
        """Send a command and those that `follow` makes of each reply, on one connection, until it gives None."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that are ours. A node that is used again opens new ones."""


class WireNode(Node):
    """A node with connections of our own."""

    _shares: ClassVar[bool] = False

    def __init__(self, runtime: Runtime, target: Target, on_connect: Connect | None = None) -> None:
        """Connect to nothing yet."""
        self._runtime = runtime
        self.target = target
        self.label = target.label
        self._on_connect = on_connect
        self._idle: deque[Wire] = deque()

    async def wire(self) -> Wire:
        """
        Take a connection for a while: a kept one, or a new one.

        Raises:
            Exception: One of `DRIVER_ERRORS`.
        """
        return self._kept() or await self.connect()

    def _kept(self) -> Wire | None:
        """Take a kept connection, if one is still open."""
        idle = self._idle
        while idle:
            try:
                wire = idle.pop()
            except IndexError:  # another thread took the last
                return None
            if not wire.stale:
                return wire
            wire.close()
        return None

    def give_back(self, wire: Wire) -> None:
        """Keep a connection, which has nothing under way, for the next who wants one."""
        if len(self._idle) < KEPT_MAX:
            self._idle.append(wire)
        else:
            wire.close()

    async def _call_batches(self, batches: Sequence[tuple[bytes, int]], *, alone: bool) -> list[Reply]:
        wire = await (self.wire() if alone else self._sharable())
        replies: list[Reply] = []
        try:
            for packed, count in batches:
                replies += await self._runtime.io(wire.call_many(packed, count))
        except BaseException:
            if alone or not self._shares:
                wire.close()
            raise
        if alone or not self._shares:
            self.give_back(wire)
        return replies

    async def _call_chain(self, packed: bytes, follow: Callable[[Reply], bytes | None]) -> list[Reply]:
        wire = await self.wire()
        replies: list[Reply] = []
        following: bytes | None = packed
        try:
            while following is not None:
                reply = await self._runtime.io(wire.call(following))
                replies.append(reply)
                following = follow(reply)
        except BaseException:
            wire.close()
            raise
        self.give_back(wire)
        return replies

    async def _sharable(self) -> Wire:
        """Give a connection for plain commands; with `_shares` it stays everybody's."""
        return await self.wire()

    async def connect(self) -> Wire:
        """Open a new connection, greeted by `on_connect`. Raises as `wire`."""
        wire = await open_wire(self._runtime, self.target)
        if self._on_connect is not None:
            try:
                await self._on_connect(wire)
            except BaseException:
                wire.close()
                raise
        return wire

    async def close(self) -> None:
        """See `Node.close`."""
        while self._idle:
            self._idle.pop().close()


class BlockingNode(WireNode):
    """Each call has a connection for itself."""

    async def run(self, script: Script, key: str, body: bytes, /, *, resend: bool = False) -> Reply:
        """See `Node.run`. The hot path first: a connection used a moment ago, a script that is known, a number back."""
        idle = self._idle
        try:
            wire = cast("BlockingWire", idle.pop())
        except IndexError:
            return await super().run(script, key, body, resend=resend)
        now = self._runtime.now()
        if now > wire.used + TRUSTED_SECONDS:
            idle.append(wire)
            return await super().run(script, key, body, resend=resend)
        wire.used = now
        try:
            reply = wire.call(script.command(body))
        except BaseException as error:
            # Also Ctrl-C: half a reply must not wait there for the next caller.
            wire.close()
            if isinstance(error, ConnectionError) and resend:
                return await super().run(script, key, body)
            if isinstance(error, DRIVER_ERRORS):
                raise translate(error, self.label) from error
            raise
        idle.append(wire)
        if isinstance(reply, ServerSaid):
            if reply.code == "NOSCRIPT":
                return await super().run(script, key, body)
            raise translate(reply, self.label) from reply
        return reply

    async def _call(self, packed: bytes, *, resend: bool) -> Reply:
        wire = cast("BlockingWire | None", self._kept())
        fresh = wire is None
        while True:
            if wire is None:
                wire = cast("BlockingWire", await self.connect())
            wire.used = self._runtime.now()
            try:
                reply = wire.call(packed)
            except ConnectionError:
                wire.close()
                if fresh or not resend:
                    raise
                # It was closed after we had looked, before an answer: a restart, or an idle connection cut on the way.
                wire, fresh = None, True
            except BaseException:
                wire.close()
                raise
            else:
                self.give_back(wire)
                if isinstance(reply, ServerSaid):
                    raise reply
                return reply


class AsyncioNode(WireNode):
    """All tasks share one connection."""

    _shares = True
    _shared: Wire | None = None
    _connecting: asyncio.Task[Wire] | None = None

    async def _call(self, packed: bytes, *, resend: bool) -> Reply:
        wire = self._shared
        if wire is None or wire.stale:
            wire = await self._connect_shared()
            resend = False
        try:
            reply = await cast("AsyncioWire", wire).call(packed)
        except ConnectionError:
            if not resend:
                raise
            reply = await cast("AsyncioWire", await self._connect_shared()).call(packed)
        if isinstance(reply, ServerSaid):
            raise reply
        return reply

    async def _sharable(self) -> Wire:
        return await self._connect_shared()

    async def _connect_shared(self) -> Wire:
        """Open the shared connection, once however many tasks want it; a cancelled one does not stop it."""
        if self._shared is not None and not self._shared.stale:
            return self._shared
        task = self._connecting
        if task is None:
            task = self._connecting = asyncio.create_task(self.connect(), name="lockkit-redis-connect")
            task.add_done_callback(self._connected)
        return await asyncio.shield(task)

    def _connected(self, task: asyncio.Task[Wire]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._shared = task.result()

    async def close(self) -> None:
        """See `Node.close`."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        await super().close()


def wait_command(replicas: int) -> bytes:
    """Pack ``WAIT``: until so many replicas have all that this connection wrote, or the time is over."""
    return pack("WAIT", replicas, REPLICAS_MS)


def open_node(runtime: Runtime, target: Target, on_connect: Connect | None = None) -> WireNode:
    """
    Make a node. No I/O.

    Args:
        runtime: Of the face.
        target: Where it is.
        on_connect: Awaited with each new connection before it is used; what it raises ends the connection.
    """
    return (AsyncioNode if runtime.kind == "asyncio" else BlockingNode)(runtime, target, on_connect)


class PoolNode(Node):
    """
    A node behind a connection pool that the application has: ``redis.Redis(...).connection_pool``.

    Its connections may be of any kind (a proxy for client-side caching, say), so only redis-py's public methods are
    used, and they are given back after each call.
    """

    def __init__(self, runtime: Runtime, pool: Any) -> None:  # noqa: ANN401 - redis-py's, of either face
        """Take nothing yet."""
        self._runtime = runtime
        self._pool = pool
        arguments = pool.connection_kwargs
        self.label = str(arguments.get("path") or f"{arguments.get('host', 'localhost')}:{arguments.get('port', '')}")
        # Required before redis-py 5.3, and since then a warning.
        command = inspect.signature(pool.get_connection).parameters.get("command_name")
        self._get_arguments = ("_",) if command is not None and command.default is command.empty else ()

    async def _call(self, packed: bytes, *, resend: bool) -> Reply:
        del resend  # the pool looks at a connection before it hands it out
        (reply,) = await self._call_batches([(packed, 1)], alone=False)
        if isinstance(reply, ServerSaid):
            raise reply
        return reply

    async def _call_batches(self, batches: Sequence[tuple[bytes, int]], *, alone: bool) -> list[Reply]:
        del alone  # always
        replies: list[Reply] = []
        async with self._borrowed() as connection:
            for packed, count in batches:
                await self._runtime.io(connection.send_packed_command([packed]))
                replies += [await self._receive(connection) for _ in range(count)]
        return replies

    async def _call_chain(self, packed: bytes, follow: Callable[[Reply], bytes | None]) -> list[Reply]:
        replies: list[Reply] = []
        following: bytes | None = packed
        async with self._borrowed() as connection:
            while following is not None:
                await self._runtime.io(connection.send_packed_command([following]))
                reply = await self._receive(connection)
                replies.append(reply)
                following = follow(reply)
        return replies

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[Any]:
        """Take a connection from the pool; after any exception it goes back closed: half a reply may wait there."""
        io = self._runtime.io
        connection = await io(self._pool.get_connection(*self._get_arguments))
        try:
            yield connection
        except BaseException:
            await io(connection.disconnect())
            raise
        finally:
            await io(self._pool.release(connection))

    async def connect(self) -> Wire:
        """
        Open a connection like the pool's that is not counted in the pool: for a subscription.

        Raises:
            Exception: One of `DRIVER_ERRORS`.
        """
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        return await take_over(self._runtime, connection, SOCKET_TIMEOUT)

    async def _receive(self, connection: Any) -> Reply:  # noqa: ANN401 - redis-py's
        limit = getattr(connection, "socket_timeout", None) or SOCKET_TIMEOUT
        limit = min(limit, SOCKET_TIMEOUT)
        try:
            if self._runtime.kind == "asyncio":
                reply = await connection.read_response(disable_decoding=True, timeout=limit)
            elif connection.can_read(timeout=limit):
                reply = connection.read_response(disable_decoding=True)
            else:
                raise TimeoutError(NO_ANSWER)
        except redis.ResponseError as error:
            return server_said(error)
        return cast("Reply", reply)

    async def close(self) -> None:
        """Leave the pool alone: it is the application's."""
