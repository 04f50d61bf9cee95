"""Redis and Valkey, asked over a raw socket."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from lockkit_tools.bench.observer import Observer
from lockkit_tools.bench.redis_connection import RawConnection, connect_to, encode


class RedisObserver(Observer):
    """
    One Redis node, or several independent ones: their sums.

    Counts every command of everybody: meant for a server that nobody else uses meanwhile.

    Raises:
        OSError: A node does not answer, or does not let us in.
    """

    def __init__(self, urls: list[str]) -> None:
        with ExitStack() as stack:
            try:
                self._connections = [stack.enter_context(connect_to(url)) for url in urls]
                self._ids = [_own_id(connection) for connection in self._connections]
            except RuntimeError as error:  # an answer that is an error; it does not quote what it was given
                raise ConnectionError(str(error)) from error
            self._stack = stack.pop_all()
        self._began = 0.0
        self._commands = 0

    def begin(self) -> None:
        self._commands = self._count_commands()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        return {
            "commands_per_second": (self._count_commands() - self._commands) / seconds,
            "connections": self._count_connections(),
        }

    def about(self) -> dict[str, str]:
        """See `Observer.about`. Of the first node."""
        connection = self._connections[0]
        server, persistence = _info(connection, b"server"), _info(connection, b"persistence")
        version = server.get("valkey_version") or server["redis_version"]
        about = {"server": server.get("server_name", "Redis"), "version": version}
        about |= {"nodes": str(len(self._connections))} if len(self._connections) > 1 else {}
        about["appendonly"] = "yes" if persistence.get("aof_enabled") == "1" else "no"
        for name in ("appendfsync", "save") if about["appendonly"] == "yes" else ("save",):
            answer = connection.ask(encode(b"CONFIG", b"GET", name.encode()))
            if isinstance(answer, list) and answer:
                about[name] = answer[1].decode() or "never"
        return about

    def _count_connections(self) -> int:
        """Count those that came after ours: those of an earlier subject may still be closing."""
        pairs = zip(self._connections, self._ids, strict=True)
        return sum(id_ > ours for connection, ours in pairs for id_ in _ids(connection))

    def _count_commands(self) -> int:
        return sum(
            int(text.partition("calls=")[2].partition(",")[0])
            for connection in self._connections
            for name, text in _info(connection, b"commandstats").items()
            if name != "cmdstat_info"  # ours
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _info(connection: RawConnection, section: bytes) -> dict[str, str]:
    answer = connection.ask(encode(b"INFO", section))
    assert isinstance(answer, bytes), answer
    pairs = (line.partition(":") for line in answer.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _own_id(connection: RawConnection) -> int:
    answer = connection.ask(encode(b"CLIENT", b"ID"))
    assert isinstance(answer, int), answer
    return answer


def _ids(connection: RawConnection) -> list[int]:
    answer = connection.ask(encode(b"CLIENT", b"LIST"))
    assert isinstance(answer, bytes), answer
    return [int(words[0].removeprefix(b"id=")) for words in map(bytes.split, answer.splitlines())]
