"""
One connection to a Redis server, for each face.

redis-py connects and logs in (TCP, TLS, Unix socket, ACL, RESP3, client name). After that its socket is used directly:
a call through ``Connection.send_packed_command`` and ``read_response`` would cost about as much again as the socket.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import struct
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from math import ceil, inf
from typing import TYPE_CHECKING, Any, cast

import redis.connection

from lockkit.backends.redis.resp import NOTHING, Parser, Push, Reply, ServerSaid
from lockkit.runtime import monotonic

if TYPE_CHECKING:
    from lockkit.backends.redis.address import Target
    from lockkit.runtime import Runtime

__all__ = ["NO_ANSWER", "AsyncioWire", "BlockingWire", "Wire", "open_wire", "take_over"]

READ_BYTES = 8192
"""Bytes asked for at a time. Our replies have 20, and the buffer is allocated for each read: larger takes longer."""

SMALL_BYTES = 16384
"""A command of so many bytes fits into the socket's send buffer, whatever the server does: no limit for sending it."""

TLS_SECONDS_MIN = 0.1
"""With less time left no TLS connection is tried. Longer gives up on servers nearby; shorter keeps callers too long."""

NO_ANSWER = "no answer in time"
_NOT_SENT = "nothing was taken in time"
_CLOSED = "the server closed the connection"


