"""
One connection to a Redis server, for the sync and the async API: a socket, and a time limit for each wait.

::

    connection = await open_connection(runtime, target, until)  # TCP or Unix socket, TLS, login
    reply = await connection.call(packed, until)  # error replies are values (`ServerSaid`)
    replies = await connection.call_many(packed, count, until)

    sent = connection.send(packed, count, until)  # on several connections, before the first answer is read
    replies = await connection.answer(sent, until)

    connection.subscribe(packed, until)  # from now on nothing but messages
    message = await connection.receive(until)

All of them raise `DRIVER_ERRORS`. redis-py reads and checks the arguments; lockkit connects by itself, because redis-py
does not hand over its sockets, and a call through redis-py takes twice as long as the system calls.

- Sync: a connection is for one thread at a time. After any exception of a call, including a `BaseException`, close it:
  half a reply may remain in it.
- async: all tasks of the event loop may use a connection at the same time. Replies arrive in the order of the commands,
  so a cancelled call only leaves a reply that nobody takes.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from redis.credentials import UsernamePasswordCredentialProvider

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.resp import Parser, Push, Reply, ServerSaid, pack
from lockkit.runtime import Runtime, monotonic
from lockkit.units import Instant, Seconds

READ_BYTES = 8192
"""Bytes requested per read. Replies have about 20, and each read allocates a buffer: larger takes longer."""

WHOLE_SHARE = 0.9
"""Share of the time for an answer from which a read is limited by the kernel. Lower lets a second slow node of a
Redlock take longer than the caller has; higher polls before reads that need no other limit."""

WRITE_PAUSE = 0.001
"""Seconds between two attempts of a TLS handshake to write. Only a server that reads nothing needs it."""

NO_ANSWER = "no answer in time"
CLOSED_HERE = "the connection was closed here"
_NOT_SENT = "nothing was taken in time"
_CLOSED = "the server closed the connection"
_TOO_MANY = "a reply to no command"
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Sent:
    """
    Commands that were sent, and their replies so far.

    Attributes:
        until: When the connection fails for want of an answer (the event loop's clock).
    """

    __slots__ = ("count", "future", "replies", "until")

    def __init__(self, count: int) -> None:
        self.count = count
        self.replies: list[Reply] = []
        self.future: asyncio.Future[list[Reply]] | None = None
        self.until = inf


class Connection:
    """
    One connection.

    Each call is limited by the connection's own `timeout`, or by `until` (client monotonic time) if that is earlier.

    Attributes:
        timeout: Seconds for an answer.
        shared: All tasks of an event loop may use it at the same time.
        error: Why it ended; None while it is open, as far as is known.
        on_lost: Called once with `error` when it ends.
        used: Client monotonic time of its last use, for whatever keeps the connection.
        run_id: The server's run id as told on this connection, packed; empty if unknown. It cannot change
            while the connection lives.
        sharded: Whether the server's sharded pub/sub can be used; see `lockkit.backends.redis.handshake`.
    """

    def __init__(self, runtime: Runtime, sock: socket.socket, timeout: Seconds) -> None:
        self.timeout = timeout
        self.shared = runtime.kind == "asyncio"
        self.error: BaseException | None = None
        self.on_lost: Callable[[BaseException], None] | None = None
        self.used = 0.0
        self.run_id = b""
        self.sharded = False
        self._process = os.getpid()
        self._socket = sock
        # Of a client that was dropped. Not by __del__, which the garbage collector may call after that of the socket.
        weakref.finalize(self, sock.close).atexit = False
        self._fd = sock.fileno()
        self._recv = sock.recv
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else None
        self._blocks = not self.shared and self._pending is None and _limit_in_kernel(sock, timeout)
        self._flags = socket.MSG_DONTWAIT if self._blocks else 0
        self._parser = Parser()
        self._unsent = b""
        self._expected: deque[Sent] = deque()
        self._subscribed = False
        self._messages: deque[Reply] = deque()
        self._news = runtime.event()
        self._timer: asyncio.TimerHandle | None = None
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll
        self._loop: asyncio.AbstractEventLoop | None = None
        if self.shared:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._readable)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, packed: bytes, until: Instant = inf) -> Reply:
        """Send a command and return its reply. Error replies are values."""
        if self._loop is not None or self.error is not None:
            return (await self.answer(self.send(packed, 1, until), until))[0]
        # Sync, in few steps: each lock comes here twice, and nobody else uses the connection meanwhile.
        self._write(packed, until)
        now = monotonic()
        until = min(until, now + self.timeout)
        replies = self._read(until - now)
        while len(replies) != 1 or type(replies[0]) is Push:
            if replies := [reply for reply in replies if type(reply) is not Push]:
                raise ConnectionError(_TOO_MANY)
            replies = self._read(until - monotonic())
        return replies[0]

    async def call_many(self, packed: bytes, count: int, until: Instant = inf) -> list[Reply]:
        """Send several commands at once and return their replies."""
        return await self.answer(self.send(packed, count, until), until)

    def send(self, packed: bytes, count: int, until: Instant = inf) -> Sent:
        """Send commands now; `answer` waits for their replies."""
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        sent = Sent(count)
        self._expected.append(sent)
        if self._loop is not None:
            sent.future = self._loop.create_future()
            sent.until = self._loop.time() + self.timeout
            if self._timer is None:
                self._timer = self._loop.call_at(sent.until, self._check_overdue)
        self._write(packed, until)
        return sent

    async def answer(self, sent: Sent, until: Instant = inf) -> list[Reply]:
        """Wait for the replies to commands that were sent."""
        if sent.future is None:
            until = min(until, monotonic() + self.timeout)
            while len(sent.replies) < sent.count:
                self._wait(until - monotonic())
            return sent.replies
        if until != inf and (left_seconds := until - monotonic()) < self.timeout:
            # This caller gives up earlier, and the others keep the connection: the reply is dropped when it arrives, as
            # after a cancelled call.
            assert self._loop is not None
            timer = self._loop.call_later(left_seconds, _time_out, sent.future)
            sent.future.add_done_callback(lambda _: timer.cancel())
        return await sent.future

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, packed: bytes, until: Instant = inf) -> None:
        """Send a command of a subscription, whose reply arrives as a message."""
        if self.error is not None:
            raise ConnectionResetError(_CLOSED) from self.error
        self._subscribed = True
        self._write(packed, until)

    async def receive(self, until: Instant) -> Reply:
        """Wait for the next message (a plain array in protocol 2), or the reply to a PING."""
        while not self._messages:
            if self._loop is None:
                self._wait(until - monotonic())
                continue
            if self.error is not None:
                raise ConnectionResetError(str(self.error)) from self.error
            self._news.clear()
            if not await self._news.wait(max(0.0, until - monotonic())):
                raise TimeoutError(NO_ANSWER)
        message = self._messages.popleft()
        if isinstance(message, ServerSaid):
            raise message
        return message

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, packed: bytes, until: Instant) -> None:
        waiting = bool(self._unsent)
        try:
            if not waiting:
                try:
                    count = self._socket.send(packed, self._flags)
                except _NOT_READY:
                    count = 0
                if count == len(packed):
                    return
                packed = packed[count:]
            self._unsent += packed
            if self._loop is None:
                self._flush_all(min(until, monotonic() + self.timeout))
        except OSError as error:
            self._fail(error)
            raise
        if not waiting and self._loop is not None:
            self._loop.add_writer(self._fd, self._writable)

    def _send_rest(self) -> None:
        with suppress(*_NOT_READY):
            self._unsent = self._unsent[self._socket.send(self._unsent, self._flags) :]

    def _flush_all(self, until: Instant) -> None:
        """Wait until the socket has taken everything: sync only."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._unsent:
            if not poll.poll(max(0.0, until - monotonic()) * 1000):
                raise TimeoutError(_NOT_SENT)
            self._send_rest()

    def _writable(self) -> None:
        """Go on sending: async only."""
        assert self._loop is not None
        try:
            self._send_rest()
        except OSError as error:
            self._fail(error)
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _wait(self, seconds: Seconds) -> None:
        """Wait until something arrives, and take it: sync only."""
        for reply in self._read(seconds):
            self._take(reply)

    def _readable(self) -> None:
        """Take what has arrived: async only."""
        try:
            for reply in self._read():
                self._take(reply)
        except (OSError, ServerSaid) as error:
            self._fail(error)

    def _read(self, seconds: Seconds = inf) -> Sequence[Reply]:
        """Return the replies that are complete; sync: wait for some, for so many seconds."""
        if self._loop is None and not (self._blocks and seconds > WHOLE_SHARE * self.timeout):
            left_ms = seconds * 1000 if seconds > 0 else 0
            if not self._poll(left_ms):
                raise TimeoutError(NO_ANSWER)
        try:
            data = self._recv(READ_BYTES)
            while self._pending is not None and self._pending():
                data += self._recv(READ_BYTES)  # decrypted already: no poll would tell
        except _NOT_READY:
            return ()
        if not data:
            raise ConnectionResetError(_CLOSED)
        return self._parser.feed(data)

    def _take(self, reply: Reply) -> None:
        if type(reply) is Push and not self._subscribed:
            return
        if not self._expected:
            if not self._subscribed:
                raise reply if isinstance(reply, ServerSaid) else ConnectionError(_TOO_MANY)
            self._messages.append(reply)
            self._news.set()
            return
        sent = self._expected[0]
        sent.replies.append(reply)
        if len(sent.replies) == sent.count:
            self._expected.popleft()
            if sent.future is not None and not sent.future.done():  # done: its caller was cancelled or gave up
                sent.future.set_result(sent.replies)

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """
        Whether the server is known to have closed it. For a connection with no call in progress.

        Unexpected bytes count too: they would be taken for the next reply. An event loop finds out as soon as it runs.
        """
        return self.error is not None or (self._loop is None and bool(self._poll(0)))

    def _check_overdue(self) -> None:
        """Fail if the oldest answer is overdue. One timer serves all calls: most are answered long before it ends."""
        self._timer = None
        if self._expected:
            assert self._loop is not None
            until = self._expected[0].until
            if until <= self._loop.time():
                self._fail(TimeoutError(NO_ANSWER))
            else:
                self._timer = self._loop.call_at(until, self._check_overdue)

    def close(self) -> None:
        """Close it at once. May be called twice, and while another thread reads."""
        self._fail(ConnectionAbortedError(CLOSED_HERE))

    def _fail(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # After a fork only the child's copy is closed: the selector of the event loop is the parent's, too.
        if os.getpid() == self._process:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
                self._loop.remove_writer(self._fd)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which wakes a thread that reads
        self._socket.close()
        expected, self._expected = self._expected, deque()
        for sent in expected:
            if sent.future is not None and not sent.future.done():
                sent.future.set_exception(error)
                sent.future.exception()  # retrieved: asyncio must not log it if the caller has gone
        self._news.set()
        if self.on_lost is not None:
            self.on_lost(error)


def _limit_in_kernel(sock: socket.socket, seconds: Seconds) -> bool:
    """
    Have the kernel limit the time of reads: a poll before each of them makes a lock a fifth slower.

    Return False if reads do not block there, as with gevent.
    """
    sock.settimeout(None)
    if not os.get_blocking(sock.fileno()):
        sock.settimeout(0)
        return False
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return True


def _time_out(future: asyncio.Future[list[Reply]]) -> None:
    if not future.done():
        future.set_exception(TimeoutError(NO_ANSWER))
        future.exception()  # retrieved: asyncio must not log it if the caller has gone


# -- connecting ------------------------------------------------------------------------------------------------------


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
    sock = await _connect(runtime, target, settings, min(until, monotonic() + target.connect_timeout))
    try:
        if target.form == "tls":
            sock = target.tls.context(target.arguments, settings).wrap_socket(
                sock, server_hostname=settings.host, do_handshake_on_connect=False
            )
            await _shake_hands(runtime, sock, min(until, monotonic() + target.timeout))
        connection = Connection(runtime, sock, target.timeout)
    except BaseException:
        sock.close()
        raise
    try:
        if log_in:
            await _log_in(connection, settings, until)
    except BaseException:
        connection.close()
        raise
    return connection


async def _connect(runtime: Runtime, target: Target, settings: Any, until: Instant) -> socket.socket:  # noqa: ANN401 - redis-py's
    """Return a socket that is connected and does not block; tries the addresses of a host one after the other."""
    if target.form == "unix":
        return await _connect_to(runtime, socket.AF_UNIX, settings.path, until)
    find = partial(socket.getaddrinfo, settings.host, settings.port, settings.socket_type, socket.SOCK_STREAM)
    try:
        found = find(flags=socket.AI_NUMERICHOST)  # an address: nobody needs to be asked, and no thread
    except socket.gaierror:
        loop = asyncio.get_running_loop() if runtime.kind == "asyncio" else None
        found = find() if loop is None else await loop.run_in_executor(None, find)
    failure: OSError = ConnectionError("the host has no address")
    for family, _, _, _, address in found:
        try:
            sock = await _connect_to(runtime, family, address, until)
        except OSError as error:
            failure = error
            continue
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if settings.socket_keepalive:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in (settings.socket_keepalive_options or {}).items():
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
        except BaseException:
            sock.close()
            raise
        return sock
    raise failure


async def _connect_to(runtime: Runtime, family: int, address: Any, until: Instant) -> socket.socket:  # noqa: ANN401
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        left_seconds = max(until - monotonic(), 0.001)
        if runtime.kind == "asyncio":
            sock.settimeout(0)
            async with asyncio.timeout(left_seconds):
                await asyncio.get_running_loop().sock_connect(sock, address)
        else:
            sock.settimeout(left_seconds)
            sock.connect(address)
            sock.settimeout(0)
    except BaseException:
        sock.close()
        raise
    return sock


async def _shake_hands(runtime: Runtime, sock: ssl.SSLSocket, until: Instant) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            if not await runtime.readable(sock.fileno(), max(0.0, until - monotonic())):
                raise TimeoutError(NO_ANSWER) from None
        except ssl.SSLWantWriteError:
            await runtime.sleep(WRITE_PAUSE)
        else:
            return


async def _log_in(connection: Connection, settings: Any, until: Instant) -> None:  # noqa: ANN401 - redis-py's
    """Log in, name the client and choose the database, in one round trip."""
    words = await _credentials(settings, asynchronous=connection.shared)
    if int(settings.protocol or 2) > 2:  # noqa: PLR2004 - RESP2 needs no HELLO
        auth = ("AUTH", *(["default", *words] if len(words) == 1 else words)) if words else ()
        needed = [pack("HELLO", int(settings.protocol), *auth)]
    else:
        needed = [pack("AUTH", *words)] if words else []
    if settings.client_name:
        needed.append(pack("CLIENT", "SETNAME", settings.client_name))
    if settings.db:
        needed.append(pack("SELECT", settings.db))
    # Servers before 7.2 do not know it.
    wished = [pack("CLIENT", "SETINFO", name, value) for name, value in _library(settings) if value]
    commands = [*needed, *wished]
    if not commands:
        return
    replies = await connection.call_many(b"".join(commands), len(commands), until)
    for reply in replies[: len(needed)]:
        if isinstance(reply, ServerSaid):
            raise reply


async def _credentials(settings: Any, *, asynchronous: bool) -> tuple[str, ...]:  # noqa: ANN401 - redis-py's
    provider = settings.credential_provider
    if provider is None:
        if not (settings.username or settings.password):
            return ()
        provider = UsernamePasswordCredentialProvider(settings.username, settings.password)
    fetch = getattr(provider, "get_credentials_async", None) if asynchronous else None  # absent in redis-py 5.0
    words: tuple[str, ...] = provider.get_credentials() if fetch is None else await fetch()
    return words


def _library(settings: Any) -> list[tuple[str, str | None]]:  # noqa: ANN401 - redis-py's
    """Return what to call the client's library, as CLIENT LIST shows it."""
    info = getattr(settings, "driver_info", None)
    if info is not None:
        return [("LIB-NAME", info.formatted_name), ("LIB-VER", info.lib_version)]
    # Before redis-py 7.2.
    return [("LIB-NAME", getattr(settings, "lib_name", None)), ("LIB-VER", getattr(settings, "lib_version", None))]
