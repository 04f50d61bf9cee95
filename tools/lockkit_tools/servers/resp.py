"""
The least code that talks to Redis: a blocking socket, one request at a time, no driver.

For administration of servers, and for the baselines of the benchmark, which pack their requests themselves. Answers are
parsed as lockkit's own are.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Self, TypeAlias

from lockkit.backends.redis import resp
from lockkit.units import Seconds

Answer: TypeAlias = resp.Reply
Reply: TypeAlias = "str | int | list[Reply] | None"

TIMEOUT = 5.0
"""A server that does not answer is asked again; longer only delays that."""

_CHUNK = 4096


class ServerSaid(ConnectionError):
    """The server answered with an error; an `OSError`, as "not ready yet" is one too."""


class RespConnection:
    """
    One connection; a context manager that closes it.

    Args:
        address: ``(host, port)``, or the path of a Unix socket.
        ca: Certificate that signed the server's, for TLS.
        timeout: Seconds to wait for the connection and for each answer.
    """

    def __init__(
        self,
        address: tuple[str, int] | Path,
        *,
        ca: Path | None = None,
        timeout: Seconds = TIMEOUT,
    ) -> None:
        self._parser = resp.Parser()
        self._answers: list[Answer] = []
        context = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self._socket = plain = _connect(address, timeout)
        if context is not None:
            context.check_hostname = False  # a test may need a server whose certificate is for another host
            try:
                self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1")
            except BaseException:
                plain.close()
                raise

    def ask(self, request: bytes) -> Answer:
        """Send one packed command and give its answer."""
        self._socket.sendall(request)
        return self.receive()

    def send(self, request: bytes) -> None:
        """Send one packed command; the answer is for `receive`."""
        self._socket.sendall(request)

    def receive(self) -> Answer:
        """Read one answer."""
        while not self._answers:
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionError("the server closed the connection")
            self._answers += self._parser.feed(chunk)
        answer = self._answers.pop(0)
        if isinstance(answer, resp.ServerSaid):
            raise ServerSaid(answer.text)
        return answer

    def load(self, script: bytes) -> bytes:
        """Load a script; give the name that ``EVALSHA`` takes."""
        answer = self.ask(resp.pack(b"SCRIPT", b"LOAD", script))
        assert isinstance(answer, bytes), answer
        return answer

    def call(self, *words: str | int | bytes) -> Reply:
        """Send one command and give its answer, strings decoded as UTF-8."""
        return _decoded(self.ask(resp.pack(*words)))

    def call_str(self, *words: str | int | bytes) -> str:
        """As `call`, for commands whose answer is a string."""
        reply = self.call(*words)
        if not isinstance(reply, str):
            raise ServerSaid(f"{words[0]!r} answered {reply!r}, not a string")
        return reply

    def call_list(self, *words: str | int | bytes) -> list[Reply]:
        """As `call`, for commands whose answer is an array."""
        reply = self.call(*words)
        if not isinstance(reply, list):
            raise ServerSaid(f"{words[0]!r} answered {reply!r}, not a list")
        return reply

    def info(self, section: str) -> dict[str, str]:
        """Give the fields of one section of INFO."""
        return fields(self.call_str("INFO", section))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(*words: bytes) -> bytes:
    """Pack one command: with less work than `resp.pack`, which takes more types."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def fields(text: str) -> dict[str, str]:
    """Read the ``name:value`` lines of INFO or CLUSTER INFO."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _decoded(answer: Answer) -> Reply:
    if isinstance(answer, list):
        return [_decoded(one) for one in answer]
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    assert answer is None or isinstance(answer, int), answer
    return answer


def _connect(address: tuple[str, int] | Path, timeout: Seconds) -> socket.socket:
    if isinstance(address, tuple):
        connection = socket.create_connection(address, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection
