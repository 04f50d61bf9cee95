"""
Everything that relies on private parts of redis-py, or works around what it or Python does wrong.

redis-py connects and logs in; lockkit then uses the socket itself. redis-py has no public way to hand over a socket,
so its private attributes are used here, and only here. All of this was seen with redis-py 8.1.0 on Python 3.11 and
3.13. The tests named below are in ``tests/backends/redis/test_quirks.py``; each fails without its workaround.

===========================  ========================================================================================
`socket_of`                  private ``Connection._sock`` (sync); no public way to the socket.
                             Test: ``test_redis_py_hands_over_its_socket``
`transport_of`               private ``Connection._writer`` (asyncio); no public way to the transport.
                             Test: ``test_redis_py_hands_over_its_transport``
`has_ended`                  private ``Connection._reader`` (asyncio): if the server ends the connection right after
                             the login, only redis-py's reader is told, and the transport reads no more.
                             Test: ``test_connection_that_ends_after_its_login_is_not_used``
`detach`                     ``Connection.__del__`` (asyncio) warns of an unclosed connection if ``_writer`` is set.
                             Test: ``test_closed_connection_gives_no_resource_warning``
`connect_asyncio`            If the login fails or is cancelled, redis-py closes the transport politely and forgets it.
                             Over TLS that waits for the server (30 s in asyncio): a server that hangs keeps the socket
                             open, and an event loop that ends earlier leaves a ``ResourceWarning``.
                             Test: ``test_login_that_hangs_leaves_no_open_socket``
`connect_asyncio`            redis-py uses ``asyncio.wait_for``, which before Python 3.12 swallows a cancellation that
                             arrives as the inner task ends (bpo-37658): a cancelled waiter would go on waiting.
                             Test: ``test_cancellation_that_redis_py_swallows_is_raised``
`close_interrupted_sockets`  Ctrl-C while redis-py waits for a TCP connection: it closes its socket after an ``OSError``
                             only. Test: ``test_interrupted_connect_leaves_no_open_socket``
`TlsConnections`             redis-py reads the authorities' certificates anew for each connection: 10 to 20 ms, with
                             asyncio even if the server refuses it. Overrides private ``Connection._connect`` (sync).
                             Test: ``test_tls_context_is_made_once``
===========================  ========================================================================================

If a later redis-py renames ``_sock`` or ``_writer``, every connection fails with a `ConfigurationError`, as it does for
a stand-in without a socket.
"""

from __future__ import annotations

import asyncio
import socket
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio.connection
import redis.connection

from lockkit.errors import ConfigurationError
from lockkit.runtime import Kind

if TYPE_CHECKING:
    import ssl


_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


