"""What the fault proxy does to connections, seen from both of their ends."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from lockkit_tools.servers import FaultProxy, http2_call_ended

# Bounds a wait for something that must come; and is long enough for what must not.
PATIENCE = 30
MOMENT = 0.2


class EchoServer(socketserver.ThreadingTCPServer):
    """Sends back what it gets, and remembers it."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.got = b""
        self.connections = 0
        self.port: int = self.server_address[1]


class Echo(socketserver.BaseRequestHandler):
    """One connection of the echo server."""

    def handle(self) -> None:
        """Echoes until the client closes."""
        assert isinstance(self.server, EchoServer)
        self.server.connections += 1
        try:
            while data := self.request.recv(65_536):
                self.server.got += data
                self.request.sendall(data)
        except ConnectionError:
            return  # what many tests here are about


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    """An echo server."""
    with EchoServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[FaultProxy]:
    """A proxy in front of it."""
    with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    """A connection to the proxy, through which one message went already."""
    with connect(proxy) as connection:
        assert asked(connection, b"hello") == b"hello"
        yield connection


def connect(proxy: FaultProxy) -> socket.socket:
    """Opens a connection to the proxy."""
    return socket.create_connection((proxy.host, proxy.port), PATIENCE)


def asked(connection: socket.socket, message: bytes) -> bytes:
    """Sends a message and gives the answer of the same length, shorter if it was cut."""
    connection.sendall(message)
    answer = b""
    while len(answer) < len(message) and (data := connection.recv(65_536)):
        answer += data
    return answer


def is_silent(connection: socket.socket) -> bool:
    """Whether nothing comes for a moment, not even the end."""
    connection.settimeout(MOMENT)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE)
    return False


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_delay_makes_answers_late(proxy: FaultProxy, client: socket.socket, direction: str) -> None:
    """Either direction can be slow."""
    proxy.delay(**{direction: MOMENT})
    began = time.monotonic()
    assert asked(client, b"late") == b"late"

    assert time.monotonic() - began >= MOMENT


def test_blackhole_keeps_bytes_until_it_heals(proxy: FaultProxy, client: socket.socket, echo: EchoServer) -> None:
    """Neither side hears anything, and nothing is lost from the stream."""
    proxy.blackhole()
    client.sendall(b"one ")
    assert is_silent(client)
    assert echo.got == b"hello"

    proxy.heal()

    client.sendall(b"two")
    client.shutdown(socket.SHUT_WR)
    assert b"".join(iter(lambda: client.recv(100), b"")) == b"one two"


def test_forgotten_connection_carries_nothing_and_new_ones_do(
    proxy: FaultProxy, client: socket.socket, echo: EchoServer
) -> None:
    """Also after `heal`; neither side hears of it."""
    assert proxy.forget() == 1
    client.sendall(b"lost")
    proxy.heal()
    with connect(proxy) as other:
        assert asked(other, b"new") == b"new"
    client.settimeout(MOMENT)
    with pytest.raises(TimeoutError):
        client.recv(4)
    assert b"lost" not in echo.got


def test_dropped_reply_was_applied_at_the_server(proxy: FaultProxy, client: socket.socket, echo: EchoServer) -> None:
    """The server has the request; the client gets the end of the stream instead of an answer."""
    dropped = proxy.drop_next_reply()

    assert asked(client, b" lost") == b""

    assert dropped.wait(PATIENCE)
    assert echo.got == b"hello lost"
    with connect(proxy) as again:
        assert asked(again, b" kept") == b" kept"


def test_dropped_reply_is_that_of_the_matching_request(proxy: FaultProxy, client: socket.socket) -> None:
    """Other requests pass."""
    dropped = proxy.drop_next_reply(match=b"SET")

    assert asked(client, b"GET 1") == b"GET 1"
    assert not dropped.is_set()
    assert asked(client, b"SET 1") == b""
    assert dropped.wait(PATIENCE)


def test_dropped_reply_is_swallowed_until_it_is_complete(proxy: FaultProxy, client: socket.socket) -> None:
    """With `until` the connection stays while the swallowed bytes are not the answer yet."""
    dropped = proxy.drop_next_reply(until=lambda answer: answer.endswith(b"done"))
    client.sendall(b"working ")
    assert is_silent(client)
    assert not dropped.is_set()

    assert asked(client, b"done") == b""

    assert dropped.wait(PATIENCE)


def test_http2_call_ends_with_headers_that_end_the_stream() -> None:
    """Settings, data and first headers are not the end of a call; trailers are."""

    def frame(kind: int, flags: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + bytes([kind, flags]) + (1).to_bytes(4) + payload

    settings, data = frame(0x4, 0x1, b""), frame(0x0, 0x0, b"\x01" * 20)
    headers, trailers = frame(0x1, 0x4, b"h" * 9), frame(0x1, 0x5, b"t")

    assert not http2_call_ended(settings + headers + data)
    assert not http2_call_ended(settings + headers + data + trailers[:5])
    assert http2_call_ended(settings + headers + data + trailers)
