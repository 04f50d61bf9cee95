"""Connecting and closing leave no socket open, whatever interrupts them."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from lockkit.backends.redis import connection as connection_module
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import open_connection
from lockkit.backends.redis.resp import pack
from lockkit_tools.servers import RedisServer, require
from tests.backends.redis.faces import both
from tests.backends.support import StubHost

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


@both
async def test_closed_connection_gives_no_resource_warning(server: RedisServer, host: StubHost) -> None:
    """Its socket is closed at once, over TLS too."""
    own = f"{server.port})"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connection = await open_connection(host.runtime, target_of(server))
        assert await connection.call(pack("PING")) == b"PONG"
        connection.close()
        gc.collect()
    # Only about this one: the garbage collector finds what other tests have left, too.
    assert [str(warning.message) for warning in caught if own in str(warning.message)] == []


@both
async def test_large_batch_is_sent_to_a_server_that_reads_late(host: StubHost) -> None:
    """More than the buffers of the socket take at once."""
    batch = pack("ECHO", b"x" * 100_000) * 60

    with RedisServer() as node:
        connection = await open_connection(host.runtime, Target.anywhere({}, tls=False).moved(node.host, node.port))
        node.pause()
        threading.Timer(0.3, node.resume).start()
        replies = await connection.call_many(batch, 60)
        connection.close()
    assert [len(reply) for reply in replies if isinstance(reply, bytes)] == [100_000] * 60


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


@both
async def test_login_that_hangs_leaves_no_open_socket(server: RedisServer, host: StubHost) -> None:
    """The connection is ended at once, though the server takes no part in ending TLS."""
    target = target_of(server)

    with closing(SilentTlsServer(server.certificates)) as silent:
        silence = Target.anywhere({**target.arguments, "username": "a", "password": "b"}, tls=True)
        where = silence.moved("127.0.0.1", silent.port)
        with pytest.raises(TimeoutError):
            await open_connection(host.runtime, where, host.runtime.now() + 2.0)
        assert silent.client_has_gone.wait(PATIENCE)


@both
async def test_reset_before_the_handshake_leaves_no_open_socket(
    server: RedisServer, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's `SSLSocket` fails then, and does not close itself (as of 3.13)."""
    connect = connection_module._connect

    async def connect_and_be_reset(*arguments: Any) -> socket.socket:
        made = await connect(*arguments)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        return made

    monkeypatch.setattr(connection_module, "_connect", connect_and_be_reset)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="not connected"):
            await open_connection(host.runtime, target_of(server).moved(*listener.getsockname()))
        gc.collect()
    assert [str(warning.message) for warning in caught if "SSLSocket" in str(warning.message)] == []
