"""Canaries for `lockkit.backends.redis.quirks`: each test fails without one workaround, or when redis-py changes."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import AsyncConnection, SyncConnection, open_connection
from lockkit.backends.redis.quirks import connect_asyncio
from lockkit.backends.redis.resp import pack
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive, monotonic
from lockkit_tools.servers import RedisServer, require

PATIENCE = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node, over TLS."""
    require("redis", local=True)
    with RedisServer(tls=True) as node:
        yield node


def target_of(server: RedisServer) -> Target:
    """Give the way to a server."""
    assert server.certificates is not None
    target = Target.anywhere({"ssl_ca_certs": str(server.certificates.ca)}, tls=True)
    return target.moved(server.host, server.port)


def test_redis_py_hands_over_its_socket(server: RedisServer) -> None:
    """`_sock` is the socket of a sync connection."""
    connection = drive(open_connection(BlockingRuntime(), target_of(server)))
    assert isinstance(connection, SyncConnection)
    assert connection.call(pack("PING")) == b"PONG"
    connection.close()


def test_redis_py_hands_over_its_transport(server: RedisServer) -> None:
    """`_writer.transport` is the transport of an asyncio connection."""

    async def scenario() -> None:
        connection = await open_connection(AsyncioRuntime(), target_of(server))
        assert isinstance(connection, AsyncConnection)
        assert await connection.call(pack("PING")) == b"PONG"
        connection.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_connection_that_ends_after_its_login_is_not_used() -> None:
    """The first call fails at once, and not when the time for its answer is over."""

    async def log_in(driver_connection: Any) -> None:  # noqa: ANN401 - redis-py's
        while not driver_connection._reader.at_eof():  # noqa: ASYNC110 - the server ends it
            await asyncio.sleep(0)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = Target.anywhere({"redis_connect_func": log_in}, tls=False)
            opening = asyncio.create_task(
                open_connection(AsyncioRuntime(), target.moved("127.0.0.1", listener.getsockname()[1]))
            )
            served, _ = await asyncio.to_thread(listener.accept)
            served.close()
            connection = await opening
            assert connection.stale
            with pytest.raises(ConnectionResetError):
                await connection.call(pack("PING"))  # type: ignore[misc]

    asyncio.run(scenario())


def test_closed_connection_gives_no_resource_warning(server: RedisServer) -> None:
    """redis-py's object does not say that it was never closed."""

    async def scenario() -> None:
        connection = await open_connection(AsyncioRuntime(), target_of(server))
        connection.close()
        await asyncio.sleep(0)

    own = f"port={server.port}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()
    # Only about this one: the garbage collector finds what other tests have left, too.
    assert [str(warning.message) for warning in caught if own in str(warning.message)] == []


class SilentTlsServer:
    """Completes the TLS handshake of one client, and then says nothing."""

    def __init__(self, certificates: Any) -> None:  # noqa: ANN401 - of a throw-away server
        """Accept a client from now on."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.server, certificates.server_key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.client_has_gone = threading.Event()
        threading.Thread(target=self._serve, name="silent", daemon=True).start()

    def _serve(self) -> None:
        plain, _ = self._listener.accept()
        with self._context.wrap_socket(plain, server_side=True) as client:
            # The bytes below TLS: the client's wish to end TLS is not the end of the connection.
            with socket.socket(fileno=os.dup(client.fileno())) as raw, suppress(ConnectionResetError):
                raw.settimeout(PATIENCE)
                while raw.recv(4096):
                    pass
            self.client_has_gone.set()

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()


def test_login_that_hangs_leaves_no_open_socket(server: RedisServer) -> None:
    """The connection is ended at once, though the server takes no part in ending TLS."""
    target = target_of(server)
    with closing(SilentTlsServer(server.certificates)) as silent:
        silence = Target.anywhere({**target.arguments, "username": "a", "password": "b"}, tls=True)

        async def scenario() -> None:
            with pytest.raises(TimeoutError):
                await open_connection(AsyncioRuntime(), silence.moved("127.0.0.1", silent.port), monotonic() + 2.0)
            assert await asyncio.to_thread(silent.client_has_gone.wait, PATIENCE)

        asyncio.run(scenario())


def test_cancellation_that_redis_py_swallows_is_raised() -> None:
    """A cancelled caller does not go on, whatever becomes of the connecting."""

    class Swallowing:
        redis_connect_func = None

        async def connect(self) -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENCE)

    async def scenario() -> None:
        connecting = asyncio.ensure_future(connect_asyncio(Swallowing(), None))
        await asyncio.sleep(0.01)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()

    asyncio.run(scenario())


def test_interrupted_connect_leaves_no_open_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the TCP connection is made."""
    connecting: list[socket.socket] = []

    def interrupt(sock: socket.socket, address: object) -> None:
        del address
        connecting.append(sock)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket.socket, "connect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        drive(open_connection(BlockingRuntime(), Target.anywhere({}, tls=False).moved("127.0.0.1", 1)))

    assert [sock.fileno() for sock in connecting] == [-1]
