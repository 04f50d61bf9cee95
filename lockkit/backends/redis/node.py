"""
Talking to one Redis node on both faces: the pieces that the Redis backends share.

::

    target = Target.of(url.hosts[0], arguments, tls=False)  # where, and redis-py's connection arguments
    node = open_node(runtime, target)  # no I/O
    reply = await node.call(pack("PING"))  # raises LockError; see _redis_errors
    reply = await node.run(script, body, resend=True)  # EVALSHA, and EVAL where the server does not have it yet
    replies = await node.call_many([...])  # pipelined; error replies are values
    await node.close()

    wire = await node.wire(until)  # a connection for one caller: WAIT, ASKING, a subscription
    reply = await runtime.io(wire.call(packed, until))
    node.give_back(wire)  # or wire.close() after any exception

`wire` and what is done with it raise `DRIVER_ERRORS`; `translate` makes them ours.

Whatever hangs (the connecting, the login, an answer), a call has ended by its `answer_by`, and within `CALL_SECONDS`.

- Blocking: each call has a connection for itself; connections are kept. A `BlockingWire` has a ``fileno()`` for poll.
- asyncio: all tasks share one connection. Replies come in the order of the commands, so a cancelled call only leaves a
  future behind that nobody waits for, never half a reply on a connection that somebody takes next.
- A client of the application's (``from_client``) says how to connect (`Target.lent`); the connections are kept here,
  beside its pool: a pool that is used up holds up no renewal.

Beside it: `_redis_resp` (the protocol), `_redis_wire` (one connection), `_redis_target` (how to connect),
`_redis_script` (keys and Lua files), `_redis_errors` (the table of errors).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

from lockkit.backend import seconds_left
from lockkit.backends.redis.address import DEFAULT_PORT, Target
from lockkit.backends.redis.connection import NO_ANSWER, AsyncioWire, BlockingWire, Wire, open_wire, take_over
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.probe import TLS_SHARE, other_form
from lockkit.backends.redis.resp import Push, Reply, ServerSaid, bulk, pack
from lockkit.backends.redis.script import Command, Script, lock_key, side_key

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = [
    "DEFAULT_PORT",
    "DRIVER_ERRORS",
    "AsyncioWire",
    "BlockingWire",
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

REPLICAS_SHARE = 0.6
"""Part of the time of a call that replicas may take. More leaves too little to undo a grant that they do not have."""

Greet: TypeAlias = Callable[[Wire, float], Awaitable[None]]
"""Called with each new connection before it is used, and with the time by which it must be done."""


class WireNode(ABC):
    """
    One server, with connections of our own.

    All methods without ``until`` raise our errors; see `lockkit.backends.redis.errors.translate`.
    Those with it raise `DRIVER_ERRORS`, and have returned by that time (client monotonic clock).

    Attributes:
        target: Where it is. **Holds the password.**
        label: ``host:port``, for messages.
    """

    _shares: ClassVar[bool] = False

    def __init__(self, runtime: Runtime, target: Target, greet: Greet | None = None) -> None:
        """Connect to nothing yet."""
        self._runtime = runtime
        self.target = target
        self.label = target.label
        self._greet = greet
        self._idle: deque[Wire] = deque()
        self._proven = False

    def until(self, answer_by: float) -> float:
        """Give the time by which a call that begins now must have ended."""
        now = self._runtime.now()
        return now + seconds_left(answer_by, now)

    async def call(self, packed: bytes, *, resend: bool = False, answer_by: float = inf) -> Reply:
        """
        Send one command and give its reply.

        Args:
            packed: The command.
            resend: It does no harm to send it twice. Then a kept connection that turns out to be closed is replaced.
            answer_by: Client monotonic time by which there must be an answer.

        Raises:
            BackendUnavailable: No usable answer.
            ConfigurationError: Wrong credentials, missing rights and the like.
        """
        try:
            return await self._call(packed, resend=resend, until=self.until(answer_by))
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        """
        Run a script, as `call`. A server that does not know it (new, restarted, SCRIPT FLUSH) is taught it.

        Args:
            script: What to run.
            key: Of which lock, for a route that has to choose a node; not used here.
            body: Its keys and arguments, each packed by `bulk`.
            resend: As for `call`.
            answer_by: As for `call`.
        """
        del key
        until = self.until(answer_by)
        try:
            try:
                return await self._call(script.command(body), resend=resend, until=until)
            except ServerSaid as error:
                if error.code != "NOSCRIPT":
                    raise
            return await self._call(script.loading_command(body), resend=resend, until=until)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    async def run_many(
        self, script: Command, bodies: Sequence[bytes], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply]:
        """
        Run a script several times, pipelined. Error replies are values (`ServerSaid`).

        Args:
            script: What to run.
            bodies: Its keys and arguments, for each time.
            replicas: With more than 0 the result ends with the number of replicas that have acknowledged all of it.
            answer_by: As for `call`.
        """
        until = self.until(answer_by)
        waiting = [self.wait_command(replicas, until)] if replicas else []
        commands = [script.command(body) for body in bodies]
        replies = await self.call_many([*commands, *waiting], alone=replicas > 0, answer_by=until)
        unknown = [
            index for index, reply in enumerate(replies) if isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT"
        ]
        if unknown:
            # The first teaches the server, so that the text travels once.
            again = [script.loading_command(bodies[unknown[0]])]
            again += [script.command(bodies[index]) for index in unknown[1:]]
            late = await self.call_many([*again, *waiting], alone=replicas > 0, answer_by=until)
            for index, reply in zip(unknown, late, strict=False):
                replies[index] = reply
            if waiting:
                replies[-1] = late[-1]
        return replies

    async def run_replicated(
        self, script: Command, body: bytes, replicas: int, *, answer_by: float = inf
    ) -> tuple[Reply, int]:
        """
        Run a script that changes something if it returns an int, and wait until replicas have it.

        Returns:
            Its reply, and how many replicas have acknowledged it: fewer than `replicas` when the time was over, 0 when
            nothing was changed.
        """
        until = self.until(answer_by)
        waiting = False

        def follow(reply: Reply) -> bytes | None:
            nonlocal waiting
            if isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT":
                return script.loading_command(body)
            # The reply to WAIT is an int, too.
            if waiting or not isinstance(reply, int):
                return None
            waiting = True
            return self.wait_command(replicas, until)

        try:
            first, *others = await self._call_chain(script.command(body), follow, until)
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

    def wait_command(self, replicas: int, until: float) -> bytes:
        """Pack ``WAIT``: until so many replicas have all that the connection wrote, or most of the time is over."""
        left_ms = int((until - self._runtime.now()) * 1000 * REPLICAS_SHARE)
        return pack("WAIT", replicas, min(REPLICAS_MS, max(1, left_ms)))

    async def call_many(self, commands: Sequence[bytes], *, alone: bool = False, answer_by: float = inf) -> list[Reply]:
        """
        Send commands pipelined on one connection and give their replies. Error replies are values (`ServerSaid`).

        Args:
            commands: Each packed.
            alone: Nobody else uses that connection meanwhile (one of them may block it).
            answer_by: As for `call`.
        """
        batches = [commands[start : start + BATCH] for start in range(0, len(commands), BATCH)]
        packed = [(b"".join(batch), len(batch)) for batch in batches]
        try:
            return await self._call_batches(packed, alone=alone, until=self.until(answer_by))
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error

    @abstractmethod
    async def _call(self, packed: bytes, *, resend: bool, until: float) -> Reply:
        """As `call`, with the driver's errors; an error reply is raised as `ServerSaid`."""

    async def wire(self, until: float = inf) -> Wire:
        """Take a connection for a while: a kept one, or a new one."""
        return self._kept() or await self.connect(until)

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

    async def _call_batches(self, batches: Sequence[tuple[bytes, int]], *, alone: bool, until: float) -> list[Reply]:
        """Send batches (several commands in one piece, and their number) one after the other."""
        wire = await (self.wire(until) if alone else self._sharable(until))
        replies: list[Reply] = []
        try:
            for packed, count in batches:
                replies += await self._runtime.io(wire.call_many(packed, count, until))
        except BaseException:
            if alone or not self._shares:
                wire.close()
            raise
        if alone or not self._shares:
            self.give_back(wire)
        return replies

    async def _call_chain(self, packed: bytes, follow: Callable[[Reply], bytes | None], until: float) -> list[Reply]:
        """Send a command and those that `follow` makes of each reply, on one connection, until it gives None."""
        wire = await self.wire(until)
        replies: list[Reply] = []
        following: bytes | None = packed
        try:
            while following is not None:
                reply = await self._runtime.io(wire.call(following, until))
                replies.append(reply)
                following = follow(reply)
        except BaseException:
            wire.close()
            raise
        self.give_back(wire)
        return replies

    async def _sharable(self, until: float) -> Wire:
        """Give a connection for plain commands; with `_shares` it stays everybody's."""
        return await self.wire(until)

    async def connect(self, until: float = inf) -> Wire:
        """Open a new connection, greeted, which the caller closes."""
        until = self.until(until)
        wire = await (self._open(until) if self._proven else self._open_first(until))
        if self._greet is not None:
            try:
                await self._greet(wire, until)
            except BaseException:
                wire.close()
                raise
        return wire

    async def _open(self, until: float) -> Wire:
        return await open_wire(self._runtime, self.target, until)

    async def _open_first(self, until: float) -> Wire:
        """Open a connection to a server that has never answered: perhaps the URL says the wrong thing of it."""
        share = TLS_SHARE if self.target.form == "tls" else 1.0
        now = self._runtime.now()
        try:
            wire = await self._open(now + (until - now) * share)
        except DRIVER_ERRORS as error:
            found = await other_form(self._runtime, self.target, error, until)
            if found is None:
                raise
            raise ConnectionError(found) from error
        self._proven = True
        return wire

    async def close(self) -> None:
        """Close the connections. A node that is used again opens new ones."""
        while self._idle:
            self._idle.pop().close()


