"""
The backends that the conformance suite runs on here.

A new backend adds a line to `TARGETS`. That none is forgotten is tested in ``test_completeness.py``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

from lockkit.configuration import registry
from lockkit_tools.servers import (
    EtcdCluster,
    EtcdServer,
    MariaServer,
    ObjectStoreServer,
    PostgresServer,
    RedisCluster,
    RedisNodes,
    RedisSentinels,
    RedisServer,
    ZooKeeperEnsemble,
    ZooKeeperServer,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One backend in one form.

    Attributes:
        id: How it is called in the ids of the tests.
        schemes: The schemes of the registry that are tested by this.
        service: Makes what the URL leads to, once per run: a server of `lockkit_tools.servers`, a directory. Entering
            it gives the URL, or an object with an attribute ``url``.
        options: Given to ``connect``.
    """

    id: str
    schemes: tuple[str, ...]
    service: Callable[[], AbstractContextManager[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str | None:
        """Which mode of those schemes it tests, where they have several; see `lockkit.configuration.registry.modes`."""
        return self.options.get("mode") or registry.modes(self.schemes[0])[0]


def _url(url: str) -> Callable[[], AbstractContextManager[str]]:
    """A backend that is there already."""
    return lambda: nullcontext(url)


@contextmanager
def _directory() -> Iterator[str]:
    """An empty directory for the file backend, which only we may write to."""
    with tempfile.TemporaryDirectory(prefix="lockkit-conformance-") as path:
        yield f"file://{path}/locks"


@contextmanager
def _sqlite() -> Iterator[str]:
    """A database file of its own."""
    with tempfile.TemporaryDirectory(prefix="lockkit-conformance-") as path:
        yield f"sqlite:///{path}/locks.db"


class ObjectStore(ObjectStoreServer):
    """An object store, with its credentials where clients look for them."""

    def __enter__(self) -> Self:
        """Change the environment, which workers inherit, and start it."""
        self._environment = mock.patch.dict(os.environ, self.credentials)
        self._environment.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._environment.stop()


TARGETS = [
    Entry("memory", ("memory",), _url("memory://conformance")),
    Entry("file", ("file",), _directory),
    Entry("redis", ("redis", "rediss", "unix", "valkey"), RedisServer),
    Entry("redis-resp3", ("redis",), RedisServer, {"protocol": 3}),
    Entry("redis-sentinel", ("redis+sentinel", "rediss+sentinel"), RedisSentinels),
    Entry("redis-cluster", ("redis+cluster", "rediss+cluster"), RedisCluster),
    Entry("redlock-3", ("redlock", "redlocks"), RedisNodes),
    Entry("redlock-5", ("redlock",), lambda: RedisNodes(5)),
    Entry("postgresql", ("postgresql", "postgres"), PostgresServer),
    Entry("mariadb", ("mariadb", "mysql"), MariaServer),
    Entry("postgresql-row", ("postgresql", "postgres"), PostgresServer, {"mode": "row"}),
    Entry("postgresql-advisory", ("postgresql", "postgres"), PostgresServer, {"mode": "advisory"}),
    Entry("mariadb-row", ("mariadb", "mysql"), MariaServer, {"mode": "row"}),
    Entry("mariadb-advisory", ("mariadb", "mysql"), MariaServer, {"mode": "advisory"}),
    Entry("sqlite", ("sqlite",), _sqlite),
    Entry("etcd", ("etcd", "etcd3", "etcds"), EtcdServer),
    Entry("etcd-cluster", ("etcd",), EtcdCluster),
    Entry("zookeeper", ("zookeeper", "zk"), ZooKeeperServer),
    Entry("s3", ("s3", "gs", "az"), ObjectStore),
    Entry("zookeeper-ensemble", ("zookeeper",), ZooKeeperEnsemble),
]
