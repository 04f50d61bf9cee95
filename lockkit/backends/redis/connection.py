"""
One connection to a Redis server: `SyncConnection` for the sync API, `AsyncConnection` for the async API.

redis-py connects and logs in (TCP, TLS, Unix socket, ACL, RESP3, client name). After that lockkit uses the socket
directly: a call through redis-py would cost about as much again as the system calls.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from math import ceil, inf
from typing import Any

import redis.connection

from lockkit.backends.redis import quirks
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.resp import Parser, Push, Reply, ServerSaid
from lockkit.runtime import Runtime, monotonic
from lockkit.units import Instant, Seconds

READ_BYTES = 8192
"""Bytes requested per read. Replies have about 20, and each read allocates a buffer: larger takes longer."""

SMALL_BYTES = 16384
"""A command of at most so many bytes fits into the socket's send buffer, so that sending it needs no time limit."""

TLS_SECONDS_MIN = 0.1
"""With less time left, lockkit tries no TLS connection. Longer gives up on servers nearby; shorter delays callers."""

NO_ANSWER = "no answer in time"
CLOSED_HERE = "the connection was closed here"
_NOT_SENT = "nothing was taken in time"
_CLOSED = "the server closed the connection"


class Connection(ABC):
    """
    One connection that is logged in.

    After any exception of a call, including a `BaseException`, `close` it: half a reply may remain in it.
    (Other users of a shared `AsyncConnection` may go on using it.)

    Each call is limited by the connection's own `timeout`, or by `until` (client monotonic time) if that is earlier.

    Attributes:
        timeout: Seconds for an answer.
        used: Client monotonic time of its last use, for whatever keeps the connection.
        run_id: The server's run id as told on this connection, packed; empty if unknown. It cannot change
            while the connection lives.
        sharded: Whether the server's sharded pub/sub can be used; see `lockkit.backends.redis.handshake`.
    """

    timeout: float
    used: float = 0.0
    run_id: bytes = b""
    sharded: bool = False

    on_push: Callable[[list[Reply]], None] | None = None
    """Called with messages that answer no command (subscriptions). None drops them. A `ConnectionError` that it raises
    ends the connection."""

    @abstractmethod
    def call(self, packed: bytes, until: Instant = inf) -> Reply | Awaitable[Reply]:
        """Send a command and return its reply, for ``runtime.io``. Error replies are values."""

    @abstractmethod
    def call_many(self, packed: bytes, count: int, until: Instant = inf) -> list[Reply] | Awaitable[list[Reply]]:
        """Send several commands at once and return their replies, for ``runtime.io``."""

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the server is known to have closed it. For a connection with no call in progress."""

    @abstractmethod
    def close(self) -> None:
        """Close it at once. May be called twice, and while another thread reads."""


class SyncConnection(Connection):
    """A connection for one thread at a time."""

    def __init__(self, driver_connection: Any, timeout: Seconds) -> None:  # noqa: ANN401 - redis-py's
        """Take over a redis-py connection that is logged in."""
        self._driver_connection = driver_connection
        self._socket: socket.socket = quirks.socket_of(driver_connection)
        self._sendall = self._socket.sendall
        self._recv = self._socket.recv
        self._parser = Parser()
        self._replies: list[Reply] = []  # that have arrived
        self.timeout = timeout
        self._set_timeout(timeout)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._poll = poll.poll

    def _set_timeout(self, seconds: float) -> None:
        """Limit the time for each read and write."""
        self._socket.settimeout(None)
        if isinstance(self._socket, ssl.SSLSocket) or not os.get_blocking(self._socket.fileno()):
            # gevent's sockets never block in the kernel.
            self._socket.settimeout(seconds)
            return
        # A limit in the kernel: Python's own costs a poll(2) before each read and each write.
        whole = int(seconds)
        limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for ``poll``."""
        return self._socket.fileno()

    def send(self, packed: bytes, until: Instant = inf) -> None:
        """Send one or more commands."""
        limited = until != inf and len(packed) > SMALL_BYTES
        if limited:
            # Half of the time left, because sendall tries again after a write that got some bytes through.
            self._set_timeout(min(self.timeout, max(until - monotonic(), 0.002) / 2))
        try:
            self._sendall(packed)
        except BlockingIOError:
            raise TimeoutError(_NOT_SENT) from None
        if limited:
            self._set_timeout(self.timeout)

    def receive(self, until: Instant = inf, *, messages: bool = False) -> Reply:
        """Return the reply to the oldest command sent, or with `messages` what comes next. Error replies are values."""
        if until != inf and not messages:
            until = min(until, monotonic() + self.timeout)
        try:
            while True:
                while not self._replies:
                    data = self._recv(READ_BYTES) if until == inf else self._read(until)
                    if not data:
                        raise ConnectionResetError(_CLOSED)
                    self._replies = self._parser.feed(data)
                reply = self._replies.pop(0)
                if messages or not isinstance(reply, Push):
                    return reply
                if self.on_push is not None:
                    self.on_push(reply)
        except BlockingIOError:
            raise TimeoutError(NO_ANSWER) from None

    def _read(self, until: Instant) -> bytes:
        """Read what has arrived, or arrives by `until`."""
        left_seconds = max(0.0, until - monotonic())
        if isinstance(self._socket, ssl.SSLSocket):
            # Not poll: decrypted bytes no longer wait in the socket.
            self._socket.settimeout(max(left_seconds, 0.001))
            try:
                return self._socket.recv(READ_BYTES)
            finally:
                self._socket.settimeout(self.timeout)
        # Rounded up: poll counts whole milliseconds, and 0.4 ms must not become a busy loop.
        if not self._poll(ceil(left_seconds * 1000)):
            raise TimeoutError(NO_ANSWER)
        return self._socket.recv(READ_BYTES)

    def receive_push(self, until: Instant) -> Reply:
        """Wait for the next message of a subscription (a plain array in protocol 2), or the reply to a PING."""
        message = self.receive(until, messages=True)
        if isinstance(message, ServerSaid):
            raise message
        return message

    def call(self, packed: bytes, until: Instant = inf) -> Reply:
        if until != inf:
            self.send(packed, until)
            return self.receive(until)
        # As above, without two calls: each lock comes here twice.
        try:
            self._sendall(packed)
            self._replies = self._parser.feed(self._recv(READ_BYTES))
        except BlockingIOError:
            raise TimeoutError(NO_ANSWER) from None
        if len(self._replies) == 1 and type(self._replies[0]) is int:
            return self._replies.pop()
        return self.receive()

    def call_many(self, packed: bytes, count: int, until: Instant = inf) -> list[Reply]:
        self.send(packed, until)
        return [self.receive(until) for _ in range(count)]

    @property
    def stale(self) -> bool:
        """See `Connection.stale`. Unexpected bytes count too: they would be taken for the next reply."""
        return bool(self._poll(0))

    def close(self) -> None:
        # Wakes a thread that reads. After a fork it only drops the child's copy (redis-py compares process ids).
        self._driver_connection.disconnect()


