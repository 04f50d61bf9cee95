"""Wake-ups in a Cluster: they stay at the lock's node, and no waiter misses one where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from lockkit.backend import Grant, Request
from lockkit.backends.redis import handshake
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.handshake import can_shard
from lockkit_tools.servers import RedisCluster, require
from lockkit_tools.servers.redis_groups import ClusterNode
from tests.backends.redis.support import Face, Keyspace, backend_at, busy_at, queue_up, woken
from tests.backends.support import StubHost, granted

TTL = 600.0
"""Nobody looks again by itself for so long."""

names = (f"lock {number}" for number in count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters, for tests that leave it whole."""
    require("redis", local=True)
    with RedisCluster() as group:
        yield group


@pytest.fixture(autouse=True)
def _shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use sharded pub/sub, whatever the version of the installed server: no test here runs a slow script."""
    monkeypatch.setattr(handshake, "can_shard", lambda facts: "redis_version" in facts)


def two_at_one_node(cluster: RedisCluster) -> tuple[str, str]:
    """Name two locks that are in different slots of the same node."""
    first = next(names)
    slot = slot_of(cluster, first)
    for name in names:
        if slot_of(cluster, name) != slot and cluster.owner_of(slot_of(cluster, name)) is cluster.owner_of(slot):
            break
    return first, name


def slot_of(cluster: RedisCluster, name: str) -> int:
    """Give the slot of a lock."""
    return cluster.slot_of(f"lockkit:{name}")


def broadcasts(cluster: RedisCluster) -> int:
    """Count what was published to all nodes."""
    stats = [Keyspace(node)("INFO", "commandstats").partition("cmdstat_publish:calls=")[2] for node in cluster.nodes]
    return sum(int(found.partition(",")[0] or 0) for found in stats)


def bus_messages(cluster: RedisCluster) -> int:
    """Count the messages between the nodes by which that was done."""
    return sum(int(node.cluster_info().get("cluster_stats_messages_publish_sent", 0)) for node in cluster.nodes)


@contextmanager
def moved(cluster: RedisCluster, name: str) -> Iterator[ClusterNode]:
    """Move the slot of a lock to another node, and back at the end."""
    slot = slot_of(cluster, name)
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    cluster.move_slot(slot, target)
    try:
        yield target
    finally:
        cluster.move_slot(slot, source)


@pytest.mark.parametrize("protocol", [2, 3])
async def test_wakeups_do_not_leave_their_node(cluster: RedisCluster, protocol: int, host: StubHost) -> None:
    """Also those for a lock whose slot is another than that of the client's channel."""
    pair = two_at_one_node(cluster)

    url = f"{cluster.url}?protocol={protocol}"
    async with backend_at(url, host) as backend, backend_at(url, host) as other:
        before = broadcasts(cluster), bus_messages(cluster)
        for name in pair:
            grant = granted(await backend.try_acquire(host.request(name, ttl=TTL)))
            waiters = [host.request(name, ttl=TTL) for _ in range(5)]
            for waiter in waiters:
                await queue_up(other, waiter)
            for waiter in waiters:
                assert await backend.release(grant)
                assert await woken(waiter)
                grant = granted(await other.try_acquire(waiter))
            assert await backend.release(grant)

        assert (broadcasts(cluster), bus_messages(cluster)) == before


async def test_waiter_whose_slot_moves_looks_again(cluster: RedisCluster, host: StubHost) -> None:
    """It is woken by the move, waits at the new node, and is woken there by a message that stays there."""
    name = next(names)

    async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
        grant = granted(await backend.try_acquire(host.request(name, ttl=TTL)))
        waiter = host.request(name, ttl=TTL)
        await queue_up(other, waiter)
        assert not waiter.wake.is_set()
        former = waiter.state.listener

        with moved(cluster, name):
            assert await woken(waiter)
            waiter.wake.clear()
            await queue_up(other, waiter)
            assert not former._waiting  # else it would keep the request for ever
            assert await backend.release(grant)
            assert await woken(waiter)
            grant = granted(await other.try_acquire(waiter))
            before = broadcasts(cluster)
            again = host.request(name, ttl=TTL)
            await queue_up(other, again)
            assert await other.release(grant)
            assert await woken(again)
            assert await other.release(granted(await other.try_acquire(again)))
            assert broadcasts(cluster) == before


async def woken_by_all_nodes(
    cluster: RedisCluster, backend: RedisBackend, grant: Grant, other: RedisBackend, waiter: Request
) -> None:
    """Release, and have the waiter woken by a message that goes to all nodes."""
    before = broadcasts(cluster)
    assert await backend.release(grant)
    assert await woken(waiter)
    assert await other.release(granted(await other.try_acquire(waiter)))
    assert broadcasts(cluster) > before


