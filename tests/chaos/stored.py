"""How much each kind of server stores, to find what clients have left behind. Each function counts by its own means."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.request import Request, urlopen

import nats

from lockkit_tools.servers import EtcdCluster, MariaServer, ObjectStoreServer, PostgresServer, ZooKeeperEnsemble
from lockkit_tools.servers.base import ServerGroup
from lockkit_tools.servers.nats import NatsServer
from lockkit_tools.servers.objects import BUCKET
from lockkit_tools.servers.redis import RedisServer

TABLES = """
SELECT table_name FROM information_schema.tables WHERE table_schema IN ('public', 'lockkit') ORDER BY table_name
"""


def in_files(directory: Path) -> int:
    """Count the files of ``file://DIRECTORY/locks``, at any depth."""
    return sum(path.is_file() for path in (directory / "locks").rglob("*"))


def in_sqlite(directory: Path) -> int:
    """Count the rows of ``sqlite:///DIRECTORY/locks.db``."""
    with closing(sqlite3.connect(directory / "locks.db")) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = [connection.execute(f"SELECT count(*) FROM {name}").fetchone() for name in names]  # noqa: S608
    return sum(count for (count,) in counts)


def in_redis(service: RedisServer | ServerGroup) -> int:
    """Count the keys of all nodes."""
    nodes = [service] if isinstance(service, RedisServer) else service.servers
    return sum(int(str(node.call("DBSIZE"))) for node in nodes if isinstance(node, RedisServer))


def in_zookeeper(service: ZooKeeperEnsemble) -> int:
    """Count the nodes."""
    lines = service.leader.four_letters("mntr").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("zk_znode_count")))


def in_etcd(service: EtcdCluster) -> int:
    """Count keys and leases."""
    everything = service.leader.call("/v3/kv/range", key="AA==", range_end="AA==", count_only=True)
    return int(everything.get("count", 0)) + len(service.leader.call("/v3/lease/leases").get("leases", []))


def in_sql(service: PostgresServer | MariaServer) -> int:
    """Count the rows of all tables."""
    counts = [f"SELECT count(*) FROM {name}" for name in service.execute(TABLES).split()]  # noqa: S608 - our own names
    return sum(int(service.execute(count)) for count in counts)


def in_bucket(service: ObjectStoreServer) -> int:
    """Count the objects, by the store's own listing of files."""
    url = f"http://{service.host}:{service.port_for('filer')}/buckets/{BUCKET}/?limit=100000"
    with urlopen(Request(url, headers={"Accept": "application/json"})) as answer:
        return len(json.load(answer)["Entries"] or [])


def in_nats(service: NatsServer) -> int:
    """Count the messages of all streams."""

    async def ask() -> int:
        connection = await nats.connect(service.url)
        try:
            return sum(stream.state.messages for stream in await connection.jetstream().streams_info())
        finally:
            await connection.close()

    return asyncio.run(ask())