class BlockingNode(WireNode):
    """Each call has a connection for itself."""

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        """See `WireNode.run`. The hot path first: a connection used a moment ago, a script that is known, a number."""
        idle = self._idle
        try:
            wire = cast("BlockingWire", idle.pop())
        except IndexError:
            return await super().run(script, key, body, resend=resend, answer_by=answer_by)
        now = self._runtime.now()
        if now > wire.used + TRUSTED_SECONDS:
            idle.append(wire)
            return await super().run(script, key, body, resend=resend, answer_by=answer_by)
        wire.used = now
        try:
            if answer_by - now < wire.timeout:
                reply = wire.call(script.command(body), answer_by)
            else:  # the kernel keeps the time
                reply = wire.call(script.command(body))
        except BaseException as error:
            # Also Ctrl-C: half a reply must not wait there for the next caller.
            wire.close()
            if isinstance(error, ConnectionError) and resend:
                return await super().run(script, key, body, answer_by=answer_by)
            if isinstance(error, DRIVER_ERRORS):
                raise translate(error, self.label) from error
            raise
        idle.append(wire)
        if isinstance(reply, ServerSaid):
            if reply.code == "NOSCRIPT":
                return await super().run(script, key, body, answer_by=answer_by)
            raise translate(reply, self.label) from reply
        return reply

    async def _call(self, packed: bytes, *, resend: bool, until: float) -> Reply:
        wire = cast("BlockingWire | None", self._kept())
        fresh = wire is None
        while True:
            if wire is None:
                wire = cast("BlockingWire", await self.connect(until))
            wire.used = self._runtime.now()
            try:
                reply = wire.call(packed, until)
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

    async def _call(self, packed: bytes, *, resend: bool, until: float) -> Reply:
        wire = self._shared
        if wire is None or wire.stale:
            wire = await self._connect_shared(until)
            resend = False
        try:
            reply = await cast("AsyncioWire", wire).call(packed, until)
        except ConnectionError:
            if not resend:
                raise
            reply = await cast("AsyncioWire", await self._connect_shared(until)).call(packed, until)
        if isinstance(reply, ServerSaid):
            raise reply
        return reply

    async def _sharable(self, until: float) -> Wire:
        return await self._connect_shared(until)

    async def _connect_shared(self, until: float) -> Wire:
        """Open the shared connection, once however many tasks want it; one that gives up does not stop it."""
        if self._shared is not None and not self._shared.stale:
            return self._shared
        task = self._connecting
        if task is None:
            task = self._connecting = asyncio.create_task(self.connect(), name="lockkit-redis-connect")
            task.add_done_callback(self._connected)
        await asyncio.wait([task], timeout=max(0.0, until - self._runtime.now()))
        if not task.done():
            raise TimeoutError(NO_ANSWER)
        if task.cancelled():
            message = "the connecting was cancelled"
            raise ConnectionAbortedError(message)
        return task.result()

    def _connected(self, task: asyncio.Task[Wire]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._shared = task.result()

    async def close(self) -> None:
        """See `WireNode.close`."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        await super().close()


def open_node(runtime: Runtime, target: Target, greet: Greet | None = None) -> WireNode:
    """
    Make a node. No I/O.

    Args:
        runtime: Of the face.
        target: Where it is.
        greet: Awaited with each new connection before it is used; what it raises ends the connection.
    """
    return (AsyncioNode if runtime.kind == "asyncio" else BlockingNode)(runtime, target, greet)
