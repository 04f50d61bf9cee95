"""Guards and optimistic updates on a Redis Cluster of three masters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis
import redis.asyncio

import lockkit
from lockkit.fencing import AsyncRedisGuard, RedisGuard
from lockkit.optimistic import with_retry
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import FaultProxy, RedisCluster, require

KEYS = [f"seat:{number}" for number in range(12)]
"""Enough for every master to have some."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters for all tests of this module."""
    require("redis-cluster", local=True)
    with RedisCluster() as servers:
        yield servers


@pytest.fixture
def client(cluster: RedisCluster) -> Iterator[redis.RedisCluster]:
    """The application's client; nothing is there."""
    node = cluster.nodes[0]
    with redis.RedisCluster(host=node.host, port=node.port, decode_responses=True) as connected:
        connected.flushall(target_nodes="primaries")
        yield connected


def node_of(client: redis.RedisCluster, key: str) -> int:
    """Port of the node that has a key."""
    return int(client.get_node_from_key(key).port)  # type: ignore[no-untyped-call]


def test_guard_reaches_every_slot(client: redis.RedisCluster) -> None:
    """Mark and key are on one node, whichever that is, and each node learns the script."""
    guard = RedisGuard(client)
    for key in KEYS:
        guard.set(key, "new", token=2)
        with pytest.raises(lockkit.StaleToken):
            guard.set(key, "late", token=1)

    assert {client.get(key) for key in KEYS} == {"new"}
    assert len({node_of(client, key) for key in KEYS}) == 3
    assert guard.last(KEYS[0]) == 2


def test_asyncio_guard_reaches_every_slot(cluster: RedisCluster, client: redis.RedisCluster) -> None:
    """The same on the other face."""

    async def main() -> None:
        node = cluster.nodes[0]
        async with redis.asyncio.RedisCluster(node.host, node.port) as connected:
            guard = AsyncRedisGuard(connected)
            for key in KEYS:
                await guard.set(key, "new", token=2)
                with pytest.raises(lockkit.StaleToken):
                    await guard.set(key, "late", token=1)

    asyncio.run(main())
    assert {client.get(key) for key in KEYS} == {"new"}


def test_keys_of_one_tag_are_guarded_together(client: redis.RedisCluster) -> None:
    """Several keys in one slot, with one scope."""
    guard = RedisGuard(client)
    text = "redis.call('SET', KEYS[1], 'a') redis.call('SET', KEYS[2], 'b') return 1"

    guard.run(text, keys=["{seat}:a", "{seat}:b"], token=2, scope="{seat}")
    with pytest.raises(lockkit.StaleToken):
        guard.run(text, keys=["{seat}:a", "{seat}:c"], token=1, scope="{seat}")

    assert (client.get("{seat}:b"), client.get("{seat}:c")) == ("b", None)


def test_keys_of_several_slots_are_refused_with_advice(client: redis.RedisCluster) -> None:
    """Redis cannot change them in one step."""
    with pytest.raises(lockkit.ConfigurationError, match="same hash tag"):
        RedisGuard(client).set(KEYS[0], "1", token=1, scope=KEYS[1])


def test_client_for_one_node_is_told_to_be_for_the_cluster(cluster: RedisCluster, client: redis.RedisCluster) -> None:
    """The message says what to use instead of the node's error."""
    stranger = next(key for key in KEYS if node_of(client, key) != cluster.nodes[0].port)
    with redis.Redis(port=cluster.nodes[0].port) as single:
        with pytest.raises(lockkit.ConfigurationError, match="RedisCluster client"):
            RedisGuard(single).set(stranger, "1", token=1)
        with pytest.raises(lockkit.ConfigurationError, match="RedisCluster client"):
            with_retry(single, stranger, lambda _: "1")


TOUCH = "return redis.call('EXISTS', KEYS[1])"
SELL = "return redis.call('DECR', KEYS[1])"


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_lost_answer_runs_no_script_twice(cluster: RedisCluster, client: redis.RedisCluster, face: str) -> None:
    """A client for a Cluster sends a command again too."""
    key = KEYS[0]
    client.set(key, 10)
    owner = cluster.owner_of(cluster.slot_of(key))
    with FaultProxy(owner.host, owner.port) as proxy:

        def by_proxy(address: tuple[str, int]) -> tuple[str, int]:
            return (proxy.host, proxy.port) if address[1] == owner.port else address

        async def main() -> None:
            async with redis.asyncio.RedisCluster(host=owner.host, port=owner.port, address_remap=by_proxy) as data:
                await AsyncRedisGuard(data).run(SELL, keys=[key], token=1)

        def sell() -> None:
            if face == "asyncio":
                asyncio.run(main())
            else:
                with redis.RedisCluster(host=owner.host, port=owner.port, address_remap=by_proxy) as data:
                    RedisGuard(data).run(SELL, keys=[key], token=1)

        sell()
        dropped = proxy.drop_next_reply(match=b"EVALSHA")
        with pytest.raises(lockkit.BackendUnavailable, match="may have been made or not"):
            sell()
        assert dropped.wait(PATIENCE)
    assert client.get(key) == "8"


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_node_that_is_gone_is_asked_once(cluster: RedisCluster, client: redis.RedisCluster, face: str) -> None:
    """After a failover the client's map of the slots is old: the next call has a new one."""
    key, node = KEYS[0], cluster.nodes[0]
    client.set(key, 10)

    async def main() -> None:
        async with redis.asyncio.RedisCluster(host=node.host, port=node.port) as data:
            await data.initialize()
            data.nodes_manager.slots_cache[cluster.slot_of(key)] = [redis.asyncio.cluster.ClusterNode("127.0.0.1", 1)]
            guard = AsyncRedisGuard(data)
            with pytest.raises(lockkit.BackendUnavailable, match="no connection"):
                await guard.run(SELL, keys=[key], token=1)
            assert await guard.run(SELL, keys=[key], token=1) == 9

    if face == "asyncio":
        asyncio.run(main())
    else:
        client.nodes_manager.slots_cache[cluster.slot_of(key)] = [redis.cluster.ClusterNode("127.0.0.1", 1)]  # type: ignore[no-untyped-call]
        guard = RedisGuard(client)
        with pytest.raises(lockkit.BackendUnavailable, match="no connection"):
            guard.run(SELL, keys=[key], token=1)
        assert guard.run(SELL, keys=[key], token=1) == 9


@pytest.mark.parametrize("when", ["before", "between reading and writing"])
def test_slot_that_moves_is_followed(cluster: RedisCluster, client: redis.RedisCluster, when: str) -> None:
    """The client's map of the slots is old, or gets old: a further try goes to the right node, and counts once."""
    key = KEYS[0]
    client.set(key, "1")
    guard = RedisGuard(client)
    guard.accept(key, token=5)
    slot = cluster.slot_of(key)
    target = next(node for node in cluster.nodes if node is not cluster.owner_of(slot))

    assert guard.run(TOUCH, keys=[key], token=5) == 1

    def move(now: str) -> int:
        if cluster.owner_of(slot) is not target:
            cluster.move_slot(slot, target)
        return int(now) + 1

    if when == "before":
        move("0")
        assert guard.run(TOUCH, keys=[key], token=5) == 1
    assert with_retry(client, key, move) == 2

    assert client.get(key) == "2"
    with pytest.raises(lockkit.StaleToken):
        guard.set(key, "late", token=4)
