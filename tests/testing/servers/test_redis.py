"""Redis nodes in every form that the Redis backends are tested on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit_tools.servers import (
    RedisCluster,
    RedisNodes,
    RedisSentinels,
    RedisServer,
    require,
    wait_until,
)
from lockkit_tools.servers._resp import RespConnection, ServerSaid


@pytest.fixture(autouse=True)
def _redis() -> None:
    require("redis", local=True)


def write(server: RedisServer) -> None:
    """Writes the key that `read` reads."""
    with server.connect() as connection:
        connection.call("SET", "key", "value")


def read(server: RedisServer) -> object:
    """The value that `write` wrote; None if it is gone."""
    with server.connect() as connection:
        return connection.call("GET", "key")


def test_node_without_persistence_comes_back_empty() -> None:
    """By default nothing is written to disk."""
    with RedisServer() as server:
        write(server)
        server.restart()

        assert read(server) is None


def test_append_only_file_survives_a_crash() -> None:
    """What was acknowledged is there after SIGKILL."""
    with RedisServer(appendonly=True, appendfsync="always") as server:
        write(server)
        server.restart(crash=True)

        assert read(server) == "value"


def test_restart_without_data_is_empty_despite_persistence() -> None:
    """`keep_data=False` is a node that lost its disk."""
    with RedisServer(appendonly=True) as server:
        write(server)
        server.restart(keep_data=False)

        assert read(server) is None


def test_password_is_required_and_stands_in_the_url() -> None:
    """Characters that mean something in a URL or in redis.conf are data."""
    with RedisServer(password='p@ss "word"') as server:  # noqa: S106 - of a throw-away server
        with RespConnection((server.host, server.port)) as stranger, pytest.raises(ServerSaid, match="NOAUTH"):
            stranger.call("PING")

        assert server.url.startswith("redis://:p%40ss%20%22word%22@127.0.0.1:")
        assert server.ask() is None


def test_acl_user_may_do_what_its_rules_say() -> None:
    """A test can give a client just the rights that it needs."""
    users = {"app": "on >secret ~lockkit:* &* +@all -flushall"}
    with RedisServer(users=users, login=("app", "secret")) as server:
        assert server.url.startswith("redis://app:secret@")
        with server.connect() as connection:
            assert connection.call("SET", "lockkit:x", "1") == "OK"
            with pytest.raises(ServerSaid, match="NOPERM"):
                connection.call("SET", "other", "1")
            with pytest.raises(ServerSaid, match="NOPERM"):
                connection.call("FLUSHALL")


def test_tls_server_is_trusted_by_its_authority_only() -> None:
    """The certificate is checked, and is not that of another server."""
    with RedisServer(tls=True) as server:
        assert server.url.startswith("rediss://")
        assert server.ask() is None
        with RedisServer(tls=True) as other, pytest.raises(OSError, match="verify failed"):
            RespConnection((server.host, server.port), ca=other.certificates.ca)


def test_unix_socket_answers() -> None:
    """`socket_url` leads to a socket that answers."""
    with RedisServer(unix_socket=True) as server:
        assert server.socket_url == f"unix://{server.socket_path}?db=0"
        with RespConnection(server.socket_path) as connection:
            assert connection.call("PING") == "PONG"


def test_full_memory_refuses_writes() -> None:
    """`maxmemory` comes with noeviction."""
    with (
        RedisServer(maxmemory="1") as server,
        server.connect() as connection,
        pytest.raises(ServerSaid, match="OOM"),
    ):
        connection.call("SET", "key", "value")


def test_replica_has_the_master_s_data() -> None:
    """A replica is ready only when it has copied its master."""
    with RedisServer(password="one") as master:  # noqa: S106 - of a throw-away server
        write(master)
        with RedisServer(replica_of=master) as replica:
            assert replica.role() == "slave"
            assert read(replica) == "value"


def test_independent_nodes_fail_one_by_one() -> None:
    """One node of a Redlock group loses its data, the others keep theirs."""
    with RedisNodes(3) as group:
        for node in group.nodes:
            write(node)

        group.nodes[1].restart(crash=True)

        assert [read(node) for node in group.nodes] == ["value", None, "value"]
        assert [node.role() for node in group.nodes] == ["master"] * 3
        addresses = ",".join(node.address for node in group.nodes)
        assert group.url == f"redlock://{addresses}"


class TestSentinels:
    """A master and a replica under three Sentinels."""

    def test_crash_of_the_master_promotes_the_replica(self) -> None:
        """After a crash the replica is master, and the old master comes back as replica."""
        with RedisSentinels() as group:
            old, (replica,) = group.master, group.replicas
            write(old)
            wait_until(lambda: None if read(replica) == "value" else "not copied yet")

            new = group.failover()

            assert new is replica
            assert read(new) == "value"
            old.start()
            wait_until(lambda: None if old.role() == "slave" else "the old master is one still")

    def test_failover_in_order_swaps_the_roles(self) -> None:
        """SENTINEL FAILOVER needs no crash; passwords reach every node."""
        with RedisSentinels(password="x y") as group:  # noqa: S106 - of a throw-away server
            old = group.master

            new = group.failover(crash=False)

            assert new.role() == "master"
            assert group.replicas == [old]
            assert "redis+sentinel://:x%20y@" in group.url
            assert group.url.endswith("/mymaster/0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster for all tests that leave it as they found it."""
    require("redis", local=True)
    with RedisCluster() as group:
        yield group


class TestCluster:
    """Three masters."""

    def test_every_master_serves_a_third(self, cluster: RedisCluster) -> None:
        """The slots are shared evenly and completely."""
        counts = [len(cluster.slots_of(node)) for node in cluster.nodes]

        assert sum(counts) == 16_384
        assert max(counts) - min(counts) <= 1

    def test_slot_moves_with_its_keys(self, cluster: RedisCluster) -> None:
        """After a move the old owner answers MOVED, the new one has the key."""
        slot = cluster.slot_of("key")
        source = cluster.owner_of(slot)
        target = next(node for node in cluster.nodes if node is not source)
        write(source)

        cluster.move_slot(slot, target)

        assert read(target) == "value"
        with pytest.raises(ServerSaid, match=f"MOVED {slot} {target.address}"):
            read(source)
        cluster.move_slot(slot, source)

    def test_cluster_is_healthy_again_after_a_restart(self, cluster: RedisCluster) -> None:
        """All nodes agree on the old layout after they were down."""
        cluster.restart()

        assert {node.cluster_info()["cluster_state"] for node in cluster.nodes} == {"ok"}


def test_cluster_replica_takes_over() -> None:
    """A killed master's slots are served by its replica."""
    with RedisCluster(replicas=1) as cluster:
        old = cluster.owner_of(0)

        new = cluster.failover()

        assert new is not old
        assert cluster.owner_of(0) is new


def test_no_directory_is_left() -> None:
    """Leaving the context removes the files."""
    with RedisServer() as server:
        directory: Path = server.directory
        assert directory.exists()
    assert not directory.exists()
