"""
Wake-ups from a Redis node: one subscription per client and node, however many requests wait.

A waiting request has an entry in the lock's queue, with the channel of its client (``PREFIX:wake:<random>``).
The script that frees the lock publishes there:

- ``OWNER``: the lock is offered to that request.
- ``OWNER MILLISECONDS``: it is offered to the request before that one, whose client may be stopped: retry after that
  time.

A script that finds that a lock has vanished (FLUSHALL), and its queue perhaps too, publishes the lock's key on
``PREFIX:wake:gone``, to which every client subscribes.

No wake-up is missed: the server has confirmed the subscription before any request enters a queue; and when the
subscription ends, all waiting requests retry, which subscribes anew.
A connection that the network has dropped (NAT, firewall) gives no sign, so lockkit sends a PING now and then while any
request waits.

A Cluster sends what is published to all its nodes. If the server's sharded pub/sub can be used, the channel there has a
hash tag whose slot is at the node, and the client subscribes to it in both ways (``SSUBSCRIBE`` and ``SUBSCRIBE``). The
scripts publish by ``SPUBLISH``, and by ``PUBLISH`` only if that reached no client (``scripts/offer.lua``). When that
slot moves to another node, the subscription ends.
"""

from __future__ import annotations

import logging
import weakref
from math import inf
from typing import Protocol, cast

from lockkit.backend import Request, seconds_left
from lockkit.backends.redis.connection import CLOSED_HERE, Connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, code_of, translate
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.errors import LockError
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant

log = logging.getLogger("lockkit")

IDLE_SECONDS_MAX = 60.0
"""Seconds that the subscription stays when no request waits. Shorter subscribes more often, longer keeps a thread."""

HEARTBEAT_SECONDS = 3.0
"""Seconds without a message until the next PING, while any request waits. Longer hands locks over later when the
connection was dropped; shorter sends more."""

PONG_SECONDS = 2.0
"""Seconds for the answer to it. Longer hands over later; shorter gives up on a busy server."""

RETRY_MARGIN_SECONDS = 0.005
"""Seconds from the end of an offer until the next request retries: the offer must have ended at the server."""

DENIED_SECONDS = 60.0
"""Seconds until lockkit retries a subscription for which the user lacks the right. Longer notices later that the right
was granted; shorter connects more often."""

_CONFIRMATIONS = (b"subscribe", b"ssubscribe")
_SLOT_MOVED = "the slot of the channel has moved to another node"
_NO_SHARDS = ("ERR", "NOPERM")  # a command that was renamed, a missing right; other refusals of SSUBSCRIBE pass


def warn_of_polling(url: str, denied: LockError) -> None:
    """Log that waiters poll."""
    log.warning(
        "waiters at %s poll, because nobody can wake them: %s; grant the right to SUBSCRIBE and PUBLISH on the "
        "channels PREFIX:wake:*",
        url,
        denied,
    )


def gone_channel(prefix: str) -> str:
    """Name the channel to which all clients subscribe."""
    return f"{prefix}:wake:gone"


class Server(Protocol):
    """What a subscription needs of a node."""

    label: str

    async def connect(self, until: float = inf, /) -> Connection:
        """Open a new connection; see `lockkit.backends.redis.node.RedisNode.connect`."""
        ...


class WakeupListener:
    """
    The subscription of one client at one node.

    Attributes:
        channel: The client's channel while it is subscribed; None otherwise.
        denied: Why there is none, if the user has no right to subscribe or to publish: then waiters poll.
    """

    def __init__(self, runtime: Runtime, node: Server, prefix: str) -> None:
        self.channel: str | None = None
        self.denied: LockError | None = None
        self._ask_again_at = 0.0
        self._runtime = runtime
        self._label = node.label
        # Weak, because the node has this listener: a dropped client must not wait for the garbage collector.
        self._connect = weakref.WeakMethod(node.connect)
        self._prefix = prefix
        self._gone = gone_channel(prefix).encode()
        self._mutex = runtime.mutex()
        self._waiting: dict[bytes, tuple[Event, bytes]] = {}
        self._connection: Connection | None = None
        self._opening: Event | None = None
        self._retries: dict[bytes, Instant] = {}  # when a waiting request retries by itself; at most one time for each
        self._sharded = True
        self._closed = False

    def expect(self, request: Request, key: str = "") -> None:
        """Wake this request from now on. Call it before the request enters a queue: its turn may come at once."""
        self._waiting[request.owner.encode()] = request.wake, key.encode()

    def forget(self, request: Request) -> None:
        """Stop waking a request."""
        owner = request.owner.encode()
        self._waiting.pop(owner, None)
        self._retries.pop(owner, None)

    async def open(self, answer_by: float = inf, tag: str = "") -> None:
        """Subscribe, unless subscribed already or without the right to. One caller does; others wait for it."""
        now = self._runtime.now()
        if now < self._ask_again_at:
            return
        mine = self._runtime.event()
        try:
            with self._mutex:
                if self.channel is not None:
                    return
                opening = self._opening = self._opening or mine
            if opening is mine:
                await self._subscribe_sharded(answer_by, tag)
            else:
                await opening.wait(seconds_left(answer_by, now))
        except ServerSaid as error:
            self._deny(error)
        except DRIVER_ERRORS as error:
            raise translate(error, self._label) from error
        finally:
            with self._mutex:
                if self._opening is mine:
                    self._opening = None
            mine.set()

    def _deny(self, error: ServerSaid) -> None:
        """Do without a subscription if the user has no right to it."""
        translated = translate(error, self._label)
        if code_of(error) != "NOPERM" and "unknown command" not in error.text:
            raise translated from error
        self.denied = translated
        self._ask_again_at = self._runtime.now() + DENIED_SECONDS

    async def _subscribe_sharded(self, answer_by: float, tag: str) -> None:
        if tag and self._sharded:
            try:
                await self._subscribe(answer_by, tag)
            except ServerSaid as error:
                log.debug("no sharded pub/sub at %s: %s", self._label, error)
                await self._subscribe(answer_by)
                self._sharded = error.code not in _NO_SHARDS
        else:
            await self._subscribe(answer_by)

    async def _subscribe(self, answer_by: float, tag: str = "") -> None:
        connect = self._connect()
        assert connect is not None, "a listener that outlives its node"
        connection = await connect(answer_by)
        now = self._runtime.now()
        until = min(now + connection.timeout, now + seconds_left(answer_by, now))
        try:
            # A new channel for each subscription: messages for the former one must not reach this one.
            channel = f"{self._prefix}:wake:{self._runtime.owner()}"
            command, confirmations = b"", 2
            if tag and connection.sharded:
                channel += f"{{{tag}}}"
                command, confirmations = pack("SSUBSCRIBE", channel), 3
            command += pack("SUBSCRIBE", channel, self._gone)
            await self._check_publishing(connection, channel, until)
            connection.subscribe(command, until)
            while confirmations:
                message = cast("list[Reply]", await connection.receive(until))
                if message[0] in _CONFIRMATIONS:
                    confirmations -= 1
                else:
                    self._received(message)
            with self._mutex:
                if self._closed:
                    raise ConnectionAbortedError(CLOSED_HERE)  # noqa: TRY301 - handled as any other end
                self._connection = connection
                self.denied = None
                self.channel = channel
            self._runtime.spawn("lockkit-redis-wake", lambda: self._listen(connection))
        except BaseException as error:
            # Also on Ctrl-C between any two lines: no request may believe that the subscription works.
            self._stop_listening(connection, error)
            connection.close()
            raise

    async def _check_publishing(self, connection: Connection, channel: str, until: Instant) -> None:
        """Raise the refusal if the user may not publish: mostly the holders have the same user, and notify nobody."""
        sharded = connection.sharded and channel.endswith("}")
        reply: Reply = None
        for command in ("SPUBLISH", "PUBLISH") if sharded else ("PUBLISH",):
            reply = await connection.call(pack(command, channel, ""), until)
            if not isinstance(reply, ServerSaid):
                return
        raise cast("ServerSaid", reply)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def _listen(self, connection: Connection) -> None:
        """Read messages until the subscription ends, in a thread or task of its own."""
        error: BaseException = ConnectionAbortedError("the thread or task that listens has ended")
        try:
            await self._take_messages(connection)
        except DRIVER_ERRORS as failure:
            error = failure
        except Exception as failure:
            error = failure
            log.exception("the subscription at %s failed; waiting requests subscribe anew", self._label)
        finally:
            # Also when the task was cancelled: all requests retry, and the next one subscribes.
            connection.close()
            self._stop_listening(connection, error)

    async def _take_messages(self, connection: Connection) -> None:
        """Return when no request has waited for a while."""
        now = received_at = idle_since = self._runtime.now()
        asked = False
        while self._connection is connection:
            if self._waiting:
                idle_since = now
            answer_by = received_at + (PONG_SECONDS if asked else HEARTBEAT_SECONDS)
            until = min(answer_by, idle_since + IDLE_SECONDS_MAX, self._wake_due(now))
            try:
                message = await connection.receive(until)
            except TimeoutError as error:
                now = self._runtime.now()
                if self._end_if_idle(connection, now - idle_since):
                    log.debug("no request waits at %s: unsubscribed (%s)", self._label, error)
                    return
                if asked and now >= received_at + PONG_SECONDS:
                    raise
                if not asked and now >= received_at + HEARTBEAT_SECONDS:
                    received_at = now
                    if self._waiting:
                        connection.subscribe(pack("PING"))
                        asked = True
            else:
                now = received_at = self._runtime.now()
                asked = False
                if isinstance(message, list):
                    self._received(message)

    def _end_if_idle(self, connection: Connection, idle_seconds: float) -> bool:
        """End the subscription if no request has waited for a while."""
        with self._mutex:
            # Under the mutex: a later request finds no channel, and subscribes anew.
            return idle_seconds >= IDLE_SECONDS_MAX and not self._waiting and self._forget_connection(connection)

    def _wake_due(self, now: float) -> float:
        """Wake the requests whose time to retry has come; return the next such time."""
        following = inf
        for owner, due in list(self._retries.items()):
            waiter = self._waiting.get(owner)
            if waiter is not None and due > now:
                following = min(following, due)
                continue
            self._retries.pop(owner, None)
            if waiter is not None:
                waiter[0].set()
        return following

    def _received(self, message: list[Reply]) -> None:
        # [kind, channel, text]; any client of the server may have published it.
        if len(message) != 3:  # noqa: PLR2004
            return
        kind, channel, text = message
        if kind == b"sunsubscribe":
            raise ConnectionAbortedError(_SLOT_MOVED)
        if kind not in (b"message", b"smessage") or not isinstance(text, bytes):
            return
        if channel == self._gone:
            for event, key in list(self._waiting.values()):
                if key == text:
                    event.set()
            return
        owner, _, grace_ms = text.partition(b" ")
        waiter = self._waiting.get(owner)
        if waiter is None:
            return
        if not grace_ms.isdigit():
            waiter[0].set()
            return
        # The earliest of several times: if that is too early, the answer says how long the next offer lasts.
        due = self._runtime.now() + int(grace_ms[:9]) / 1000 + RETRY_MARGIN_SECONDS
        self._retries[owner] = min(due, self._retries.get(owner, inf))

    def _stop_listening(self, connection: Connection, error: BaseException) -> None:
        """Have all requests retry: they may have missed a message."""
        with self._mutex:
            if not self._forget_connection(connection):
                return
            waiters = list(self._waiting.values())
        log.debug("subscription at %s ended: %s", self._label, error)
        for event, _ in waiters:
            event.set()

    def _forget_connection(self, connection: Connection) -> bool:
        if self._connection is not connection:
            return False
        self._connection = self.channel = None
        self._retries = {}
        return True

    def drop(self) -> None:
        """End the subscription, if there is one. All waiting requests retry, and the next one subscribes anew."""
        with self._mutex:
            connection = self._connection
            if connection is not None:
                self._forget_connection(connection)
            waiters = list(self._waiting.values())
        if connection is not None:
            connection.close()
        for event, _ in waiters:
            event.set()

    def close(self) -> None:
        """Unsubscribe for good. All waiting requests retry: another node may have replaced this one."""
        self._closed = True
        self.drop()
