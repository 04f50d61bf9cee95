"""What the tests of the comparison share: programs by name, and a pause that is over as soon as it has been felt."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import redis

import lockkit
from lockkit.sync import Client
from lockkit_tools.servers import wait_until

PATIENCE = 60.0
"""Seconds that anything may take on a busy machine."""

LONG = 120.0
"""A ttl that does not run out while a test runs."""


class Program:
    """
    One of several programs that want the same lock: a connection to Redis, and a client of lockkit's.

    Attributes:
        redis: For what it does by hand.
        locks: For what it does by lockkit.
    """

    def __init__(self, port: int, **options: object) -> None:
        """Start it."""
        self._open = ExitStack()
        settings = {"port": port, "decode_responses": True, **options}
        self.redis: redis.Redis = self._open.enter_context(redis.Redis(**settings))  # type: ignore[arg-type]
        self.locks: Client = self._open.enter_context(lockkit.connect(f"redis://127.0.0.1:{port}/0"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def run_out(client: redis.Redis, key: str) -> None:
    """
    Let the ttl of a key run out now: whoever counted on it has been paused for as long.

    The server itself ends the key. Only the waiting is left out.
    """
    assert client.pexpire(key, 1), f"{key} is not there"
    wait_until(lambda: f"{key} is still there" if client.exists(key) else None)
