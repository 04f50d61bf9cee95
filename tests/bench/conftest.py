"""Servers to measure on, and what workers are forked from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from lockkit.testing.fork_servers import close_all
from lockkit_tools.servers import EtcdServer, MariaServer, PostgresServer, RedisNodes, RedisServer, ZooKeeperServer
from lockkit_tools.servers.base import Service

SERVERS: dict[str, Callable[[], Service]] = {
    "redis": lambda: RedisServer(password="p@ss:word"),  # noqa: S106 - of a throw-away server
    "redlock": lambda: RedisNodes(3),
    "etcd": EtcdServer,
    "zookeeper": ZooKeeperServer,
    "postgresql": lambda: PostgresServer(password="p@ss"),  # noqa: S106
    "mariadb": lambda: MariaServer(password="p@ss"),  # noqa: S106
}


@pytest.fixture(scope="session")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start each kind of server when a test first asks for it."""
    with ExitStack() as running:

        @cache
        def find(scheme: str) -> str:
            if scheme == "sqlite":
                return f"sqlite:///{tmp_path_factory.mktemp('bench')}/bench.db"
            return running.enter_context(SERVERS[scheme]()).url

        yield find


@pytest.fixture(scope="module", autouse=True)
def _fork_servers() -> Iterator[None]:
    """The runs of a file share what their workers are forked from; the next file has other drivers."""
    yield
    close_all()
