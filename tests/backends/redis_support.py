"""Servers, faces and looks behind the scenes for the tests of the Redis backends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lockkit.backends.redis import RedisBackend
from lockkit.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.url import parse
from tests.backends.support import StubHost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from lockkit.testing.servers import RedisServer

T = TypeVar("T")


class Face:
    """One of the two faces: runs a coroutine function of a host."""

    def __init__(self, name: str) -> None:
        """Take ``sync`` or ``asyncio``."""
        self.name = name

    def run(self, scenario: Callable[[StubHost], Coroutine[Any, Any, T]]) -> T:
        """Run it to its end, as this face does."""
        if self.name == "sync":
            return drive(scenario(StubHost(BlockingRuntime())))
        return asyncio.run(scenario(StubHost(AsyncioRuntime())))


def open_backend(url: str, host: StubHost, **given: object) -> RedisBackend:
    """Open a backend as the registry does."""
    parsed = parse(url)
    _, options = split_options(RedisBackend, parsed, given)
    return RedisBackend.open(parsed, options, host)


@asynccontextmanager
async def backend_at(url: str, host: StubHost, **given: object) -> AsyncIterator[RedisBackend]:
    """Open a backend and close it at the end."""
    backend = open_backend(url, host, **given)
    try:
        yield backend
    finally:
        await backend.close()


class Keyspace:
    """What is at the server, seen by somebody else's connection."""

    def __init__(self, server: RedisServer) -> None:
        """Connect at each question: the server may have been restarted."""
        self._server = server

    def __call__(self, *command: str | int) -> Any:  # noqa: ANN401 - whatever the server says
        """Run a command."""
        with self._server.connect() as connection:
            return connection.call(*command)

    def keys(self) -> set[str]:
        """Every key there is."""
        return set(self("KEYS", "*"))
