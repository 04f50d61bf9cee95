"""What a promoted replica and a restart without data do to a lock, and how the token keeps the first holder out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

import lockkit
from lockkit_tools.servers import FaultProxy, RedisServer, require, wait_until
from tests.tries import busy


@dataclass
class Pair:
    """A master and its replica, which copies it through a proxy."""

    master: RedisServer
    replica: RedisServer
    link: FaultProxy

    def fail_over(self) -> None:
        """Crash the master and promote the replica, as Sentinel would."""
        self.master.kill()
        with self.replica.connect() as connection:
            connection.call("REPLICAOF", "NO", "ONE")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A master and its replica in sync."""
    require("redis", local=True)
    with (
        RedisServer() as master,
        FaultProxy(master.host, master.port) as link,
        RedisServer(settings={"replicaof": f"{link.host} {link.port}"}) as replica,
    ):

        def waits_for() -> str | None:
            with replica.connect() as connection:
                up = connection.info("replication")["master_link_status"] == "up"
            return None if up else "the replica has not caught up"

        wait_until(waits_for)
        yield Pair(master, replica, link)


def test_promoted_replica_grants_a_second_holder_and_the_guard_rejects_the_first(pair: Pair) -> None:
    """
    The interleaving that no single Redis can exclude.

    A  is granted the lock by the master
       the master crashes before it is replicated; the replica is promoted
    B  is granted the lock by the replica, while A's lease runs
    B  writes
    A  writes: refused, as its token is older
    """
    with lockkit.connect(pair.master.url) as client_a, lockkit.connect(pair.replica.url) as client_b:
        pair.link.blackhole()
        first = client_a.lock("seat:12A", ttl=120, renew=False).acquire()
        pair.fail_over()
        second = client_b.lock("seat:12A", ttl=120, renew=False).acquire(timeout=60)

        # Both believe, and each is right about its own server: this is what the guard is for.
        assert first.held
        assert second.held
        assert second.token > first.token

        with redis.Redis(port=pair.replica.port, decode_responses=True) as data:
            guard = lockkit.fencing.RedisGuard(data)
            guard.set("customer", "Ben", token=second.token)
            with pytest.raises(lockkit.StaleToken):
                guard.set("customer", "Ada", token=first.token)
            assert data.get("customer") == "Ben"
            data.set("customer", "Ada")  # past the guard nothing stops it
            assert data.get("customer") == "Ada"
        second.release()


def test_mark_that_the_promoted_replica_never_got_protects_from_the_next_change_on(pair: Pair) -> None:
    """A guard in a Redis that loses writes loses its marks with them; `accept` closes the gap at the next grant."""
    with (
        lockkit.connect(pair.master.url) as client_a,
        lockkit.connect(pair.replica.url) as client_b,
        redis.Redis(port=pair.master.port) as before,
        redis.Redis(port=pair.replica.port) as after,
    ):
        pair.link.blackhole()
        first = client_a.lock("seat:12A", ttl=120, renew=False).acquire()
        lockkit.fencing.RedisGuard(before).set("customer", "Ada", token=first.token)
        pair.fail_over()
        guard = lockkit.fencing.RedisGuard(after)
        assert guard.last("customer") is None

        with client_b.lock("seat:12A") as second:
            guard.accept("customer", token=second.token)
            with pytest.raises(lockkit.StaleToken):
                guard.set("customer", "Ada", token=first.token)


def test_server_that_lost_its_data_grants_a_second_holder_with_a_higher_token() -> None:
    """A restart without persistence forgets locks and counters; tokens go on by the server's clock."""
    require("redis", local=True)
    with RedisServer() as server, lockkit.connect(server.url) as client_a, lockkit.connect(server.url) as client_b:
        first = client_a.lock("seat:12A", ttl=120, renew=False).acquire()
        server.restart(keep_data=False, crash=True)
        second = client_b.lock("seat:12A", ttl=120, renew=False).acquire(timeout=60)

        assert first.held
        assert second.token > first.token
        guard = lockkit.fencing.RedisGuard(redis.Redis(port=server.port))
        guard.accept("customer", token=second.token)
        with pytest.raises(lockkit.StaleToken):
            guard.set("customer", "Ada", token=first.token)
        second.release()
        assert not first.confirm()


def test_server_with_an_append_only_file_keeps_the_holder() -> None:
    """``appendfsync always`` writes a grant down before it is answered."""
    require("redis", local=True)
    server = RedisServer(appendonly=True, appendfsync="always")
    with server, lockkit.connect(server.url) as client_a, lockkit.connect(server.url) as client_b:
        first = client_a.lock("seat:12A", ttl=120, renew=False).acquire()
        server.restart(crash=True)

        assert busy(client_b.lock("seat:12A"))
        assert first.confirm()
        first.release()
