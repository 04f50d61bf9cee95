"""
What a server says about itself: commands and connections while it is used, version and durability.

One class for each kind of server that can be asked; `watch` finds it by the URL's scheme.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from lockkit.bench.wire import encode, node_urls, wire_to
from lockkit.url import parse

if TYPE_CHECKING:
    from types import TracebackType

    from lockkit.bench.wire import Wire

__all__ = ["Observer", "RedisObserver", "watch"]

_REDIS = ("redis", "valkey", "unix", "redlock")


class Observer:
    """A server that cannot be asked: no figures. A context manager; made before those who use the server connect."""

    def begin(self) -> None:
        """Count from now on."""

    def end(self) -> dict[str, float]:
        """Give ``commands_per_second`` since `begin`, and the ``connections`` that are new since this was made."""
        return {}

    def about(self) -> dict[str, str]:
        """Give version and settings that matter for speed and durability."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class RedisObserver(Observer):
    """
    One Redis node, or several independent ones: their sums.

    Counts every command of everybody: meant for a server that nobody else uses meanwhile.
    """

    def __init__(self, urls: list[str]) -> None:
        with ExitStack() as stack:
            self._wires = [stack.enter_context(wire_to(url)) for url in urls]
            self._stack = stack.pop_all()
        self._connections = self._count_connections()
        self._began = 0.0
        self._commands = 0

    def begin(self) -> None:
        """See `Observer.begin`."""
        self._commands = self._count_commands()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        """See `Observer.end`."""
        seconds = time.monotonic() - self._began
        return {
            "commands_per_second": (self._count_commands() - self._commands) / seconds,
            "connections": self._count_connections() - self._connections,
        }

    def about(self) -> dict[str, str]:
        """See `Observer.about`. Of the first node."""
        wire = self._wires[0]
        server, persistence = _info(wire, b"server"), _info(wire, b"persistence")
        version = server.get("valkey_version") or server["redis_version"]
        about = {"server": server.get("server_name", "redis"), "version": version, "nodes": str(len(self._wires))}
        about["appendonly"] = "yes" if persistence.get("aof_enabled") == "1" else "no"
        answer = wire.ask(encode(b"CONFIG", b"GET", b"appendfsync"))
        if isinstance(answer, list) and answer:
            about["appendfsync"] = answer[1].decode()
        return about

    def _count_connections(self) -> int:
        return sum(int(_info(wire, b"clients")["connected_clients"]) for wire in self._wires)

    def _count_commands(self) -> int:
        return sum(
            int(text.partition("calls=")[2].partition(",")[0])
            for wire in self._wires
            for name, text in _info(wire, b"commandstats").items()
            if name != "cmdstat_info"  # ours
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _info(wire: Wire, section: bytes) -> dict[str, str]:
    answer = wire.ask(encode(b"INFO", section))
    assert isinstance(answer, bytes), answer
    pairs = (line.partition(":") for line in answer.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def watch(url: str) -> Observer:
    """Make the observer for a URL; one that gives no figures where the server cannot be asked."""
    if url and parse(url).base in _REDIS and parse(url).driver is None:
        return RedisObserver(node_urls(url))
    return Observer()
