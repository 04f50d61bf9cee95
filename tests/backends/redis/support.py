"""Servers, faces and looks behind the scenes for the tests of the Redis backends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import lockkit
from lockkit.backend import Busy, Request
from lockkit.backends.redis.backend import RedisBackend
from lockkit.configuration.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import RedisCluster, RedisServer
from lockkit_tools.servers.redis_groups import ClusterNode
from tests.backends.support import StubHost

Connect: TypeAlias = Callable[..., lockkit.Client]

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


class Nat:
    """
    Stands between clients and a server, and can forget connections.

    As a NAT does with connections that were idle for long: what comes is dropped, and neither side is told. Its address
    can be moved to another server, as a name in DNS can.
    """

    def __init__(self, server: RedisServer) -> None:
        """Accept connections from now on."""
        self._target = (server.host, server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[_Link] = []
        self._thread = threading.Thread(target=self._accept, name="nat", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # it is down
                    client.close()
                else:
                    self._links.append(_Link(client, server))

    @property
    def links_count(self) -> int:
        """How many connections it has accepted and led to the server."""
        return len(self._links)

    def forget_subscriptions(self) -> int:
        """Drop from now on what comes on the connections that subscribe; tell how many there are."""
        return self._forget([link for link in self._links if link.subscribes])

    def forget_all(self) -> int:
        """The same for all connections."""
        return self._forget(self._links)

    def _forget(self, links: list[_Link]) -> int:
        found = [link for link in links if not link.forgotten]
        for link in found:
            link.forgotten = True
        return len(found)

    def move_to(self, server: RedisServer) -> None:
        """Connect what comes from now on to another server; the connections that there are stay as they are."""
        self._target = (server.host, server.port)

    def close(self) -> None:
        """End all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends a call of accept, as closing does not
        self._thread.join()
        self._listener.close()
        for link in self._links:
            link.close()


class _Link:
    """One connection through a `Nat`."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.subscribes = self.forgotten = False
        self._ends = client, server
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), name="nat", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # closed
            while data := source.recv(65536):
                self.subscribes |= b"SUBSCRIBE" in data
                if not self.forgotten:
                    sink.sendall(data)
        if not self.forgotten:
            self.close()

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


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
