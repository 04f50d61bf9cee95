"""Servers, faces and looks behind the scenes for the tests of the Redis backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from lockkit.backend import Busy, Request
from lockkit.backends.redis.backend import RedisBackend
from lockkit.configuration.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import RedisCluster, RedisServer
from lockkit_tools.servers.redis_groups import ClusterNode
from tests.backends.support import StubHost

T = TypeVar("T")


def token_in(record: object) -> str:
    """Return the digits of the token in the value of a key ``:fence``."""
    return str(record).rstrip("+").partition(" ")[0].partition("+")[0]


class Face:
    """One of the two faces: runs a coroutine function of a host."""

    def __init__(self, name: str) -> None:
        """Take ``sync`` or ``asyncio``."""
        self.name = name

    def host(self) -> StubHost:
        """Make a host with the runtime of this API."""
        return StubHost(BlockingRuntime() if self.name == "sync" else AsyncioRuntime())

    def run(self, scenario: Callable[[StubHost], Coroutine[Any, Any, T]]) -> T:
        """Run it to its end, with a host."""
        return self.drive(partial(scenario, self.host()))

    def drive(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it to its end, as this API does."""
        return drive(function()) if self.name == "sync" else asyncio.run(function())


def open_backend(url: str, host: StubHost, **given: object) -> RedisBackend:
    """Open a backend as the registry does."""
    parsed = parse(url)
    _, options = split_options(RedisBackend, parsed, given)
    return RedisBackend.open(parsed, options, host)


@contextmanager
def moving(cluster: RedisCluster, name: str) -> Iterator[tuple[int, ClusterNode, ClusterNode]]:
    """Give the slot of a lock, its node and one that it could move to; afterwards it is where it was."""
    slot = cluster.slot_of(f"lockkit:{name}")
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    try:
        yield slot, source, target
    finally:
        if cluster.owner_of(slot) is not source:
            cluster.move_slot(slot, source)
        for node in (source, target):
            with node.connect() as connection:
                connection.call("CLUSTER", "SETSLOT", slot, "STABLE")
                connection.call("FLUSHALL")


@asynccontextmanager
async def backend_at(url: str, host: StubHost, **given: object) -> AsyncIterator[RedisBackend]:
    """Open a backend and close it at the end."""
    backend = open_backend(url, host, **given)
    try:
        yield backend
    finally:
        await backend.close()


async def busy_at(backend: RedisBackend, request: Request) -> Busy:
    """Look, and find the lock busy."""
    outcome = await backend.try_acquire(request)
    assert isinstance(outcome, Busy), outcome
    return outcome


async def queue_up(backend: RedisBackend, request: Request) -> None:
    """Look, and take a place in the queue."""
    await busy_at(backend, request)
    assert request.state is not None


async def woken(request: Request) -> bool:
    """Wait for a wake-up, generously."""
    return await request.wake.wait(PATIENCE)


class Keyspace:
    """The keys at the server, seen by a separate connection."""

    def __init__(self, server: RedisServer) -> None:
        """Connect at each question: the server may have been restarted."""
        self._server = server

    def __call__(self, *command: str | int | bytes) -> Any:  # noqa: ANN401 - whatever the server says
        """Run a command."""
        with self._server.connect() as connection:
            return connection.call(*command)

    def keys(self) -> set[str]:
        """Every key there is."""
        return set(self("KEYS", "*"))
