"""What a lock costs in messages, as docs/comparison/choosing.md says it: counted on the way to real servers."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import lockkit
from lockkit_tools.servers import (
    EtcdServer,
    FaultProxy,
    MariaServer,
    PostgresServer,
    RedisServer,
    Server,
    ZooKeeperServer,
    require,
)
from tests.comparison.support import LONG, PATIENCE

TRIES = 30
"""The least of many tries is what the lock costs: a heartbeat may fall into one, and what a client sends at once may
leave a busy machine in two pieces."""


@contextmanager
def watched(server: Server) -> Iterator[tuple[str, Callable[[], int]]]:
    """Put a proxy before a server; give the URL through it, and a function that counts what was sent there."""
    sent = 0

    def count(_: bytes) -> bool:
        nonlocal sent
        sent += 1
        return False  # it goes on

    with FaultProxy(server.host, server.port) as proxy:
        proxy.drop_next_reply(match=count)
        yield server.url.replace(server.address, proxy.address), lambda: sent


def cost(url: str, count: Callable[[], int]) -> tuple[int, int]:
    """Messages of an acquisition and of a release of a lock that was in use before, by a client that was."""
    acquired, released = [], []
    with lockkit.connect(url, ttl=LONG) as client:
        client.lock("seat").acquire(timeout=PATIENCE).release()
        for _ in range(TRIES):
            before = count()
            lease = client.lock("seat").acquire(timeout=PATIENCE)
            held = count()
            lease.release()
            acquired.append(held - before)
            released.append(count() - held)
    return min(acquired), min(released)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (RedisServer, {"": (1, 1)}),
        (PostgresServer, {"": (1, 1), "row": (2, 1), "advisory": (1, 1)}),
        (MariaServer, {"": (1, 1), "row": (2, 1), "advisory": (1, 1)}),
        (ZooKeeperServer, {"": (1, 1)}),
    ],
    ids=["redis", "postgresql", "mariadb", "zookeeper"],
)
def test_messages_of_an_acquisition_and_a_release(make: type[Server], expected: dict[str, tuple[int, int]]) -> None:
    """Once a client and a lock are in use; the first time takes connections, statements and tables besides."""
    require(make.kind, local=True)
    found = {}
    with make() as server, watched(server) as (url, count):
        for mode in expected:
            query = f"{'&' if '?' in url else '?'}mode={mode}" if mode else ""
            found[mode] = cost(url + query, count)

    assert found == expected


def calls(server: EtcdServer) -> int:
    """How many calls of the key-value and lease services the server has answered."""
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    service = r'^grpc_server_handled_total\{.*grpc_service="etcdserverpb\.(?:KV|Lease)".*\} (\S+)$'
    lines = re.findall(service, text, re.MULTILINE)
    assert lines
    return int(sum(map(float, lines)))


@pytest.mark.timeout(120)
def test_calls_of_an_acquisition_and_a_release_on_etcd() -> None:
    """One transaction each; etcd counts them itself, as HTTP/2 sends messages of its own between."""
    require("etcd", local=True)
    with EtcdServer() as server:
        assert cost(server.url, lambda: calls(server)) == (1, 1)
