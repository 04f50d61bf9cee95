"""The least code that talks to Redis: a blocking socket, bytes packed by hand, one answer parsed. For the baselines."""

from __future__ import annotations

import socket
from typing import Self
from urllib.parse import quote

from lockkit.url import HostPort, Url, parse

RELEASE = b"""
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

RELEASE_AND_SIGNAL = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2])
redis.call('RPUSH', KEYS[2], '1')
redis.call('PEXPIRE', KEYS[2], 1000)
return 1
"""

FENCED_SET = b"""
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local time = redis.call('TIME')
return math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), time[1] * 1000000 + time[2])
"""

FENCE = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', 86400000)
return 1
"""

READ = b"""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""

WRITE = b"""
local time = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return 1
"""

PERMIT = b"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

_SECONDS_MAX = 60.0
"""An answer that takes longer fails the subject; a ``BLPOP`` of one lease time must fit."""

_CHUNK = 4096


def encode(*words: bytes) -> bytes:
    """Pack one command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def node_urls(url: str) -> list[str]:
    """Give a ``redis://`` URL for each node of a ``redlock://`` URL; any other URL as it is."""
    parsed = parse(url)
    if parsed.base != "redlock":
        return [url]
    return [f"redis://{_userinfo(host)}{host}{parsed.raw_path}" for host in parsed.hosts]


def connect_to(url: str) -> RawConnection:
    """Connect to the node of a ``redis://``, ``valkey://`` or ``unix://`` URL."""
    parsed: Url = parse(url)
    if parsed.base == "unix":
        return RawConnection(parsed.path, dict(parsed.query).get("db", "0"), parsed.username, parsed.password)
    host = parsed.hosts[0]
    database = parsed.path.strip("/") or "0"
    return RawConnection((host.host, host.port or 6379), database, host.username, host.password)


def _userinfo(host: HostPort) -> str:
    if host.password is None:
        return ""
    return f"{quote(host.username or '', safe='')}:{quote(host.password, safe='')}@"


class RawConnection:
    """
    One connection.

    Args:
        address: Host and port, or the path of a Unix socket.
        database: Its number, as text.
        username: For ``AUTH``, or None.
        password: For ``AUTH``, or None.
    """

    def __init__(
        self, address: tuple[str, int] | str, database: str, username: str | None, password: str | None
    ) -> None:
        self._buffer = b""
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
        else:
            self._socket = socket.create_connection(address)
        try:
            if isinstance(address, str):
                self._socket.connect(address)
            else:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_SECONDS_MAX)
            if password is not None:
                self.ask(encode(b"AUTH", (username or "default").encode(), password.encode()))
            if database != "0":
                self.ask(encode(b"SELECT", database.encode()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: bytes) -> object:
        """Send one packed command and give its answer."""
        self._socket.sendall(request)
        return self.receive()

    def send(self, request: bytes) -> None:
        """Send one packed command; the answer is for `receive`."""
        self._socket.sendall(request)

    def load(self, script: bytes) -> bytes:
        """Load a script; give the name that ``EVALSHA`` takes."""
        answer = self.ask(encode(b"SCRIPT", b"LOAD", script))
        assert isinstance(answer, bytes), answer
        return answer

    def receive(self) -> object:
        """Read one answer: bytes, int, list or None."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._bulk(int(rest))
        if kind == b"*":
            return None if rest == b"-1" else [self.receive() for _ in range(int(rest))]
        raise RuntimeError(line.decode(errors="replace"))

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            self._more()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _bulk(self, length: int) -> bytes:
        while len(self._buffer) < length + 2:
            self._more()
        data, self._buffer = self._buffer[:length], self._buffer[length + 2 :]
        return data

    def _more(self) -> None:
        chunk = self._socket.recv(_CHUNK)
        if not chunk:
            message = "the server closed the connection"
            raise ConnectionError(message)
        self._buffer += chunk
