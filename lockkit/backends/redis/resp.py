r"""
The Redis serialization protocol, versions 2 and 3: packing commands, reading replies.

lockkit does not use redis-py's parsers, because those read the socket themselves, and because its replies are short:
for ``:1\r\n`` a slice and `int` are faster than any parser.

Source: the page "Redis serialization protocol specification" of the Redis documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias


class ServerSaid(Exception):
    """An error reply. A value in pipelines, raised by single calls; see `lockkit.backends.redis.errors.translate`."""

    def __init__(self, text: str) -> None:
        # Of a command that it does not know, a server repeats the arguments: the password, if that is HELLO or AUTH.
        text = text.partition(", with args")[0]
        super().__init__(text)
        self.text = text  # what the server said: ``READONLY You can't write against a read only replica.``
        self.code = text.partition(" ")[0]  # the first word in capitals: ``READONLY``


class Push(list["Reply"]):
    """A message that answers no command (protocol 3), as of pub/sub."""


Reply: TypeAlias = "bytes | int | float | bool | ServerSaid | list[Reply] | None"
"""Status and bulk replies are bytes, maps are flat lists."""


class _IncompleteError(Exception):
    """The buffer ends within a reply."""


def bulk(value: bytes | str | int) -> bytes:
    """Pack one argument. Ints as decimal digits, str as UTF-8."""
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, int):
        value = b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(value), value)


def pack(*arguments: bytes | str | int) -> bytes:
    """Pack one command."""
    return b"*%d\r\n%b" % (len(arguments), b"".join(map(bulk, arguments)))


class Parser:
    """Turns the bytes of one connection into replies."""

    __slots__ = ("_at", "_buffer", "pushes")

    def __init__(self) -> None:
        self.pushes = True  # are wanted; else they are dropped
        self._buffer = b""
        self._at = 0

    def feed(self, data: bytes) -> list[Reply]:
        """Take bytes from the server, and return the replies that are complete with them."""
        if not self._buffer and data[:1] == b":" and data[-1:] == b"\n":
            try:
                return [int(data[1:])]  # nearly always
            except ValueError:  # more than one number
                pass
        self._buffer += data
        replies: list[Reply] = []
        done = self._at = 0
        try:
            while done < len(self._buffer):
                reply = self._read()
                done = self._at
                if self.pushes or type(reply) is not Push:
                    replies.append(reply)
        except _IncompleteError:
            pass
        self._buffer = self._buffer[done:]
        return replies

    def _line(self) -> bytes:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            raise _IncompleteError
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def _exactly(self, count: int) -> bytes:
        end = self._at + count
        if len(self._buffer) < end + 2:
            raise _IncompleteError
        data = self._buffer[self._at : end]
        self._at = end + 2
        return data

    def _read(self) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        try:
            if kind in b"$*" and rest == b"-1":
                return None
            if kind in b":(":
                return int(rest)
            if kind in b"$=!":
                data = self._exactly(int(rest))
                return _error(data) if kind == b"!" else data[4:] if kind == b"=" else data  # after "txt:"
            if kind in b"*~>%|":
                items = [self._read() for _ in range(int(rest) * (2 if kind in b"%|" else 1))]
                if kind == b"|":
                    return self._read()  # the items are about this one
                return Push(items) if kind == b">" else items
            return _SIMPLE[kind](rest)
        except (KeyError, ValueError):
            message = f"the server answered something that is not the Redis protocol: {line[:40]!r}"
            raise ConnectionError(message) from None


def _error(text: bytes) -> ServerSaid:
    return ServerSaid(text.decode("utf-8", "replace"))


_SIMPLE: dict[bytes, Callable[[bytes], Reply]] = {
    b"+": lambda rest: rest,
    b"-": _error,
    b"_": lambda _: None,
    b"#": lambda rest: rest == b"t",
    b",": float,
}
