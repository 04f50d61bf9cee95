"""
Throw-away servers for tests and benchmarks, and a proxy that breaks connections.

::

    from lockkit.testing.servers import RedisServer, FaultProxy

    with RedisServer(appendonly=True) as server:
        client = lockkit.connect(server.url)
        server.kill()
        server.start()

Every server listens on 127.0.0.1 on a free port, keeps its files in a temporary
directory, and ends with the process that started it.
"""

from lockkit.testing.servers.base import Server, ServerGroup, Service, wait_until
from lockkit.testing.servers.errors import (
    PortTaken,
    ServerError,
    ServerMissing,
    StartFailed,
    Unmanaged,
)
from lockkit.testing.servers.etcd import EtcdCluster, EtcdServer
from lockkit.testing.servers.mariadb import MariaServer
from lockkit.testing.servers.pgbouncer import PgBouncer, PooledPostgres
from lockkit.testing.servers.postgresql import PostgresServer
from lockkit.testing.servers.provisioning import Source, locate, provide, require
from lockkit.testing.servers.proxy import FaultProxy, http2_call_ended
from lockkit.testing.servers.redis import RedisServer
from lockkit.testing.servers.redis_groups import RedisCluster, RedisNodes, RedisSentinels
from lockkit.testing.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

__all__ = [
    "EtcdCluster",
    "EtcdServer",
    "FaultProxy",
    "MariaServer",
    "PgBouncer",
    "PooledPostgres",
    "PortTaken",
    "PostgresServer",
    "RedisCluster",
    "RedisNodes",
    "RedisSentinels",
    "RedisServer",
    "Server",
    "ServerError",
    "ServerGroup",
    "ServerMissing",
    "Service",
    "Source",
    "StartFailed",
    "Unmanaged",
    "ZooKeeperEnsemble",
    "ZooKeeperServer",
    "http2_call_ended",
    "locate",
    "provide",
    "require",
    "wait_until",
]
