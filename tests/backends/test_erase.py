"""A backend erases what is stored under its own prefix, in its tables or directory, and nothing beside that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockkit
from lockkit.runtime import drive
from lockkit_tools.servers import (
    EtcdServer,
    MariaServer,
    PostgresServer,
    RedisCluster,
    RedisNodes,
    RedisServer,
    ZooKeeperServer,
    require,
)
from lockkit_tools.servers.base import Service
from tests.backends.support import StubHost, open_backend

SERVERS: dict[str, tuple[str, type[Service], dict[str, str]]] = {
    "redis": ("redis", RedisServer, {}),
    "redis-cluster": ("redis-cluster", RedisCluster, {}),
    "redlock": ("redlock", RedisNodes, {}),
    "zookeeper": ("zookeeper", ZooKeeperServer, {}),
    "etcd": ("etcd", EtcdServer, {}),
    "postgresql": ("postgresql", PostgresServer, {}),
    "mariadb-row": ("mariadb", MariaServer, {"mode": "row"}),
}


@pytest.fixture(params=[*SERVERS, "file"])
def spaces(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of `connect` for two spaces whose names begin alike, at one server."""
    if request.param == "file":
        yield {"url": f"file://{tmp_path}/scratch"}, {"url": f"file://{tmp_path}/scratch_2"}
        return
    kind, make, options = SERVERS[request.param]
    require(kind)
    option = "table" if kind in {"postgresql", "mariadb"} else "prefix"
    with make() as server:
        common = {"url": server.url, **options}
        yield {**common, option: "scratch"}, {**common, option: "scratch_2"}


def erase(options: dict[str, Any]) -> None:
    """Do what the conformance suite does after its cases."""
    backend = open_backend(host=StubHost(), **options)
    try:
        drive(backend.erase())
    finally:
        drive(backend.close())


def test_erases_its_own_space_and_no_other(spaces: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A space whose name only begins alike keeps its lock; where nothing is stored, nothing happens."""
    ours, theirs = spaces
    with lockkit.connect(**ours) as client, client.lock("a {b}/c", timeout=20) as lease:
        token = lease.token
    with lockkit.connect(**theirs) as client, client.lock("a {b}/c", timeout=20) as lease:
        for _ in range(2):
            erase(ours)

        assert lease.confirm()
        with lockkit.connect(**ours) as other:
            assert other.holders("a {b}/c") == []
            with other.lock("a {b}/c", timeout=20) as again:
                assert again.token > 0
    assert token > 0


def test_backend_that_cannot_erase_says_so() -> None:
    """The hook is optional."""
    backend = open_backend("memory://", StubHost())

    with pytest.raises(lockkit.Unsupported, match="MemoryBackend cannot erase its locks"):
        drive(backend.erase())
