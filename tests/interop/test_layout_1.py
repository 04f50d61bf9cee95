"""
Clients of layout 1, written by hand against each server, and lockkit keep each other out.

Nothing here may be adapted to a change of lockkit: a layout that these clients do not know breaks rolling deployments.
docs/reference/versions.md promises this. A client takes a lock if it is free, tells whether it did, and frees it.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest
import redis
from kazoo.client import KazooClient

import lockkit
from lockkit.url import parse
from lockkit_tools.servers import (
    EtcdServer,
    MariaServer,
    PostgresServer,
    RedisNodes,
    RedisServer,
    ZooKeeperServer,
    require,
)
from tests.tries import busy

TTL_SECONDS = 60
OWNER = "0123456789abcdef0123456789abcdef"


class Frozen:
    """A client of layout 1, for the lock ``seat``."""

    def take(self) -> bool:
        """Take the lock if it is free; tell whether it was."""
        raise AssertionError

    def free(self) -> None:
        """Free it."""

    def close(self) -> None:
        """Close what the client has open."""


class FrozenRedis(Frozen):
    """``SET key owner NX PX ttl``, on a majority of the nodes."""

    def __init__(self, ports: list[int]) -> None:
        self._nodes = [redis.Redis(port=port) for port in ports]

    def take(self) -> bool:
        got = [node.set("lockkit:seat", OWNER, nx=True, px=TTL_SECONDS * 1000) for node in self._nodes]
        taken = sum(map(bool, got)) > len(self._nodes) // 2
        if not taken:
            self.free()
        return taken

    def free(self) -> None:
        for node in self._nodes:
            if node.get("lockkit:seat") == OWNER.encode():
                node.delete("lockkit:seat")


class FrozenEtcd(Frozen):
    """A key under the prefix of the name, with a lease; the oldest holds."""

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self._lease = ""

    def take(self) -> bool:
        self._lease = self._server.etcdctl("lease", "grant", str(TTL_SECONDS)).split()[1]
        self._server.etcdctl("put", f"--lease={self._lease}", f"lockkit/seat/{self._lease}", OWNER)
        oldest = self._server.etcdctl("get", "--prefix", "--keys-only", "--sort-by=CREATE", "lockkit/seat/").split()[0]
        if oldest != f"lockkit/seat/{self._lease}":
            self.free()
            return False
        return True

    def free(self) -> None:
        self._server.etcdctl("lease", "revoke", self._lease)


class FrozenZooKeeper(Frozen):
    """A sequential-ephemeral node; the lowest sequence holds."""

    def __init__(self, server: ZooKeeperServer) -> None:
        self._client = KazooClient(server.address)
        self._client.start()
        self._node = ""

    def take(self) -> bool:
        path = f"/lockkit/seat/{OWNER}__lock__"
        self._node = self._client.create(path, b"", ephemeral=True, sequence=True, makepath=True)
        first = min(self._client.get_children("/lockkit/seat"), key=lambda name: name[-10:])
        if not self._node.endswith(first):
            self.free()
            return False
        return True

    def free(self) -> None:
        self._client.delete(self._node)

    def close(self) -> None:
        self._client.stop()
        self._client.close()


class FrozenTable(Frozen):
    """A row with owner and expiry by the database's clock."""

    def __init__(self, execute: Callable[[str], int], now_us: str) -> None:
        self._execute = execute
        self._now_us = now_us

    def take(self) -> bool:
        until = f"{self._now_us} + {TTL_SECONDS}000000"
        return (
            self._execute(
                f"UPDATE lockkit_locks SET owner = '{OWNER}', expires_at_us = {until}, token = token + 1"  # noqa: S608
                f" WHERE name = 'seat' AND (owner IS NULL OR expires_at_us <= {self._now_us})"
            )
            == 1
        )

    def free(self) -> None:
        self._execute(f"UPDATE lockkit_locks SET owner = NULL, expires_at_us = 0 WHERE owner = '{OWNER}'")  # noqa: S608