@pytest.mark.parametrize("look", ["release", "readers", "long queue"])
async def test_lock_that_moves_away_from_its_waiter_s_channel(cluster: RedisCluster, host: StubHost, look: str) -> None:
    """The new node sees no subscription there: it tells all nodes, and drops no entry before its waiter has looked."""
    staying, moving = two_at_one_node(cluster)

    def request(*, queue: bool = True) -> Request:
        made = host.request(moving, ttl=TTL, queue=queue)
        made.mode = "shared" if look == "readers" else "exclusive"
        return made

    async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
        granted(await backend.try_acquire(host.request(staying, ttl=TTL)))
        await queue_up(other, host.request(staying, ttl=TTL))
        grant = granted(await backend.try_acquire(request()))
        waiter = host.request(moving, ttl=TTL)
        await queue_up(other, waiter)

        with moved(cluster, moving):
            assert not waiter.wake.is_set()
            if look == "release":
                await woken_by_all_nodes(cluster, backend, grant, other, waiter)
            elif look == "readers":
                for _ in range(2):  # the first time it finds out where the lock is now
                    granted(await backend.try_acquire(request()))
                    assert await woken(waiter)
                    waiter.wake.clear()
                    await queue_up(other, waiter)
                await busy_at(backend, request())
                assert not waiter.wake.is_set()
            else:
                await busy_at(backend, request(queue=False))  # finds the new node
                for _ in range(15):
                    await queue_up(backend, request())
                assert await woken(waiter)


@pytest.mark.parametrize("denied", ["ssubscribe", "spublish"])
async def test_user_who_may_not_use_sharded_pubsub(
    cluster: RedisCluster, denied: str, face: Face, host: StubHost
) -> None:
    """The waiter is woken by a message to all nodes; what the server has refused is not tried again."""
    name, user = next(names), f"{face.name}-{denied}"
    node = cluster.owner_of(slot_of(cluster, name))
    for one in cluster.nodes:
        with one.connect() as connection:
            connection.call("ACL", "SETUSER", user, "on", ">secret", "~*", "&*", "+@all", f"-{denied}")

    url = cluster.url.replace("://", f"://{user}:secret@")
    keyspace = Keyspace(node)
    async with backend_at(url, host) as backend, backend_at(url, host) as other:
        keyspace("CONFIG", "RESETSTAT")
        for _ in range(2):
            grant = granted(await backend.try_acquire(host.request(name, ttl=TTL)))
            waiter = host.request(name, ttl=TTL)
            await queue_up(other, waiter)
            await woken_by_all_nodes(cluster, backend, grant, other, waiter)
            again = host.request(name, ttl=TTL)
            grant = granted(await backend.try_acquire(host.request(name, ttl=TTL)))
            await queue_up(other, again)
            keyspace("CLIENT", "KILL", "TYPE", "pubsub")
            assert await woken(again)
            await other.abandon(again)
            assert await backend.release(grant)

        refused = keyspace("INFO", "commandstats").partition("cmdstat_ssubscribe:")[2].partition("\r\n")[0]
        assert "rejected_calls=1," in refused if denied == "ssubscribe" else "rejected_calls=0," in refused


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["", "6.2.21", "7.0.8", "7.4.0", "8.6.3", "7.2.4 8.0.1", "7.2.4 8.1.1"], False),
        (["7.0.9", "7.2.14", "8.6.4", "8.10.0", "7.2.4 7.2.11", "7.2.4 8.1.2", "7.2.4 9.0.0"], True),
    ],
)
def test_versions_whose_sharded_pubsub_can_be_used(versions: list[str], *, expected: bool) -> None:
    """Of Redis, and of Valkey. Others lack it, or crash when a subscriber disconnects during a slow script."""
    for version in versions:
        facts = dict(zip(("redis_version", "valkey_version"), version.split(), strict=False))
        assert can_shard(facts) is expected, version


async def test_version_that_must_not_be_used(
    cluster: RedisCluster, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no subscription that could crash it, and the waiter is woken by a message to all nodes."""
    name = next(names)
    monkeypatch.setattr(handshake, "can_shard", lambda _: False)

    async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
        grant = granted(await backend.try_acquire(host.request(name, ttl=TTL)))
        waiter = host.request(name, ttl=TTL)
        await queue_up(other, waiter)
        keyspace = Keyspace(cluster.owner_of(slot_of(cluster, name)))
        assert keyspace("PUBSUB", "SHARDCHANNELS") == []
        await woken_by_all_nodes(cluster, backend, grant, other, waiter)