class AsyncConnection(asyncio.Protocol, Connection):
    """
    A connection for all tasks of one event loop at the same time.

    Attributes:
        error: Why it ended; None while it is open.
        on_lost: Called once with `error` when it ends.
    """

    def __init__(self, driver_connection: Any, timeout: Seconds) -> None:  # noqa: ANN401 - redis-py's
        """Take over a redis-py connection that is logged in; it may have ended already."""
        self._driver_connection = driver_connection
        self._transport: asyncio.Transport = quirks.transport_of(driver_connection)
        self._loop = asyncio.get_running_loop()
        self.timeout = timeout
        self._parser = Parser()
        self._expected: deque[_Expected] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.error: BaseException | None = None
        self.on_push: Callable[[list[Reply]], None] | None = None
        self.on_lost: Callable[[BaseException], None] | None = None
        self._transport.set_protocol(self)
        if quirks.has_ended(driver_connection):
            self._fail(ConnectionResetError(_CLOSED))

    def call(self, packed: bytes, until: Instant = inf) -> Awaitable[Reply]:
        return _first(self._ask(packed, 1, until))

    def call_many(self, packed: bytes, count: int, until: Instant = inf) -> Awaitable[list[Reply]]:
        return self._ask(packed, count, until)

    def write(self, packed: bytes) -> None:
        """Send a command whose reply arrives as a message: SUBSCRIBE."""
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        self._transport.write(packed)

    def _ask(self, packed: bytes, count: int, until: Instant) -> asyncio.Future[list[Reply]]:
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        expected = _Expected(self._loop.create_future(), count, self._loop.time() + self.timeout)
        self._expected.append(expected)
        if self._timer is None:
            self._timer = self._loop.call_at(expected.until, self._check_overdue)
        self._transport.write(packed)
        if until != inf and (left_seconds := until - monotonic()) < self.timeout:
            # This caller gives up earlier, and the others keep the connection: the reply is dropped when it arrives, as
            # after a cancelled call.
            timer = self._loop.call_later(left_seconds, _time_out, expected.future)
            expected.future.add_done_callback(lambda _: timer.cancel())
        return expected.future

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._parser.feed(data):
                if not isinstance(reply, Push):
                    self._take(reply)
                elif self.on_push is not None:
                    self.on_push(reply)
        except ConnectionError as error:
            self._fail(error)

    def _take(self, reply: Reply) -> None:
        if not self._expected:
            # Protocol 2 sends messages of a subscription as plain arrays, protocol 3 the reply to a PING as a string.
            if self.on_push is not None and isinstance(reply, (list, bytes)):
                self.on_push(reply if isinstance(reply, list) else [reply])
                return
            self._fail(reply if isinstance(reply, ServerSaid) else ConnectionError("a reply to no command"))
            return
        expected = self._expected[0]
        expected.replies.append(reply)
        if len(expected.replies) == expected.count:
            self._expected.popleft()
            if not expected.future.done():  # done: its caller was cancelled or gave up
                expected.future.set_result(expected.replies)

    def _check_overdue(self) -> None:
        """Fail if the oldest answer is overdue. One timer serves all calls: most are answered long before it ends."""
        self._timer = None
        if self._expected:
            until = self._expected[0].until
            if until <= self._loop.time():
                self._fail(TimeoutError(NO_ANSWER))
            else:
                self._timer = self._loop.call_at(until, self._check_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError(_CLOSED))

    def _fail(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.error = error
        self.close()
        expected, self._expected = self._expected, deque()
        for one in expected:
            if not one.future.done():
                one.future.set_exception(error)
                one.future.exception()  # retrieved: asyncio must not log it if the caller has gone
        if self.on_lost is not None:
            self.on_lost(error)

    @property
    def stale(self) -> bool:
        """See `Connection.stale`. The event loop finds out as soon as it runs."""
        return self.error is not None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.error is None:
            self._fail(ConnectionAbortedError(CLOSED_HERE))
            return
        self._transport.abort()
        quirks.detach(self._driver_connection)


class _Expected:
    """Commands that wait for their replies, and until when (the event loop's clock)."""

    __slots__ = ("count", "future", "replies", "until")

    def __init__(self, future: asyncio.Future[list[Reply]], count: int, until: Instant) -> None:
        self.future = future
        self.count = count
        self.until = until
        self.replies: list[Reply] = []


def _time_out(future: asyncio.Future[list[Reply]]) -> None:
    if not future.done():
        future.set_exception(TimeoutError(NO_ANSWER))
        future.exception()  # retrieved: asyncio must not log it if the caller has gone


async def _first(future: asyncio.Future[list[Reply]]) -> Reply:
    return (await future)[0]


async def open_connection(runtime: Runtime, target: Target, until: float = inf) -> Connection:
    """Connect and log in."""
    driver_connection = target.driver_connection(runtime.kind)
    if runtime.kind == "asyncio":
        await quirks.connect_asyncio(driver_connection, None if until == inf else max(0.0, until - monotonic()))
        return AsyncConnection(driver_connection, target.timeout)
    if until != inf:
        left_seconds = max(until - monotonic(), 0.001)
        if left_seconds < TLS_SECONDS_MIN and isinstance(driver_connection, redis.connection.SSLConnection):
            # No time limit covers the part of it that reads the authorities' certificates.
            raise TimeoutError(NO_ANSWER)
        for limit in ("socket_timeout", "socket_connect_timeout"):
            own_seconds = getattr(driver_connection, limit, None)
            setattr(driver_connection, limit, min(own_seconds or left_seconds, left_seconds))
    try:
        driver_connection.connect()
        return SyncConnection(driver_connection, target.timeout)
    except BaseException as error:
        driver_connection.disconnect()
        quirks.close_interrupted_sockets(error)
        raise
