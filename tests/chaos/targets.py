"""
What chaos runs on: for each backend a service and faults under which lockkit promises exclusion.

Servers keep their data when they are killed, where a loss of data is beyond the backend's promise; replicas confirm
each grant, where a failover without that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockkit.testing.target import Target
from lockkit_tools.servers import (
    EtcdCluster,
    MariaServer,
    PostgresServer,
    RedisCluster,
    RedisNodes,
    RedisSentinels,
    RedisServer,
    ZooKeeperEnsemble,
)
from lockkit_tools.servers.base import Service
from lockkit_tools.servers.nats import NatsServer
from tests.chaos import stored
from tests.conformance.targets import ObjectStore


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One target.

    Attributes:
        service: Makes its servers; entering starts them.
        stored: Counts what they store, or what is in the directory of a target without servers.
        options: For ``connect``.
        limit: How many servers may be away at once.
        note: What the run does not disturb, and why.
        url: Of a target without servers, with its directory.
        backend: See `lockkit.testing.target.Target`.
        ttls: A client takes one of them each time.
        never: Faults that the backend does not promise to survive, or that cannot be had here.
        grace: How long after a fault hand-offs may still be slow, seconds.
    """

    service: Callable[[], AbstractContextManager[Any]]
    stored: Callable[[Any], int]
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 1
    note: str = ""
    url: str = ""
    backend: str | None = None
    ttls: tuple[float, ...] = (2.0, 3.0)
    never: tuple[str, ...] = ()
    grace: float = 5.0

    def target(self, service: Service | None, directory: Path) -> Target:
        """Give what clients connect to."""
        return Target(service.url if service else self.url.format(directory), self.options, self.backend)


def _durable_node() -> RedisServer:
    return RedisServer(appendonly=True, appendfsync="always")


def _durable(group: RedisSentinels | RedisCluster) -> RedisSentinels | RedisCluster:
    """Have all nodes keep their data: a master that comes back empty before the failover has no promise to keep."""
    for node in group.nodes:
        node.appendonly = True
        node.appendfsync = "always"
    return group


_CONNECTION = "a killed server stays away for longer than the ttl: its locks end with it"
_REPLICAS = "appendfsync always; a replica confirms each grant (replicas=1 of 1)"

_NO_PROXY = ("partition", "cut")
"""The nodes tell their own addresses, so no proxy can stand before them."""

_SESSION = ("cut",)
"""A lock ends with its connection, which its holder learns by its deadline: no promise before that."""

TARGETS: Mapping[str, Entry] = {
    "file": Entry(nullcontext, stored.in_files, note="clients only", url="file://{}/locks"),
    "sqlite": Entry(
        nullcontext, stored.in_sqlite, note="clients only", url="sqlite:///{}/locks.db", never=("clock",)
    ),  # its server's clock is that of its clients
    "redis": Entry(_durable_node, stored.in_redis, note="appendfsync always"),
    "redlock": Entry(
        lambda: RedisNodes(5), stored.in_redis, limit=2, note="two of five at a time, without persistence", grace=65.0
    ),  # a node that lost its data does not vote for a minute
    "redlock-durable": Entry(
        lambda: RedisNodes(5, make=_durable_node),
        stored.in_redis,
        {"durable": True},
        limit=2,
        note="two of five, appendfsync always",
    ),
    "sentinel": Entry(
        lambda: _durable(RedisSentinels()), stored.in_redis, {"replicas": 1}, note=_REPLICAS, never=_NO_PROXY
    ),
    "cluster": Entry(
        lambda: _durable(RedisCluster(replicas=1)), stored.in_redis, {"replicas": 1}, note=_REPLICAS, never=_NO_PROXY
    ),
    "zookeeper": Entry(ZooKeeperEnsemble, stored.in_zookeeper, note="one of three at a time"),
    "etcd": Entry(EtcdCluster, stored.in_etcd, note="one of three at a time"),
    "postgresql-table": Entry(PostgresServer, stored.in_sql),
    "postgresql-row": Entry(PostgresServer, stored.in_sql, {"mode": "row"}, note=_CONNECTION, never=_SESSION),
    "postgresql-advisory": Entry(PostgresServer, stored.in_sql, {"mode": "advisory"}, note=_CONNECTION, never=_SESSION),
    "mariadb-table": Entry(MariaServer, stored.in_sql),
    "mariadb-row": Entry(MariaServer, stored.in_sql, {"mode": "row"}, note=_CONNECTION, never=_SESSION),
    "mariadb-advisory": Entry(MariaServer, stored.in_sql, {"mode": "advisory"}, note=_CONNECTION, never=_SESSION),
    "s3": Entry(
        ObjectStore, stored.in_bucket, ttls=(5.0, 6.0), never=("clock",)
    ),  # it refuses requests signed at another time of day
    "nats": Entry(NatsServer, stored.in_nats),
}
