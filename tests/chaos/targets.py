"""
What chaos runs on: for each backend a service and faults under which lockkit promises exclusion.

Servers keep their data when they are killed, where a loss of data is beyond the backend's promise; replicas confirm
each grant, where a failover without that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One target.

    Attributes:
        service: Makes its servers; entering starts them.
        options: For ``connect``.
        limit: How many servers may be away at once.
        note: What the run does not disturb, and why.
    """

    service: Callable[[], AbstractContextManager[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 1
    note: str = ""


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

TARGETS: Mapping[str, Entry] = {
    "file": Entry(nullcontext, note="clients only"),
    "redis": Entry(_durable_node, note="appendfsync always"),
    "redlock": Entry(lambda: RedisNodes(5), limit=2, note="two of five at a time, without persistence"),
    "redlock-durable": Entry(
        lambda: RedisNodes(5, make=_durable_node), {"durable": True}, limit=2, note="two of five, appendfsync always"
    ),
    "sentinel": Entry(lambda: _durable(RedisSentinels()), {"replicas": 1}, note=_REPLICAS),
    "cluster": Entry(lambda: _durable(RedisCluster(replicas=1)), {"replicas": 1}, note=_REPLICAS),
    "zookeeper": Entry(ZooKeeperEnsemble, note="one of three at a time"),
    "etcd": Entry(EtcdCluster, note="one of three at a time"),
    "postgresql-table": Entry(PostgresServer),
    "postgresql-row": Entry(PostgresServer, {"mode": "row"}, note=_CONNECTION),
    "postgresql-advisory": Entry(PostgresServer, {"mode": "advisory"}, note=_CONNECTION),
    "mariadb-table": Entry(MariaServer),
    "mariadb-row": Entry(MariaServer, {"mode": "row"}, note=_CONNECTION),
    "mariadb-advisory": Entry(MariaServer, {"mode": "advisory"}, note=_CONNECTION),
}
