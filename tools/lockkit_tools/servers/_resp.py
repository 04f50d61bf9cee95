"""
A Redis connection of a hundred lines, so that servers start without any driver installed.

RESP2 on a blocking socket, one request at a time.  Only for administration: starting,
joining and asking servers.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Self, TypeAlias

from lockkit.units import Seconds

Reply: TypeAlias = "str | int | list[Reply] | None"

# A server that does not answer is asked again; longer only delays that.
TIMEOUT = 5.0


class ServerSaid(OSError):
    """The server answered with an error; an `OSError`, as "not ready yet" is one too."""


class RespConnection:
    """
    One connection; a context manager that closes it.

    Args:
        address: ``(host, port)``, or the path of a Unix socket.
        ca: Certificate that signed the server's, for TLS.
        certificate: Files with our own certificate and its key, for TLS.
        timeout: Seconds to wait for the connection and for each answer.
    """

    def __init__(
        self,
        address: tuple[str, int] | Path,
        *,
        ca: Path | None = None,
        certificate: tuple[Path, Path] | None = None,
        timeout: Seconds = TIMEOUT,
    ) -> None:
        plain = _connect(address, timeout)
        try:
            self._socket = plain if ca is None else _wrap(plain, ca, certificate)
        except BaseException:
            plain.close()
            raise
        self._file = self._socket.makefile("rb")

    def call(self, *words: str | int | bytes) -> Reply:
        """Sends one command and gives its answer, strings decoded as UTF-8."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        request = b"*%d\r\n" % len(encoded)
        request += b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        self._socket.sendall(request)
        return self._read()

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
        """The fields of one section of INFO."""
        return fields(self.call_str("INFO", section))

    def close(self) -> None:
        """Closes the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Reply:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            raise ServerSaid(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return self._read_string(int(rest))
        if kind == b"*":
            return [self._read() for _ in range(int(rest))] if int(rest) >= 0 else None
        raise ConnectionError(f"not a Redis answer: {line!r}")

    def _read_string(self, length: int) -> str | None:
        if length < 0:
            return None
        data = self._file.read(length + 2)
        if len(data) != length + 2:
            raise ConnectionError("the server closed the connection")
        return data[:-2].decode(errors="replace")


def fields(text: str) -> dict[str, str]:
    """The ``name:value`` lines of INFO or CLUSTER INFO."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _connect(address: tuple[str, int] | Path, timeout: Seconds) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


def _wrap(plain: socket.socket, ca: Path, certificate: tuple[Path, Path] | None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False  # a test may need a server whose certificate is for another host
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")
