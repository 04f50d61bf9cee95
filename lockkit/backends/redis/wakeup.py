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
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf

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


class WakeupListener:
    """The subscription of one client at one node."""

    def __init__(
        self,
        runtime: Runtime,
        connect: Callable[[], Callable[[Instant], Awaitable[Connection]] | None],
        label: str,
        prefix: str,
    ) -> None:
        self.channel: str | None = None  # while it is subscribed
        # Why there is none, if the user has no right to subscribe or to publish: then waiters poll.
        self.denied: LockError | None = None
        self._ask_again_at = 0.0
        self._runtime = runtime
        self._label = label
        # Weak, because the node has this listener: a dropped client must not wait for the garbage collector.
        self._connect = connect
        self._prefix = prefix
        self._gone = gone_channel(prefix).encode()
        self._mutex = runtime.mutex()
        self._waiting: dict[bytes, tuple[Event, bytes]] = {}
        self._connection: Connection | None = None
        self._opening: Event | None = None
        self._retries: dict[bytes, Instant] = {}  # when a waiting request retries by itself; at most one time for each
        self._closed = False

    def expect(self, request: Request, key: str = "") -> None:
        """Wake this request from now on. Call it before the request enters a queue: its turn may come at once."""
        self._waiting[request.owner.encode()] = request.wake, key.encode()

    def forget(self, request: Request) -> None:
        """Stop waking a request."""
        owner = request.owner.encode()
        self._waiting.pop(owner, None)
        self._retries.pop(owner, None)

    async def open(self, answer_by: float = inf) -> None:
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
                await self._subscribe(answer_by)
            else:
                await opening.wait(seconds_left(answer_by, now))
        except DRIVER_ERRORS as error:
            translated = translate(error, self._label)
            if code_of(error) not in {"NOPERM", "unknown command"}:
                raise translated from error
            self.denied = translated
            self._ask_again_at = self._runtime.now() + DENIED_SECONDS
        finally:
            with self._mutex:
                if self._opening is mine:
                    self._opening = None
            mine.set()

    async def _subscribe(self, answer_by: float) -> None:
        connect = self._connect()
        assert connect is not None, "a listener that outlives its node"
        connection = await connect(answer_by)
        now = self._runtime.now()
        until = min(now + connection.timeout, now + seconds_left(answer_by, now))
        try:
            # A new channel for each subscription: messages for the former one must not reach this one.
            channel = f"{self._prefix}:wake:{self._runtime.owner()}"
            # Mostly the holders have the same user: if it may not publish, they notify nobody.
            reply = await connection.call(pack("PUBLISH", channel, ""), until)
            if isinstance(reply, ServerSaid):
                raise reply  # noqa: TRY301 - handled as any other end
            connection.subscribe(pack("SUBSCRIBE", channel, self._gone), until)
            for _ in (channel, self._gone):
                await connection.receive(until)  # the confirmation
            with self._mutex:
                if self._closed:
                    raise ConnectionAbortedError(CLOSED_HERE)  # noqa: TRY301
                self._connection = connection
                self.denied = None
                self.channel = channel
            self._runtime.spawn("lockkit-redis-wake", lambda: self._listen(connection))
        except BaseException as error:
            # Also on Ctrl-C between any two lines: no request may believe that the subscription works.
            self._end(connection, error)
            connection.close()
            raise

    async def _listen(self, connection: Connection) -> None:
        """Read messages until the subscription ends, in a thread or task of its own."""
        error: BaseException = ConnectionAbortedError("the thread or task that listens has ended")
        try:
            await self._take_messages(connection)
        except DRIVER_ERRORS as failure:
            error = failure
        finally:
            # Also when the task was cancelled: all requests retry, and the next one subscribes.
            connection.close()
            self._end(connection, error)

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
                if now >= idle_since + IDLE_SECONDS_MAX and self._end(connection, error, if_idle=True):
                    return
                if asked and now >= received_at + PONG_SECONDS:
                    raise
                if not asked and now >= received_at + HEARTBEAT_SECONDS:
                    received_at = now
                    if self._waiting:
                        connection.subscribe(pack("PING"), now + PONG_SECONDS)
                        asked = True
            else:
                now = received_at = self._runtime.now()
                asked = False
                if isinstance(message, list):
                    self._received(message)

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
        if len(message) != 3 or message[0] != b"message" or not isinstance(text := message[2], bytes):  # noqa: PLR2004
            return
        if message[1] == self._gone:
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

    def _end(self, connection: Connection, why: object, *, if_idle: bool = False) -> bool:
        """Have all requests retry, since they may have missed a message; the next one subscribes anew."""
        with self._mutex:  # a later request finds no channel
            if self._connection is not connection or (if_idle and self._waiting):
                return False
            self._connection = self.channel = None
            self._retries = {}
            waiters = list(self._waiting.values())
        log.debug("subscription at %s ended: %s", self._label, why)
        for event, _ in waiters:
            event.set()
        return True

    def drop(self) -> None:
        """End the subscription, if there is one. All waiting requests retry, and the next one subscribes anew."""
        connection = self._connection
        if connection is not None:
            self._end(connection, CLOSED_HERE)
            connection.close()

    def close(self) -> None:
        """Unsubscribe for good. All waiting requests retry: another node may have replaced this one."""
        with self._mutex:
            self._closed = True
        self.drop()