class TlsConnections:
    """Makes TLS connections that share the context of the first one, until one of its files is replaced."""

    def __init__(self) -> None:
        """Make nothing yet."""
        self._made: tuple[object, Any] | None = None

    def make(self, kind: Kind, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - redis-py's
        """Make a connection that is not connected yet, with redis-py's arguments."""
        files = [_version_of_file(arguments.get(name)) for name in _TLS_FILES]
        shared = self._made[1] if self._made is not None and self._made[0] == files else None
        if kind != "asyncio":
            return _SyncTls(shared, partial(self._keep, files), arguments)
        connection = redis.asyncio.connection.SSLConnection(**arguments)
        if shared is None:
            self._keep(files, connection.ssl_context)
        else:
            connection.ssl_context = shared
        return connection

    def _keep(self, files: object, context: object) -> None:
        self._made = files, context


def _version_of_file(path: Any) -> object:  # noqa: ANN401 - an argument of redis-py
    """Return what changes when a file is replaced: certificates are renewed while clients run."""
    try:
        found = Path(path).stat()
    except (OSError, TypeError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns


class _SyncTls(redis.connection.SSLConnection):
    """A connection with a TLS context that there is already."""

    def __init__(
        self, context: ssl.SSLContext | None, keep: Callable[[object], None], arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(**arguments)
        self._context = context
        self._keep_context = keep

    def _connect(self) -> Any:  # noqa: ANN401 - a socket
        if self._context is None or self.ssl_validate_ocsp or self.ssl_validate_ocsp_stapled:
            wrapped = super()._connect()  # type: ignore[no-untyped-call]
            self._keep_context(wrapped.context)
            return wrapped
        plain = redis.connection.Connection._connect(self)  # type: ignore[no-untyped-call]  # noqa: SLF001
        try:
            return self._context.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


def socket_of(driver_connection: Any) -> socket.socket:  # noqa: ANN401 - redis-py's
    """Return the socket of a connected sync connection."""
    sock: socket.socket | None = getattr(driver_connection, "_sock", None)
    if sock is None or not hasattr(sock, "recv"):
        raise _no_socket(driver_connection)
    return sock


def transport_of(driver_connection: Any) -> asyncio.Transport:  # noqa: ANN401 - redis-py's
    """Return the transport of a connected asyncio connection."""
    transport: asyncio.Transport | None = getattr(getattr(driver_connection, "_writer", None), "transport", None)
    if transport is None:
        raise _no_socket(driver_connection)
    return transport


def _no_socket(driver_connection: object) -> ConfigurationError:
    kind = type(driver_connection)
    message = (
        f"connections of the class {kind.__module__}.{kind.__qualname__} have no socket that lockkit could use: a "
        "stand-in for Redis, such as fakeredis, cannot be used. In tests, use lockkit.connect('memory://')"
    )
    return ConfigurationError(message)


def has_ended(driver_connection: Any) -> bool:  # noqa: ANN401 - redis-py's
    """Tell whether an asyncio connection has ended since it connected: its transport will not report that again."""
    return bool(driver_connection._reader.at_eof()) or transport_of(driver_connection).is_closing()  # noqa: SLF001


def detach(driver_connection: Any) -> None:  # noqa: ANN401 - redis-py's
    """Make redis-py forget the transport of an asyncio connection, which lockkit closes itself."""
    driver_connection._reader = driver_connection._writer = None  # noqa: SLF001


async def connect_asyncio(driver_connection: Any, timeout: float | None) -> None:  # noqa: ANN401 - redis-py's
    """Connect an asyncio connection and log in; leave nothing open if that fails or is cancelled."""
    opened = _remember_transport(driver_connection)

    def abort(_: object = None) -> None:
        for transport in opened:
            transport.abort()
        detach(driver_connection)

    # In a separate task: asyncio.wait swallows no cancellation.
    task: asyncio.Task[None] = asyncio.ensure_future(driver_connection.connect())
    try:
        await asyncio.wait([task], timeout=timeout)
        if not task.done():
            raise TimeoutError("no answer in time")  # noqa: TRY301 - handled as a cancellation is
    except BaseException:
        task.cancel()
        task.add_done_callback(_retrieve_error)
        task.add_done_callback(abort)
        raise
    if task.cancelled() or task.exception() is not None:
        abort()
    if task.cancelled():
        message = "the connecting was cancelled"
        raise ConnectionAbortedError(message)
    task.result()


def _remember_transport(driver_connection: Any) -> list[asyncio.Transport]:  # noqa: ANN401 - redis-py's
    """Collect the transports that a connection opens: redis-py forgets one whose login fails."""
    opened: list[asyncio.Transport] = []
    log_in = driver_connection.redis_connect_func

    async def on_connect(connection: Any) -> None:  # noqa: ANN401 - redis-py's
        opened.append(transport_of(connection))
        if log_in is None:
            await connection.on_connect()
        elif asyncio.iscoroutinefunction(log_in):
            await log_in(connection)
        else:
            log_in(connection)

    driver_connection.redis_connect_func = on_connect
    return opened


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()


def close_interrupted_sockets(error: BaseException) -> None:
    """Close the sockets that are local variables of the functions through which an interrupt was raised."""
    if isinstance(error, Exception):
        return
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, socket.socket):
                # Not its own close(): the interrupt may have come in the middle of its __init__.
                super(socket.socket, value).close()
