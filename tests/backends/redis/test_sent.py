"""Errors that say whether the request was sent, and servers that are refused at the first connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import redis
import redis.asyncio

import lockkit
import lockkit.aio
from lockkit.backends.redis.groups import slot_of
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import Work
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisCluster, RedisServer, require
from lockkit_tools.servers._ports import Ports
from tests.backends.redis.faces import both
from tests.backends.redis.support import backend_at, open_backend
from tests.backends.redlock.test_backend import open_redlock
from tests.backends.support import StubHost, granted


@pytest.fixture(autouse=True, scope="module")
def _redis() -> None:
    require("redis", local=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters, and a user without the right to INFO."""
    with RedisCluster() as made:
        for node in made.nodes:
            with node.connect() as connection:
                connection.call("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-info")
        yield made


@pytest.fixture
def dead_ports() -> Iterator[list[int]]:
    """Ports at which nobody listens, and which nobody else gets."""
    ports = Ports()
    yield [ports.reserve() for _ in range(3)]
    ports.close()


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses to which this process connects."""
    seen: list[Any] = []
    connect = socket.socket.connect

    def counted(self: socket.socket, address: Any) -> None:  # noqa: ANN401 - of a socket
        seen.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    return seen


def hosts(ports: list[int]) -> str:
    """Write them as a URL has them."""
    return ",".join(f"127.0.0.1:{port}" for port in ports)


@both
@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster", "redlock"])
async def test_refused_connection_means_that_nothing_was_sent(
    scheme: str, dead_ports: list[int], connects: list[Any], host: StubHost
) -> None:
    """So there is nothing to undo; and each address is tried once."""
    ports = dead_ports[:1] if scheme == "redis" else dead_ports
    url = f"{scheme}://{hosts(ports)}" + ("/mymaster" if scheme == "redis+sentinel" else "")

    backend = (open_redlock if scheme == "redlock" else open_backend)(url, host)
    try:
        request = host.request()
        with pytest.raises(BackendUnavailable) as caught:
            await backend.try_acquire(request)
        assert caught.value.sent is False
        if scheme != "redlock":  # which goes on in the background
            assert sorted(connects) == [("127.0.0.1", port) for port in sorted(ports)]
    finally:
        await backend.close()


@both
async def test_request_that_was_sent_before_the_refusal(host: StubHost) -> None:
    """The server dies with it, and refuses the second attempt: the first one may have been carried out."""
    with RedisServer() as node:
        async with backend_at(node.url, host) as backend:
            granted(await backend.try_acquire(host.request("a")))
            errors: list[BackendUnavailable] = []
            done = host.runtime.event()

            async def ask() -> None:
                try:
                    await backend.try_acquire(host.request("b"))
                except BackendUnavailable as error:
                    errors.append(error)
                finally:
                    done.set()

            node.pause()
            work: Work = ask
            host.runtime.spawn("test", work)
            await host.runtime.sleep(0.3)  # it has been sent; without that, the error would say so
            node.kill()
            assert await done.wait(PATIENCE)
            assert [error.sent for error in errors] == [True]


@pytest.mark.parametrize("user", ["", "blind:secret@"], ids=["sees INFO", "does not"])
def test_node_of_a_cluster_is_refused(cluster: RedisCluster, user: str) -> None:
    """For the names, too, that this node serves; the error names the URL to use."""
    node = cluster.nodes[0]
    # It does not tell a user without INFO until it refuses a lock.
    served = not user
    name = next(name for number in count() if (slot_of(f"lockkit:{(name := f'x{number}')}") < 5000) == served)
    wanted = rf"redis\+cluster://{node.address}"
    url = f"redis://{user}{node.address}"

    for client in (lockkit.connect(url), lockkit.from_client(redis.Redis.from_url(url))):
        with client, pytest.raises(ConfigurationError, match=wanted):
            client.lock(name, timeout=PATIENCE).acquire()


def test_nodes_of_a_cluster_are_no_redlock(cluster: RedisCluster) -> None:
    """They do not fail independently, and each refuses most names."""
    url = f"redlock://{','.join(node.address for node in cluster.nodes)}"
    with lockkit.connect(url) as client, pytest.raises(ConfigurationError, match="is a node of a Cluster"):
        client.ping()
    with lockkit.connect(cluster.url) as client, client.lock("x", timeout=PATIENCE):
        pass
