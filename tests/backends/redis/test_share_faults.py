"""Readers and permits on Redis while the world behaves badly: real servers and processes are killed and failed over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Gone, Grant, Renewed, Unknown
from lockkit.backends.redis.backend import RedisBackend
from lockkit.sync import Client, Lease, Semaphore
from lockkit_tools.servers import RedisCluster, RedisServer, require, wait_until
from tests.backends.redis.support import Connect, backend_at, moving, queue_up, woken
from tests.backends.support import StubHost, granted
from tests.tries import busy, until

pytestmark = pytest.mark.timeout(180)

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _redis() -> None:
    require("redis", local=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A node of this test's own, to be ill-treated."""
    with RedisServer() as node:
        yield node


def read(client: Client, ttl: float = 120.0) -> Lease:
    """Acquire the read side, through an outage that is about to end."""
    return client.rwlock("x", ttl=ttl).read().acquire(timeout=PATIENCE)


def test_shares_count_only_when_a_replica_has_them(server: RedisServer, connect: Connect) -> None:
    """``?replicas=1``: without an acknowledgement they are undone; so is no downgrade believed."""
    with RedisServer(replica_of=server) as replica:
        client = connect(f"{server.url}?replicas=1")
        semaphore = client.semaphore("x", limit=2, ttl=20)
        lease, permit = read(client), semaphore.acquire(timeout=PATIENCE)
        written = client.rwlock("z", ttl=20).write().acquire(timeout=PATIENCE)
        assert permit.slot == 0

        replica.pause()
        assert until(lambda: refused(semaphore))
        assert busy(client.rwlock("y").read())
        with pytest.raises(lockkit.BackendUnavailable, match="0 of 1 replicas"):
            written.downgrade()
        with server.connect() as connection:
            assert connection.call("GET", "lockkit:y") is None
        assert semaphore.available() == 1

        replica.resume()
        wait_until(lambda: None if downgraded(written) else "not acknowledged yet")
        assert written.mode == "shared"
        for each in (lease, permit, written):
            each.extend()
            each.release()


def refused(semaphore: Semaphore) -> bool:
    """Tell whether no permit is to be had; not as long as there is no answer."""
    with suppress(lockkit.BackendUnavailable):
        return semaphore.try_acquire() is None
    return False


def downgraded(lease: Lease) -> bool:
    """Ask again for it, as long as there is no answer."""
    try:
        lease.downgrade()
    except lockkit.BackendUnavailable:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters."""
    require("redis-cluster", local=True)
    with RedisCluster() as group:
        yield group


async def hold(backend: RedisBackend, host: StubHost, count: int) -> list[Grant]:
    """Acquire the read side so many times."""
    grants = []
    for _ in range(count):
        request = host.request(ttl=60.0)
        request.mode = "shared"
        grants.append(granted(await backend.try_acquire(request)))
    return grants


class TestCluster:
    """Three masters."""

    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("moved", ["nothing", "needless", "all"])
    async def test_shares_outlive_a_slot_that_moves_for_long(
        self, cluster: RedisCluster, host: StubHost, moved: str, count: int
    ) -> None:
        """As long as the keys that a renewal needs are at one node."""
        needed = ["{lockkit:x}:fence"] if count == 1 else ["{lockkit:x}:shares", "{lockkit:x}:leases"]
        needless = ["{lockkit:x}:broken"] if count == 1 else ["{lockkit:x}:fence"]
        keys: list[str] = {"nothing": [], "needless": needless, "all": [*needed, *needless, "lockkit:x"]}[moved]

        with moving(cluster, "x") as (slot, source, target):
            async with backend_at(cluster.url, host) as backend:
                grants = await hold(backend, host, count)
                cluster.begin_move(slot, source, target)
                with source.connect() as connection:
                    for key in keys:
                        connection.call("MIGRATE", target.host, target.port, key, 0, 5000)

                assert await backend.renew(grants * 2) == [Renewed()] * count * 2
                for grant in grants:
                    assert await backend.release(grant)
                assert await backend.renew(grants) == [Gone("gone")] * count
                assert not await backend.release(grants[0])

    @pytest.mark.parametrize("mode", ["exclusive", "permit"])
    async def test_release_that_empties_a_key_while_the_slot_moves(
        self, cluster: RedisCluster, host: StubHost, mode: Literal["exclusive", "permit"]
    ) -> None:
        """With its last entry a key is gone, and the server takes it for one that has moved."""
        with moving(cluster, "x") as (slot, source, target):
            async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
                requests = [host.request(ttl=60.0) for _ in range(3)]
                for request in requests:
                    request.mode, request.limit = "permit", 2
                first, second = [granted(await backend.try_acquire(request)) for request in requests[:2]]
                waiter = requests[2]
                waiter.mode = mode
                await queue_up(other, waiter)
                if mode == "exclusive":
                    assert await backend.release(second)
                cluster.begin_move(slot, source, target)

                assert await backend.release(first)

                assert await woken(waiter)
                assert not await backend.release(first)

    async def test_shares_of_which_a_part_has_moved(self, cluster: RedisCluster, host: StubHost) -> None:
        """They can be neither renewed nor ended meanwhile, which is no loss; then they can. Others are not affected."""
        with moving(cluster, "x") as (slot, source, target):
            async with backend_at(cluster.url, host) as backend:
                grants = await hold(backend, host, 2)
                other = granted(await backend.try_acquire(host.request("y", ttl=60.0)))
                cluster.begin_move(slot, source, target)
                with source.connect() as connection:
                    connection.call("MIGRATE", target.host, target.port, "{lockkit:x}:shares", 0, 5000)
                one, two, three = await backend.renew([*grants, other])
                assert isinstance(one, Unknown)
                assert isinstance(two, Unknown)
                assert three == Renewed()
                with pytest.raises(lockkit.BackendUnavailable, match="moving"):
                    await backend.release(grants[0])

                cluster.move_slot(slot, target)

                assert await backend.renew([*grants, other]) == [Renewed()] * 3
                assert await backend.release(grants[0])
                assert await backend.release(grants[1])
                assert await backend.renew(grants) == [Gone("gone")] * 2
                assert await backend.release(other)