class Wire(ABC):
    """
    One connection that is logged in.

    After any exception of `send` or `receive`, a `BaseException` too, it is of no more use: `close` it.
    (A shared `AsyncioWire` stays of use to the others.)

    Each call is limited by the wire's own `timeout`, and by `until` (client monotonic time) where that is earlier.

    Attributes:
        timeout: Seconds for an answer.
    """

    timeout: float

    on_push: Callable[[list[Reply]], None] | None = None
    """Called with messages out of turn (subscriptions). None drops them."""

    @abstractmethod
    def send(self, packed: bytes, count: int = 1, until: float = inf) -> None:
        """Send commands (`count` of them in one piece). Their replies come in the same order."""

    @abstractmethod
    def receive(self, until: float = inf) -> Reply | Awaitable[Reply]:
        """Give the reply to the oldest command sent one by one; for ``runtime.io``. Error replies are values."""

    @abstractmethod
    def call(self, packed: bytes, until: float = inf) -> Reply | Awaitable[Reply]:
        """Send a command and give its reply, for ``runtime.io``."""

    @abstractmethod
    def call_many(self, packed: bytes, count: int, until: float = inf) -> list[Reply] | Awaitable[list[Reply]]:
        """Send several commands in one piece and give their replies, for ``runtime.io``."""

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the server has closed it meanwhile, as far as is known. For a connection with nothing under way."""

    @abstractmethod
    def close(self) -> None:
        """Close it at once. May be called twice, and from another thread than one that reads."""


class BlockingWire(Wire):
    """
    A connection for one thread at a time.

    Attributes:
        used: Client monotonic time of its last use, for the node that keeps it.
    """

    __slots__ = ("_connection", "_parser", "_poll", "_recv", "_sendall", "_socket", "on_push", "timeout", "used")

    def __init__(self, connection: Any, timeout: float) -> None:  # noqa: ANN401 - redis-py's
        """Take over a connection of redis-py's that is logged in."""
        self._connection = connection
        self._socket: socket.socket = connection._sock  # noqa: SLF001 - so named since redis-py 2
        self._sendall = self._socket.sendall
        self._recv = self._socket.recv
        self._parser = Parser()
        self.on_push = None
        self.used = 0.0
        self.timeout = timeout
        self._set_timeout(timeout)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._poll = poll.poll

    def _set_timeout(self, seconds: float) -> None:
        """Limit the time for each read and write."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(seconds)
            return
        # The kernel keeps the time: Python's own limit costs a poll(2) before each read and each write.
        self._socket.settimeout(None)
        whole = int(seconds)
        limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """The socket, for ``poll``."""
        return self._socket.fileno()

    def send(self, packed: bytes, count: int = 1, until: float = inf) -> None:
        """See `Wire.send`."""
        del count
        hurry = until != inf and len(packed) > SMALL_BYTES
        if hurry:
            # Half of it, because a write that got some bytes through is tried once more.
            self._set_timeout(min(self.timeout, max(until - monotonic(), 0.002) / 2))
        try:
            self._sendall(packed)
        except BlockingIOError:
            raise TimeoutError(_NOT_SENT) from None
        if hurry:
            self._set_timeout(self.timeout)

    def receive(self, until: float = inf) -> Reply:
        """See `Wire.receive`."""
        parser = self._parser
        if until != inf:
            until = min(until, monotonic() + self.timeout)
        try:
            if parser.empty:
                # No parser for what is nearly always one number.
                data = self._recv(READ_BYTES) if until == inf else self._read(until)
                if data[:1] == b":" and data[-1:] == b"\n":
                    try:
                        return int(data[1:])
                    except ValueError:  # more than that, perhaps a message out of turn
                        pass
                self._fed(data)
            while True:
                reply = parser.take()
                if reply is NOTHING:
                    self._fed(self._recv(READ_BYTES) if until == inf else self._read(until))
                elif isinstance(reply, Push):
                    if self.on_push is not None:
                        self.on_push(reply)
                else:
                    return cast("Reply", reply)
        except BlockingIOError:
            raise TimeoutError(NO_ANSWER) from None

    def _read(self, until: float) -> bytes:
        """
        Read what has come, or comes by `until`.

        Raises:
            TimeoutError: Nothing came.
        """
        left = max(0.0, until - monotonic())
        if isinstance(self._socket, ssl.SSLSocket):
            # Not poll: what it has decrypted already is not at the socket any more.
            self._socket.settimeout(max(left, 0.001))
            try:
                return self._socket.recv(READ_BYTES)
            finally:
                self._socket.settimeout(self.timeout)
        # Rounded up: poll counts whole milliseconds, and 0.4 ms must not become a busy loop.
        if not self._poll(ceil(left * 1000)):
            raise TimeoutError(NO_ANSWER)
        return self._socket.recv(READ_BYTES)

    def receive_push(self, until: float) -> Reply:
        """
        Wait for the next message of a subscription (protocol 2 sends them as plain arrays), or the reply to a PING.

        Raises:
            TimeoutError: None came by `until`. The connection is still good.
            ConnectionError: The connection ended.
            ServerSaid: The server refuses it.
        """
        while True:
            message = self._parser.take()
            if isinstance(message, ServerSaid):
                raise message
            if message is not NOTHING:
                return cast("Reply", message)
            try:
                self._fed(self._read(until))
            except BlockingIOError:
                raise TimeoutError(NO_ANSWER) from None

    def _fed(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError(_CLOSED)
        self._parser.feed(data)

    def call(self, packed: bytes, until: float = inf) -> Reply:
        """See `Wire.call`."""
        try:
            self._sendall(packed)
        except BlockingIOError:
            raise TimeoutError(_NOT_SENT) from None
        return self.receive(until)

    def call_many(self, packed: bytes, count: int, until: float = inf) -> list[Reply]:
        """See `Wire.call_many`."""
        self.send(packed, count, until)
        return [self.receive(until) for _ in range(count)]

    @property
    def stale(self) -> bool:
        """See `Wire.stale`. Bytes that nobody asked for end it too: they would be taken for the next reply."""
        return bool(self._poll(0))

    def close(self) -> None:
        """See `Wire.close`."""
        # Wakes a thread that reads; after a fork this only drops the child's copy (redis-py compares the process).
        self._connection.disconnect()


class AsyncioWire(asyncio.Protocol, Wire):
    """
    A connection for all tasks of one event loop at the same time.

    Attributes:
        error: Why it ended; None while it is open.
        on_lost: Called once with `error` when it ends.
    """

    def __init__(self, connection: Any, timeout: float) -> None:  # noqa: ANN401 - redis-py's
        """Take over a connection of redis-py's that is logged in; the reader has nothing left to read."""
        self._connection = connection
        self._transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001 - so named since redis-py 4.2
        self._former = self._transport.get_protocol()
        self._loop = asyncio.get_running_loop()
        self.timeout = timeout
        self._parser = Parser()
        self._expected: deque[_Expected] = deque()
        self._unasked: deque[asyncio.Future[list[Reply]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.error: BaseException | None = None
        self.on_push: Callable[[list[Reply]], None] | None = None
        self.on_lost: Callable[[BaseException], None] | None = None
        self._transport.set_protocol(self)

    def send(self, packed: bytes, count: int = 1, until: float = inf) -> None:
        """See `Wire.send`. `until` counts here, not in `receive`."""
        self._unasked.append(self._ask(packed, count, until))

    def receive(self, until: float = inf) -> Awaitable[Reply]:
        """See `Wire.receive`."""
        del until
        return _first(self._unasked.popleft())

    def call(self, packed: bytes, until: float = inf) -> Awaitable[Reply]:
        """See `Wire.call`."""
        return _first(self._ask(packed, 1, until))

    def call_many(self, packed: bytes, count: int, until: float = inf) -> Awaitable[list[Reply]]:
        """See `Wire.call_many`."""
        return self._ask(packed, count, until)

    def write(self, packed: bytes) -> None:
        """Send a command whose reply comes as a message: SUBSCRIBE."""
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        self._transport.write(packed)

    def _ask(self, packed: bytes, count: int, until: float) -> asyncio.Future[list[Reply]]:
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        expected = _Expected(self._loop.create_future(), count, self._loop.time() + self.timeout)
        self._expected.append(expected)
        if self._timer is None:
            self._timer = self._loop.call_at(expected.until, self._watch)
        self._transport.write(packed)
        if until != inf and (left := until - monotonic()) < self.timeout:
            # This caller gives up earlier. The others keep the connection: as after a cancelled call, the reply that
            # nobody waits for is dropped when it comes.
            timer = self._loop.call_later(left, _too_late, expected.future)
            expected.future.add_done_callback(lambda _: timer.cancel())
        return expected.future

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._parser.empty and data[:1] == b":" and data.find(b"\r\n") == len(data) - 2:
            self._take(int(data[1:-2]))
            return
        self._parser.feed(data)
        try:
            for reply in self._parser.take_all():
                if not isinstance(reply, Push):
                    self._take(reply)
                elif self.on_push is not None:
                    self.on_push(reply)
        except ConnectionError as error:
            self._fail(error)

    def _take(self, reply: Reply) -> None:
        if not self._expected:
            # Protocol 2 sends the messages of a subscription as plain arrays, protocol 3 the reply to a PING as text.
            if self.on_push is not None and isinstance(reply, (list, bytes)):
                self.on_push(reply if isinstance(reply, list) else [reply])
                return
            self._fail(reply if isinstance(reply, ServerSaid) else ConnectionError("an answer that nobody asked for"))
            return
        expected = self._expected[0]
        expected.replies.append(reply)
        if len(expected.replies) == expected.count:
            self._expected.popleft()
            if not expected.future.done():  # cancelled: nobody waits for it
                expected.future.set_result(expected.replies)

    def _watch(self) -> None:
        """Look whether the oldest answer is overdue. One timer for all calls: most are answered long before."""
        self._timer = None
        if self._expected:
            until = self._expected[0].until
            if until <= self._loop.time():
                self._fail(TimeoutError(NO_ANSWER))
            else:
                self._timer = self._loop.call_at(until, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._former.connection_lost(exc)
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
                one.future.exception()  # the caller may be gone: no complaint that nobody looked
        if self.on_lost is not None:
            self.on_lost(error)

    @property
    def stale(self) -> bool:
        """See `Wire.stale`. The event loop tells as soon as it runs."""
        return self.error is not None

    def close(self) -> None:
        """See `Wire.close`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.error is None:
            self._fail(ConnectionAbortedError("the connection was closed here"))
            return
        self._transport.abort()
        # redis-py's object would otherwise say that it was never closed.
        self._connection._reader = self._connection._writer = None  # noqa: SLF001


class _Expected:
    """Commands that wait for their replies, and until when (the loop's clock)."""

    __slots__ = ("count", "future", "replies", "until")

    def __init__(self, future: asyncio.Future[list[Reply]], count: int, until: float) -> None:
        self.future = future
        self.count = count
        self.until = until
        self.replies: list[Reply] = []


def _too_late(future: asyncio.Future[list[Reply]]) -> None:
    if not future.done():
        future.set_exception(TimeoutError(NO_ANSWER))
        future.exception()  # the caller may be gone: no complaint that nobody looked


async def _first(future: asyncio.Future[list[Reply]]) -> Reply:
    return (await future)[0]


async def open_wire(runtime: Runtime, target: Target, until: float = inf) -> Wire:
    """
    Connect and log in.

    Args:
        runtime: Of the face.
        target: Where.
        until: Client monotonic time by which it must be done, if that is earlier than the target's own limits.

    Raises:
        Exception: One of `DRIVER_ERRORS`; not yet ours.
    """
    return await take_over(runtime, target.connection(runtime.kind), target.timeout, until)


async def take_over(
    runtime: Runtime,
    connection: Any,  # noqa: ANN401 - redis-py's
    timeout: float,
    until: float = inf,
) -> Wire:
    """Connect a connection of redis-py's and use its socket from then on. Raises as `open_wire`."""
    if runtime.kind == "asyncio":
        await _connect(connection, until)
        return AsyncioWire(connection, timeout)
    if until != inf:
        left = max(until - monotonic(), 0.001)
        if left < TLS_SECONDS_MIN and isinstance(connection, redis.connection.SSLConnection):
            # Reading the authorities' certificates alone takes a part of it, which no limit ends.
            raise TimeoutError(NO_ANSWER)
        for limit in ("socket_timeout", "socket_connect_timeout"):
            setattr(connection, limit, min(getattr(connection, limit, None) or left, left))
    try:
        connection.connect()
    except BaseException as error:
        _drop(connection, error)
        raise
    return BlockingWire(connection, timeout)


async def _connect(connection: Any, until: float) -> None:  # noqa: ANN401 - redis-py's
    """
    Have redis-py connect, in a task of its own.

    It uses `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes in the instant in which the
    inner task ends (bpo-37658): a cancelled waiter would go on waiting. `asyncio.wait` swallows none.
    """
    task: asyncio.Task[None] = asyncio.ensure_future(connection.connect())
    try:
        await asyncio.wait([task], timeout=None if until == inf else max(0.0, until - monotonic()))
        if not task.done():
            raise TimeoutError(NO_ANSWER)  # noqa: TRY301 - it ends the task as a cancellation does
    except BaseException as error:
        reason = error

        def drop(done: asyncio.Task[None]) -> None:
            # Asked for its error, so that asyncio does not complain that nobody was.
            _drop(connection, reason if done.cancelled() else done.exception() or reason)

        task.cancel()
        task.add_done_callback(drop)
        raise
    if task.cancelled():
        message = "the connecting was cancelled"
        raise ConnectionAbortedError(message)
    if (failure := task.exception()) is not None:
        _drop(connection, failure)
        raise failure


def _drop(connection: Any, error: BaseException) -> None:  # noqa: ANN401 - redis-py's
    """Close a connection that was refused, cancelled or interrupted while it was made."""
    writer = getattr(connection, "_writer", None)
    if writer is not None:
        writer.transport.abort()
        connection._reader = connection._writer = None  # noqa: SLF001
        return
    if hasattr(connection, "_sock"):
        connection.disconnect()
    if not isinstance(error, Exception):
        # Ctrl-C while redis-py waits for the TCP connection: only local variables of functions have the socket, and
        # Python complains of sockets that nobody closed.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for value in list(frame.f_locals.values()):
                if isinstance(value, socket.socket):
                    # Not its own close(): the interrupt may have come in the middle of its __init__.
                    super(socket.socket, value).close()
