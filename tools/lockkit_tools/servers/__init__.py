"""
Throw-away servers for tests and benchmarks, and a proxy that breaks connections.

::

    from lockkit_tools.servers import RedisServer, FaultProxy

    with RedisServer(appendonly=True) as server:
        client = lockkit.connect(server.url)
        server.kill()
        server.start()

Every server listens on 127.0.0.1 on a free port, keeps its files in a temporary
directory, and ends with the process that started it.
"""

from lockkit_tools.servers.base import Server, ServerGroup, Service, wait_until
from lockkit_tools.servers.errors import (
    PortTaken,
    ServerError,
    ServerMissing,
    StartFailed,
    Unmanaged,
)
from lockkit_tools.servers.etcd import EtcdCluster, EtcdServer
from lockkit_tools.servers.mariadb import MariaServer
from lockkit_tools.servers.objects import ObjectStoreServer
from lockkit_tools.servers.pgbouncer import PgBouncer, PooledPostgres
from lockkit_tools.servers.postgresql import PostgresServer
from lockkit_tools.servers.provisioning import Source, locate, provide, require
from lockkit_tools.servers.proxy import FaultProxy, http2_call_ended
from lockkit_tools.servers.redis import RedisServer
from lockkit_tools.servers.redis_groups import RedisCluster, RedisNodes, RedisSentinels
from lockkit_tools.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

__all__ = [
    "EtcdCluster",
    "EtcdServer",
    "FaultProxy",
    "MariaServer",
    "ObjectStoreServer",
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
