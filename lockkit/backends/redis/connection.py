"""
One connection to a Redis server: a socket, and a time limit for each wait.

::

    connection = await open_connection(runtime, target, until)  # TCP or Unix socket, TLS, login
    reply = await connection.call(packed, until)
    connection.subscribe(packed, until)  # from now on nothing but messages: `receive`

All calls raise `DRIVER_ERRORS`. redis-py reads and checks the arguments; lockkit connects by itself, because redis-py
does not hand over its sockets, and a call through redis-py takes twice as long as the system calls.

- Sync (`Connection`): it is for one thread at a time. After any exception of a call, including a ``BaseException``,
  close it: half a reply may remain in it.
- async (`SharedConnection`): all tasks of the event loop may use it at the same time. Replies arrive in the order of
  the commands, so a cancelled call only leaves a reply that nobody takes.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import struct
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from redis.credentials import UsernamePasswordCredentialProvider

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.resp import Parser, Reply, ServerSaid, pack
from lockkit.drivers import in_thread
from lockkit.runtime import Runtime, monotonic
from lockkit.units import Instant, Seconds

READ_BYTES = 8192
"""Bytes requested per read. Replies have about 20, and each read allocates a buffer: larger takes longer."""

WHOLE_SHARE = 0.9
"""Share of the time for an answer from which a wait may take all of it, so that the limit of the socket stays as it is,
which saves a system call. Lower lets a second slow node of a Redlock take longer than the caller has."""

NO_ANSWER = "no answer in time"
CLOSED_HERE = "the connection was closed here"
_CLOSED = "the server closed the connection"
_TOO_MANY = "a reply to no command"
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Sent:
    """So many commands that were sent; and, if tasks share the connection, the replies so far, and when it fails."""

    __slots__ = ("count", "future", "replies", "until")

    def __init__(self, count: int) -> None:
        self.count = count
        self.future: asyncio.Future[list[Reply]]
        self.replies: list[Reply]
        self.until: Instant  # the event loop's clock


class Connection:
    """
    One connection, for one thread at a time.

    Each call is limited by the connection's own `timeout`, or by `until` (client monotonic time) if that is earlier.
    """

    shared = False  # by all tasks of an event loop

    def __init__(self, sock: socket.socket, timeout: Seconds) -> None:
        self.timeout = timeout
        self.error: BaseException | None = None  # why it ended
        self.on_lost: Callable[[BaseException], None] | None = None  # called once with `error`
        self.used = 0.0  # client monotonic time, for whatever keeps the connection
        self.run_id = b""  # as told on this connection, during which it cannot change; packed
        self._process = os.getpid()
        self._socket = sock
        # Of a client that was dropped. Not by __del__, which the garbage collector may call after that of the socket.
        weakref.finalize(self, sock.close).atexit = False
        self._parser = Parser()
        self._subscribed = self._parser.pushes = False
        self._messages: deque[Reply] = deque()
        sock.settimeout(None)
        # Limited by the kernel, since Python polls before each read otherwise: not over TLS, nor where reads do not
        # block there, as with gevent.
        self._in_kernel = not isinstance(sock, ssl.SSLSocket) and os.get_blocking(sock.fileno())
        self._limit: Seconds = 0.0
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll

    async def call(self, packed: bytes, until: Instant = inf) -> Reply:
        """Send a command and return its reply. Error replies are values."""
        self._write(packed, until)
        seconds = until - monotonic()
        # A reply mostly comes as a whole, and each lock comes here twice.
        replies = self._receive(seconds if seconds < self.timeout else self.timeout)  # noqa: FURB136
        return replies[0] if len(replies) == 1 else self._receive_all(1, until, replies)[0]

    async def call_many(self, packed: bytes, count: int, until: Instant = inf) -> list[Reply]:
        """Send several commands at once and return their replies."""
        return await self.answer(self.send(packed, count, until), until)

    def send(self, packed: bytes, count: int, until: Instant = inf) -> Sent:
        """Send commands now; `answer` waits for their replies."""
        self._write(packed, until)
        return Sent(count)

    async def answer(self, sent: Sent, until: Instant = inf) -> list[Reply]:
        """Wait for the replies to commands that were sent."""
        return self._receive_all(sent.count, until)

    def _receive_all(self, count: int, until: Instant, replies: list[Reply] | None = None) -> list[Reply]:
        until = min(until, monotonic() + self.timeout)
        replies = replies or []
        while len(replies) < count:
            replies += self._receive(until - monotonic())
        if len(replies) > count:
            raise ConnectionError(_TOO_MANY)
        return replies

    def subscribe(self, packed: bytes, until: Instant) -> None:
        """Send a command of a subscription, whose reply arrives as a message."""
        self._subscribed = self._parser.pushes = True
        self._write(packed, until)

    async def receive(self, until: Instant) -> Reply:
        """Wait for the next message (in protocol 2 an array) or the reply to a PING. `TimeoutError` may come early."""
        while not self._messages:
            await self._wait(until)
        message = self._messages.popleft()
        if isinstance(message, ServerSaid):
            raise message
        return message

    async def _wait(self, until: Instant) -> None:
        self._messages += self._receive(until - monotonic())

    def _write(self, packed: bytes, until: Instant) -> None:
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        try:
            if len(packed) > READ_BYTES:  # else the buffers of the socket take it at once
                self._limit_time(until - monotonic())
            self._socket.sendall(packed)
        except BlockingIOError:
            raise TimeoutError(NO_ANSWER) from None

    def _receive(self, seconds: Seconds) -> list[Reply]:
        if seconds != self._limit:
            self._limit_time(seconds)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            raise TimeoutError(NO_ANSWER) from None
        return self._parse(data)

    def _limit_time(self, seconds: Seconds) -> None:
        seconds = max(seconds, 1e-6)  # what has arrived already is read, however late it is
        if self._subscribed:
            if seconds / 2 <= self._limit <= seconds:
                return  # who waits for messages looks at the time itself: two system calls fewer for each message
        elif seconds > WHOLE_SHARE * self.timeout:
            seconds = self.timeout
        if seconds != self._limit:
            self._limit = seconds
            if not self._in_kernel:
                self._socket.settimeout(seconds)
                return
            limit = struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def _parse(self, data: bytes) -> list[Reply]:
        """Return the replies that are complete, or the messages of a subscription."""
        if not data:
            raise ConnectionResetError(_CLOSED)
        return self._parser.feed(data)

    @property
    def stale(self) -> bool:
        """Whether it was closed, or has bytes that would be taken for the next reply; no call is in progress."""
        return self.error is not None or bool(self._poll(0))

    def close(self) -> None:
        """Close it at once. May be called twice, and while another thread reads."""
        self._fail(ConnectionAbortedError(CLOSED_HERE))

    def _fail(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.error = error
        if os.getpid() == self._process:  # else only the child's copy is closed
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which wakes a thread that reads
        self._socket.close()
        if self.on_lost is not None:
            self.on_lost(error)


class SharedConnection(Connection):
    """One connection for all tasks of an event loop. It fails when the oldest answer is overdue."""

    shared = True

    def __init__(self, sock: socket.socket, timeout: Seconds) -> None:
        super().__init__(sock, timeout)
        sock.settimeout(0)
        self._fd = sock.fileno()
        self._expected: deque[Sent] = deque()
        self._unsent = b""
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    async def call(self, packed: bytes, until: Instant = inf) -> Reply:
        return (await self.answer(self.send(packed, 1, until), until))[0]

    def send(self, packed: bytes, count: int, until: Instant = inf) -> Sent:
        sent = super().send(packed, count, until)
        self._expected.append(sent)
        sent.future, sent.replies = self._loop.create_future(), []
        sent.until = self._loop.time() + self.timeout
        if self._timer is None:
            self._timer = self._loop.call_at(sent.until, self._check_overdue)
        return sent

    async def answer(self, sent: Sent, until: Instant = inf) -> list[Reply]:
        if until == inf or (left_seconds := until - monotonic()) >= self.timeout:
            return await sent.future
        # This caller gives up earlier, and the others keep the connection: the reply is dropped when it arrives, as
        # after a cancelled call.
        try:
            async with asyncio.timeout(max(0.0, left_seconds)):
                return await sent.future
        except TimeoutError as error:
            raise TimeoutError(NO_ANSWER) from error

    async def _wait(self, until: Instant) -> None:
        if self.error is not None:
            raise ConnectionResetError(str(self.error)) from self.error
        self._news.clear()
        async with asyncio.timeout(max(0.0, until - monotonic())):
            await self._news.wait()

    def _write(self, packed: bytes, until: Instant) -> None:
        del until
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        waiting, self._unsent = self._unsent, self._unsent + packed
        if not waiting:
            self._send_rest()
            if self._unsent:
                self._loop.add_writer(self._fd, self._writable)

    def _send_rest(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _NOT_READY:
            pass
        except OSError as error:
            self._unsent = b""
            self._fail(error)
            raise

    def _writable(self) -> None:
        with suppress(OSError):  # noted
            self._send_rest()
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
            while isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                data += self._socket.recv(READ_BYTES)  # decrypted already: the event loop would not tell
            for reply in self._parse(data):
                self._take(reply)
        except _NOT_READY:
            return
        except (OSError, ServerSaid) as error:
            self._fail(error)
        self._news.set()

    def _take(self, reply: Reply) -> None:
        if self._expected:
            sent = self._expected[0]
            sent.replies.append(reply)
            if len(sent.replies) == sent.count:
                self._expected.popleft()
                if not sent.future.done():  # done: its caller has given up
                    sent.future.set_result(sent.replies)
        elif self._subscribed:
            self._messages.append(reply)
        else:
            raise reply if isinstance(reply, ServerSaid) else ConnectionError(_TOO_MANY)

    @property
    def stale(self) -> bool:
        """Whether it has ended: the event loop finds that out by itself."""
        return self.error is not None

    def _check_overdue(self) -> None:
        """Fail if the oldest answer is overdue. One timer serves all calls: most are answered long before it ends."""
        self._timer = None
        if self._expected and (until := self._expected[0].until) > self._loop.time():
            self._timer = self._loop.call_at(until, self._check_overdue)
        elif self._expected:
            self._fail(TimeoutError(NO_ANSWER))

    def _fail(self, error: BaseException) -> None:
        if self.error is None and os.getpid() == self._process:  # the selector of the event loop is the parent's, too
            if self._timer is not None:
                self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        expected, self._expected = self._expected, deque()
        for sent in expected:  # first: `on_lost` may close this connection, which is not why the calls failed
            if not sent.future.done():
                sent.future.set_exception(error)
                sent.future.exception()  # retrieved: asyncio must not log it if the caller has gone
        super()._fail(error)
        self._news.set()


async def open_connection(runtime: Runtime, target: Target, until: Instant = inf, *, log_in: bool = True) -> Connection:
    """Connect and log in."""
    until = min(until, monotonic() + target.connect_timeout + target.timeout)
    if runtime.kind != "asyncio":
        return await _open(runtime, target, until, log_in=log_in)
    try:
        async with asyncio.timeout(max(0.0, until - monotonic())):
            return await _open(runtime, target, until, log_in=log_in)
    except TimeoutError:
        raise TimeoutError(NO_ANSWER) from None


async def _open(runtime: Runtime, target: Target, until: Instant, *, log_in: bool) -> Connection:
    settings = target.settings(runtime.kind)
    context = target.tls.context(target.arguments, settings) if target.form == "tls" else None
    sock = await _connect(runtime, target, settings, min(until, monotonic() + target.connect_timeout))
    connection: Connection | None = None
    try:
        if context is not None:
            sock.getpeername()  # fails if the server has reset it; SSLSocket then would fail too, and stay open
            sock = context.wrap_socket(sock, server_hostname=settings.host, do_handshake_on_connect=False)
            await _shake_hands(runtime, sock, min(until, monotonic() + target.timeout))
        connection = (SharedConnection if runtime.kind == "asyncio" else Connection)(sock, target.timeout)
        if log_in:
            await _log_in(connection, settings, until)
    except BaseException:
        sock.close() if connection is None else connection.close()
        raise
    return connection


async def _connect(runtime: Runtime, target: Target, settings: Any, until: Instant) -> socket.socket:  # noqa: ANN401 - redis-py's
    """Return a socket that is connected and does not block; tries the addresses of a host one after the other."""
    loop = asyncio.get_running_loop() if runtime.kind == "asyncio" else None
    found = [(socket.AF_UNIX, settings.path)] if target.form == "unix" else await _addresses(runtime, settings, until)
    failure: OSError = ConnectionError("the host has no address")
    for index, (family, address) in enumerate(found):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if settings.socket_keepalive:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (settings.socket_keepalive_options or {}).items():
                        sock.setsockopt(socket.IPPROTO_TCP, option, value)
            left_seconds = max((until - monotonic()) / (len(found) - index), 0.001)
            sock.settimeout(0 if loop else left_seconds)
            if loop:
                async with asyncio.timeout(left_seconds):
                    await loop.sock_connect(sock, address)
            else:
                sock.connect(address)
                sock.settimeout(0)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    raise failure


async def _addresses(runtime: Runtime, settings: Any, until: Instant) -> list[tuple[int, Any]]:  # noqa: ANN401
    find = partial(socket.getaddrinfo, settings.host, settings.port, settings.socket_type, socket.SOCK_STREAM)
    try:
        found = find(flags=socket.AI_NUMERICHOST)  # an address: nobody needs to be asked, and no thread
    except socket.gaierror:
        found = await in_thread(runtime, find, max(0.0, until - monotonic()))  # a name server may hang
    return [(family, address) for family, _, _, _, address in found]


async def _shake_hands(runtime: Runtime, sock: ssl.SSLSocket, until: Instant) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            if not await runtime.readable(sock.fileno(), max(0.0, until - monotonic())):
                raise TimeoutError(NO_ANSWER) from None
        except ssl.SSLWantWriteError:
            await runtime.sleep(0.001)  # a server that reads nothing
        else:
            return


async def _log_in(connection: Connection, settings: Any, until: Instant) -> None:  # noqa: ANN401 - redis-py's
    """Log in, name the client and choose the database, in one round trip."""
    words: tuple[str, ...] = ()
    provider = settings.credential_provider
    if provider is None and (settings.username or settings.password):
        provider = UsernamePasswordCredentialProvider(settings.username, settings.password)
    if provider is not None:
        fetch = (
            getattr(provider, "get_credentials_async", None) if connection.shared else None
        )  # absent in redis-py 5.0
        words = provider.get_credentials() if fetch is None else await fetch()
    commands = []
    if int(settings.protocol or 2) > 2:  # noqa: PLR2004 - RESP2 needs no HELLO
        auth = ("AUTH", *(["default", *words] if len(words) == 1 else words)) if words else ()
        commands.append(pack("HELLO", int(settings.protocol), *auth))
    elif words:
        commands.append(pack("AUTH", *words))
    if settings.client_name:
        commands.append(pack("CLIENT", "SETNAME", settings.client_name))
    if settings.db:
        commands.append(pack("SELECT", settings.db))
    commands.append(pack("PING"))  # if nothing else, so that a port which answers in TLS is noticed here
    for reply in (await connection.call_many(b"".join(commands), len(commands), until))[:-1]:
        if isinstance(reply, ServerSaid):
            raise reply