class FrozenFile(Frozen):
    """A record under flock: format 1, with a client file that is flocked while its client lives."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "seat.lock"
        self._client = (directory / "clients" / "0123456789abcdef").open("w")
        self._client.write("lockkit-client 1 pid 1 ttl_max_us 0000000060000000\n")
        self._client.flush()
        fcntl.flock(self._client, fcntl.LOCK_EX)

    def take(self) -> bool:
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            boot, name, token, *_ = file.read().split(b"\n")[1].split(b" ")
            file.seek(0)
            holder = file.read().split(b"\n")[2]
            if holder != b"-":
                return False
            until_us = int((time.clock_gettime(time.CLOCK_BOOTTIME) + TTL_SECONDS) * 1e6)
            lines = b"%b %b %d %d -\n%b 0123456789abcdef 0\n-\n" % (
                boot,
                name,
                int(token) + 1,
                until_us,
                OWNER.encode(),
            )
            self._write(file.fileno(), lines)
        return True

    def free(self) -> None:
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            boot, name, token, *_ = file.read().split(b"\n")[1].split(b" ")
            self._write(file.fileno(), b"%b %b %b 0 -\n-\n-\n" % (boot, name, token))

    @staticmethod
    def _write(fd: int, lines: bytes) -> None:
        head = b"lockkit-record 1 %08x %06d\n" % (zlib.crc32(lines), 33 + len(lines))
        os.pwrite(fd, head + lines, 0)

    def close(self) -> None:
        self._client.close()


def _redis(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    with RedisServer() as server:
        yield server.url, lambda: FrozenRedis([server.port])


def _redlock(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    with RedisNodes() as servers:
        yield servers.url, lambda: FrozenRedis([node.port for node in servers.nodes])


def _etcd(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    with EtcdServer() as server:
        yield server.url, lambda: FrozenEtcd(server)


def _zookeeper(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    with ZooKeeperServer() as server:
        yield server.url, lambda: FrozenZooKeeper(server)


def _postgresql(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    now_us = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    with PostgresServer() as server, psycopg.connect(server.url, autocommit=True) as connection:
        yield server.url, lambda: FrozenTable(lambda text: connection.execute(text.encode()).rowcount, now_us)


def _mariadb(_: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    now_us = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
    with MariaServer() as server:
        at = parse(server.url)
        (host,) = at.hosts
        login = {"user": at.username, "password": at.password or "", "database": (at.path or "").strip("/")}
        with pymysql.connect(host=host.host, port=host.port, autocommit=True, **login) as connection:
            yield server.url, lambda: FrozenTable(connection.cursor().execute, now_us)


def _file(directory: Path) -> Iterator[tuple[str, Callable[[], Frozen]]]:
    yield f"file://{directory}/locks", lambda: FrozenFile(directory / "locks")


@pytest.mark.parametrize(
    "place", [_redis, _redlock, _etcd, _zookeeper, _postgresql, _mariadb, _file], ids=lambda place: place.__name__[1:]
)
def test_clients_of_layout_1_and_lockkit_exclude_each_other(
    place: Callable[[Path], Iterator[tuple[str, Callable[[], Frozen]]]], tmp_path: Path
) -> None:
    """Whoever comes first, readers too; each gets the lock when the other one has freed it."""
    if place is not _file:
        require(place.__name__[1:])
    for url, make in place(tmp_path):
        with lockkit.connect(url) as client:
            lock = client.lock("seat", ttl=TTL_SECONDS)
            for _ in range(2):  # its record stays
                lock.acquire(timeout=TTL_SECONDS).release()
            theirs = make()

            with lock as lease:
                assert not theirs.take()
            assert theirs.take()
            assert busy(lock)
            (holder,) = client.holders("seat")
            assert holder.remaining is None or holder.remaining <= TTL_SECONDS
            if client.capabilities.shared_mode:
                assert client.rwlock("seat").read().try_acquire() is None
            theirs.free()
            with lock.acquire(timeout=TTL_SECONDS) as again:
                assert again.token > lease.token
                assert not theirs.take()
            theirs.close()
