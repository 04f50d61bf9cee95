"""
One Redis server, as one client uses it: the connections for commands, and the subscription for wake-ups.

Whatever hangs (connecting, logging in, an answer), a call ends by its `answer_by`, and within `CALL_SECONDS`.

- Sync: each call has a connection to itself, and connections are kept for the next call.
- async: all tasks share one connection. Replies arrive in the order of the commands, so a cancelled call only leaves a
  future without a waiter, never half a reply on a connection that another caller takes next.
- A call that must be `alone` on its connection (WAIT) has one to itself in both APIs.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, cast
from weakref import WeakMethod

from lockkit.backend import CALL_SECONDS
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import CLOSED_HERE, NO_ANSWER, Connection, open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, is_replica, lacks_script, translate
from lockkit.backends.redis.handshake import TLS_SHARE, other_form
from lockkit.backends.redis.keys import Command, escape_glob
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.runtime import Runtime
from lockkit.units import Instant

log = logging.getLogger("lockkit")

KEPT_MAX = 64
"""Idle connections kept. More keeps sockets open after a burst of threads, fewer reconnects in the next burst."""

BATCH = 256
"""Commands sent before their replies are read. Many more could fill the buffers of both directions: a deadlock."""

TRUSTED_SECONDS = 0.005
"""After so long without use, lockkit checks whether the server has closed a connection before it uses it again. Longer
finds fewer closed ones, shorter checks (a system call) more often."""

REPLICAS_MS, REPLICAS_SHARE = 1000, 0.6
"""Time that replicas have to acknowledge, and their share of a call's. Longer delays a grant while one is slow, and
leaves less to undo a grant that they do not have; shorter gives up on slow ones."""


class NotReplicatedError(BackendUnavailable):
    """Too few replicas have acknowledged a change in time."""


class Topology(ABC):
    """
    Finds the node of a lock and runs scripts there: a single node, Sentinel, or a Cluster.

    Its methods raise `LockError`, and return or raise by `answer_by` (client monotonic time).
    """

    several = False  # are the nodes, of which one that hangs must not delay renewals at the others
    listening = False  # is or was somebody, so `listener_for` is worth asking

    @abstractmethod
    async def run(
        self, script: Command, key: str, body: bytes, *, resend: bool = False, replicas: int = 0, answer_by: float = inf
    ) -> Reply:
        """
        Run a script at the node of `key`; with `resend` it may be sent twice.

        With `replicas` a change counts when so many have it; else this raises `NotReplicatedError`.
        """

    @abstractmethod
    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """Run a script for many keys, pipelined per node."""

    @abstractmethod
    def listener_for(self, key: str) -> WakeupListener | None:
        """Return the listener at the node of `key`; None if the node is not known yet. No I/O."""

    @abstractmethod
    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        """Find the node of `key`."""

    async def listen(self, key: str, answer_by: float) -> None:
        """Subscribe at the node of `key`, unless there is a subscription."""
        node = await self.node_for(key, answer_by)
        await node.listener.open(answer_by)
        self.listening = True

    async def masters(self) -> list[RedisNode]:
        """Return the nodes that hold keys."""
        return [await self.node_for("")]

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class RedisNode(Topology):
    """
    One server, which has all locks unless a Sentinel or a Cluster says otherwise.

    `on_connect` is awaited with each new connection before it is used, and with the time by which it must return.
    """

    def __init__(
        self,
        runtime: Runtime,
        target: Target,
        prefix: str = "lockkit",
        on_connect: Callable[[Connection, Instant], Awaitable[None]] | None = None,
    ) -> None:
        self._runtime = runtime
        self.target = target  # **holds the password**
        self.label = target.label  # for messages
        self.listener = WakeupListener(runtime, WeakMethod(self.connect), target.label, prefix)
        self._on_connect = on_connect
        self.idle: deque[Connection] = deque()  # kept for the next call
        self._sharing = runtime.kind == "asyncio"
        self.shared: Connection | None = None  # by tasks
        self._connecting: asyncio.Task[Connection] | None = None
        self._opening = SingleRun(runtime, "lockkit-redis-connect", self._open)
        self._proven = False
        self._closed = False

    async def run(
        self,
        script: Command,
        key: str,
        body: bytes,
        *,
        resend: bool = False,
        replicas: int = 0,
        answer_by: float = inf,
        asking: bool = False,
    ) -> Reply:
        """See `Topology.run`. With `asking`, the node is taking over the slot of the key."""
        if replicas or asking:
            calls = [(key, body)]
            (result,) = await self.run_many(script, calls, replicas=replicas, answer_by=answer_by, asking=asking)
            if isinstance(result, LockError):
                raise result
            return result
        try:
            return await self.call(script.command(body), resend=resend, answer_by=answer_by)
        except LockError as error:
            if not lacks_script(error.__cause__):
                raise
        return await self.call(script.loading_command(body), resend=resend, answer_by=answer_by)

    async def call(self, packed: bytes, *, resend: bool = False, answer_by: float = inf) -> Reply:
        """Send one command and return its reply."""
        now = self._runtime.now()
        until = min(answer_by, now + CALL_SECONDS)
        connection, sent = self.kept(now), False
        kept = connection is not None
        try:
            while True:
                if connection is None:
                    connection = await self._connect(until)
                sent = True
                try:
                    reply = await connection.call(packed, until)
                except BaseException as error:
                    self._fail(connection, error)
                    # A kept one may close between check and answer: a restart, or the network dropped it while idle.
                    if not (kept and resend and isinstance(error, ConnectionError)):
                        raise
                else:
                    if type(reply) is not ServerSaid:
                        self.give_back(connection)
                        return reply
                    self.give_back(connection, [reply])
                    if not (kept and is_replica(reply)):
                        raise reply
                connection, kept = None, False
        except DRIVER_ERRORS as error:
            raise translate(error, self.label, sent=sent) from error

    async def run_many(
        self,
        script: Command,
        calls: Sequence[tuple[str, bytes]],
        *,
        replicas: int = 0,
        answer_by: float = inf,
        asking: bool = False,
    ) -> list[Reply | LockError]:
        """Load the script if the server does not have it (new, restarted, SCRIPT FLUSH)."""
        until = end_of_call(self._runtime, answer_by)
        before = [pack("ASKING")] if asking else []
        after = []
        if replicas:
            # Until so many replicas have what the connection wrote, or most of the time is up.
            seconds = min(until - self._runtime.now(), self.target.timeout)
            left_ms = int(seconds * 1000 * REPLICAS_SHARE)
            after = [pack("WAIT", replicas, min(REPLICAS_MS, max(1, left_ms)))]

        async def send(commands: Sequence[bytes]) -> list[Reply]:
            replies = await self.call_many([*before, *commands, *after], alone=replicas > 0, answer_by=until)
            return replies[len(before) :]

        try:
            replies = await send([script.command(body) for _, body in calls])
            unknown = [index for index, reply in enumerate(replies) if lacks_script(reply)]
            if unknown:
                # The first one loads the script, so that its text is sent once.
                bodies = [calls[index][1] for index in unknown]
                late = await send([script.loading_command(bodies[0]), *map(script.command, bodies[1:])])
                for index, reply in zip([*unknown, *range(len(calls), len(replies))], late, strict=True):
                    replies[index] = reply
        except LockError as error:
            return [error] * len(calls)
        results: list[Reply | LockError] = [
            translate(reply, self.label) if isinstance(reply, ServerSaid) else reply for reply in replies
        ]
        if not replicas:
            return results
        short = results.pop()
        if isinstance(short, int):
            if short >= replicas:
                return results
            short = NotReplicatedError(f"{short} of {replicas} replicas of {self.label} acknowledged in time")
        # A refusal counts at once, as that of a lease that was ended: it has changed nothing.
        return [
            result if isinstance(result, (list, LockError)) or (isinstance(result, int) and result <= 0) else short
            for result in results
        ]

    async def call_many(self, commands: Sequence[bytes], *, alone: bool = False, answer_by: float = inf) -> list[Reply]:
        """Send commands in one pipeline and return their replies. Error replies are values (`ServerSaid`)."""
        now = self._runtime.now()
        until = min(answer_by, now + CALL_SECONDS)
        replies: list[Reply] = []
        sent = False
        try:
            connection = self.kept(now, alone=alone) or await self._connect(until, alone=alone)
            sent = True
            try:
                for start in range(0, len(commands), BATCH):
                    batch = commands[start : start + BATCH]
                    replies += await connection.call_many(b"".join(batch), len(batch), until)
            except BaseException as error:
                self._fail(connection, error)
                raise
        except DRIVER_ERRORS as error:
            raise translate(error, self.label, sent=sent) from error
        self.give_back(connection, replies)
        return replies

    def listener_for(self, key: str) -> WakeupListener:
        del key
        return self.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        del key, answer_by
        return self

    # -- connections -------------------------------------------------------------------------------------------------

    def kept(self, now: Instant, *, alone: bool = False) -> Connection | None:
        """Take a kept connection if one is still open; tasks share one."""
        if self._sharing and not alone:
            shared = self.shared
            return None if shared is None or shared.stale else shared
        while True:
            try:
                connection = self.idle.pop()
            except IndexError:  # also if another thread took the last one
                return None
            if now <= connection.used + TRUSTED_SECONDS or not connection.stale:
                connection.used = now
                return connection
            connection.close()

    def give_back(self, connection: Connection, replies: Sequence[Reply] = ()) -> None:
        """Keep a connection that has no call in progress for the next caller."""
        if replies and any(map(is_replica, replies)):
            # Behind a name or an address that moves to the new master, the next connection leads there, while a server
            # that has become a replica keeps those that it has.
            log.debug("%s is a replica: connecting anew", self.label)
            connection.close()
            self.close_idle()
            self.listener.drop()
        elif connection is not self.shared:
            if len(self.idle) < KEPT_MAX and not self._closed:
                self.idle.append(connection)
            else:
                connection.close()

    def _fail(self, connection: Connection, error: BaseException) -> None:
        """Close a connection after any exception, also Ctrl-C: half a reply must not remain for the next caller."""
        if connection is self.shared:
            return
        connection.close()
        if isinstance(error, TimeoutError):
            # If the network has dropped it without a sign, then also others that were idle. Together they would cost
            # many callers the time of an answer.
            self.close_idle()

    async def _connect(self, until: Instant, *, alone: bool = False) -> Connection:
        """Open a connection; the shared one once for all tasks that want it, and not less if one of them gives up."""
        if not self._sharing or alone:
            try:
                return await self.connect(until)
            except TimeoutError:
                self._opening.start()  # for the next call: a single try never has the time to reach a server far away
                raise
        if self._closed:
            raise ConnectionAbortedError(CLOSED_HERE)
        task = self._connecting
        if task is None:
            task = self._connecting = asyncio.create_task(self.connect(), name="lockkit-redis-connect")
            task.add_done_callback(self._connected)
        await asyncio.wait([task], timeout=max(0.0, until - self._runtime.now()))
        if not task.done():
            raise TimeoutError(NO_ANSWER)
        if task.cancelled():
            raise ConnectionAbortedError("the connecting was cancelled")
        return task.result()

    async def _open(self) -> None:
        with suppress(Exception):  # the next call finds out, and tells its caller
            self.give_back(await self.connect())

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            return
        if self._closed:
            task.result().close()
        else:
            self.shared = task.result()

    async def connect(self, until: Instant = inf) -> Connection:
        """Open a new connection and have `on_connect` check it; the caller closes it."""
        now = self._runtime.now()
        until = min(until, now + CALL_SECONDS)
        # As long as it has never answered, the URL may be wrong about TLS.
        share = TLS_SHARE if self.target.form == "tls" and not self._proven else 1.0
        try:
            connection = await open_connection(self._runtime, self.target, now + (until - now) * share)
        except DRIVER_ERRORS as error:
            found = None if self._proven else await other_form(self._runtime, self.target, error, until)
            if found is None:
                raise
            raise ConnectionError(found) from error
        self._proven = True
        try:
            if self._on_connect is not None:
                await self._on_connect(connection, until)
        except BaseException:
            connection.close()
            raise
        connection.used = self._runtime.now()
        return connection

    async def close(self) -> None:
        """Close the connections. A call in progress, or one that begins later, keeps none; with asyncio it fails."""
        self._closed = True
        self.listener.close()
        if self._connecting is not None:
            self._connecting.cancel()
        self.close_idle(self.shared)
        # An event loop closes sockets in its next round: without this they would stay open until the program ends.
        await self._runtime.sleep(0)

    def keep_new(self, connection: Connection) -> None:
        """Take a connection of `connect` into use, instead of the one that tasks have shared."""
        if self._sharing:
            self.shared, former = connection, self.shared
            self.close_idle(former)
        else:
            self.give_back(connection)

    def close_idle(self, shared: Connection | None = None) -> None:
        """Close the kept connections, and one that tasks share."""
        if shared is not None:
            shared.close()
        with suppress(IndexError):
            while True:
                self.idle.pop().close()


def end_of_call(runtime: Runtime, answer_by: Instant) -> Instant:
    """Return the time by which a call that begins now must end."""
    return min(answer_by, runtime.now() + CALL_SECONDS)


async def delete_keys(node: RedisNode, prefix: str) -> None:
    """Delete the keys of all locks with a prefix at one node: ``PREFIX:NAME``, and ``{PREFIX:NAME}:…`` beside them."""
    if not prefix:
        raise Unsupported("with an empty prefix= lockkit cannot tell its locks from other keys: delete them by hand")
    escaped = escape_glob(prefix)
    for pattern in (f"{escaped}:*", f"{{{escaped}:*", f"{{{escaped}}}:*"):
        cursor: Any = None
        while cursor != b"0":
            cursor, keys = cast("Any", await node.call(pack("SCAN", cursor or "0", "MATCH", pattern, "COUNT", 500)))
            # One by one: in a Cluster they are in different slots.
            for key in keys:
                await node.call(pack("DEL", key), resend=True)
