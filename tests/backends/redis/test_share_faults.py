"""Readers and permits on Redis while the world behaves badly: real servers and processes are killed and failed over."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Gone, Grant, Renewed, Unknown
from lockkit.backends.redis.backend import RedisBackend
from lockkit.sync import Client, Lease, Semaphore
from lockkit_tools.servers import FaultProxy, RedisCluster, RedisSentinels, RedisServer, require, wait_until
from lockkit_tools.servers.redis_groups import ClusterNode
from tests.backends.redis.support import Connect, backend_at, queue_up, woken
from tests.backends.support import StubHost, granted
from tests.conventions.sources import ROOT
from tests.tries import busy, have_time_to_answer, until

pytestmark = pytest.mark.timeout(180)

PATIENCE = 60.0

READ_FOR_EVER = """
import sys, time, lockkit
lease = lockkit.connect(sys.argv[1]).rwlock("x", ttl=3.0).read().acquire(timeout=60)
print(lease.owner, flush=True)
time.sleep(600)
"""


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


def owners(client: Client) -> set[str]:
    """Say who holds the lock, through an outage; nobody as long as nothing answers."""
    with suppress(lockkit.BackendUnavailable):
        return {holder.owner for holder in client.holders("x")}
    return set()


def test_killed_reader_ends_with_its_ttl_and_living_ones_go_on(server: RedisServer, connect: Connect) -> None:
    """The living one, which is renewed meanwhile, does not keep it; then it is the writer's turn."""
    living, other = connect(server.url), connect(server.url)
    lease = read(living, ttl=4.5)
    process = subprocess.Popen(
        [sys.executable, "-c", READ_FOR_EVER, server.url],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with process:
        try:
            assert process.stdout is not None
            killed = process.stdout.readline().strip()
            assert owners(other) == {lease.owner, killed}
        finally:
            process.kill()
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=PATIENCE)))
    thread.start()

    wait_until(lambda: None if owners(living) == {lease.owner} else "the share of the killed reader is still there")

    assert got == []
    assert lease.confirm()
    lease.release()
    thread.join(PATIENCE)
    assert got[0].token > lease.token
    got[0].release()


def test_readers_over_a_crash_of_a_server_that_keeps_its_data(connect: Connect) -> None:
    """With ``appendfsync always`` they are there after the restart, and no writer gets in meanwhile."""
    with RedisServer(appendonly=True, appendfsync="always") as server:
        holder, other = connect(server.url), connect(server.url)
        leases = [read(holder), read(other)]

        server.restart(crash=True)

        assert all(lease.confirm() for lease in leases)
        leases[0].release()
        leases[1].extend()
        with connect(server.url) as third:
            assert busy(third.lock("x"))
            leases[1].release()
            third.lock("x").acquire(timeout=PATIENCE).release()


def test_readers_of_a_server_that_comes_back_empty_are_told(server: RedisServer, connect: Connect) -> None:
    """At the next renewal, and permits too; tokens go on."""
    holder, other = connect(server.url), connect(server.url)
    leases = [read(holder), read(holder), holder.semaphore("x", limit=2, ttl=30).acquire(timeout=PATIENCE)]

    server.restart(crash=True)

    second = other.lock("x").acquire(timeout=PATIENCE)
    assert second.token > leases[1].token
    holder.ping()
    assert all(lease.wait_lost(PATIENCE) for lease in leases)
    second.release()


def test_readers_over_a_failover(connect: Connect) -> None:
    """They go on at the promoted replica, which had the data; so does the writer that waits."""
    with RedisSentinels() as group:
        holder, other = connect(group.url), connect(group.url)
        leases = [read(holder), read(other)]
        (replica,) = group.replicas
        with replica.connect() as connection:
            wait_until(lambda: None if connection.call("ZCARD", "{lockkit:x}:shares") == 2 else "not copied yet")
        got: list[Lease] = []
        writer = connect(group.url)
        thread = threading.Thread(target=lambda: got.append(writer.lock("x").acquire(timeout=PATIENCE)))
        thread.start()
        wait_until(lambda: None if [one.waiters for one in holder.holders("x")] == [1, 1] else "nobody waits yet")

        group.failover()

        wait_until(lambda: None if owners(other) == {lease.owner for lease in leases} else "not there yet")
        for lease in leases:
            assert got == []
            until_confirmed(lease)
            lease.release()
        thread.join(PATIENCE)
        assert got[0].token > leases[1].token
        got[0].release()


def until_confirmed(lease: Lease) -> None:
    """Ask whether the lease is held, through a failover."""

    def confirmed() -> bool:
        try:
            return lease.confirm()
        except lockkit.BackendUnavailable:
            return False

    wait_until(lambda: None if confirmed() else "not confirmed yet")


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


def test_lost_answers_of_shares(server: RedisServer, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again: the grant, the downgrade, the renewal. A release is sent once, and can be called again."""
    have_time_to_answer(monkeypatch)
    with FaultProxy(server.host, server.port, count_commands=True) as proxy:
        client = connect(f"redis://{proxy.address}")
        lock = client.rwlock("x", ttl=30)
        lock.write().acquire(timeout=PATIENCE).release()
        lock.read().acquire(timeout=PATIENCE).release()

        proxy.drop_next_reply(match=b"EVALSHA")
        lease = lock.read().acquire(timeout=0)
        assert owners(client) == {lease.owner}
        proxy.drop_next_reply(match=b"EVALSHA")
        with pytest.raises(lockkit.BackendUnavailable):
            lease.release()
        lease.release()

        written = lock.write().acquire(timeout=PATIENCE)
        proxy.drop_next_reply(match=b"EVAL")
        written.downgrade()
        assert [holder.mode for holder in client.holders("x")] == ["shared"]
        written.extend()
        written.release()
        assert owners(client) == set()


def test_cancelled_readers_leave_nothing(server: RedisServer) -> None:
    """Whenever a task is cancelled, no share, no place in the queue is left; the same for permits."""

    async def scenario() -> None:
        async with lockkit.aio.connect(server.url) as client:
            held = await client.rwlock("held", ttl=600).write().acquire()
            for number in range(400):
                free = client.rwlock("free", ttl=600).read()
                lock = (free, client.rwlock("held", ttl=600).read(), client.semaphore("free", limit=2))[number % 3]
                task = asyncio.create_task(lock.acquire())
                for _ in range(number % 11):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    lease = await task
                except asyncio.CancelledError:
                    continue
                await lease.release()
            assert [one.waiters for one in await client.holders("held")] == [0]
            await held.release()

    asyncio.run(scenario())

    with server.connect() as connection:
        assert all(str(key).endswith(":fence") for key in connection.call_list("KEYS", "*"))


def test_hundred_readers_of_one_process_take_one_round_trip_each(server: RedisServer) -> None:
    """None waits for another."""

    async def scenario() -> None:
        async with lockkit.aio.connect(server.url) as client:
            lock = client.rwlock("x", ttl=60, timeout=PATIENCE).read()
            await (await lock.acquire()).release()
            with server.connect() as connection:
                connection.call("CONFIG", "RESETSTAT")
                leases = await asyncio.gather(*(lock.acquire() for _ in range(100)))
                await asyncio.gather(*(lease.release() for lease in leases))
                (line,) = (
                    line
                    for line in str(connection.call("INFO", "commandstats")).splitlines()
                    if line.startswith("cmdstat_evalsha:")
                )
            assert line.startswith("cmdstat_evalsha:calls=200,")
            assert len({lease.token for lease in leases}) == 100

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters."""
    require("redis-cluster", local=True)
    with RedisCluster() as group:
        yield group


@contextmanager
def moving(cluster: RedisCluster) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    """Give the node that has the lock's slot and one that it could move to; afterwards it is where it was."""
    slot = cluster.slot_of("lockkit:x")
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    try:
        yield source, target
    finally:
        if cluster.owner_of(slot) is not source:
            cluster.move_slot(slot, source)
        for node in (source, target):
            with node.connect() as connection:
                connection.call("CLUSTER", "SETSLOT", slot, "STABLE")
                connection.call("FLUSHALL")


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

        slot = cluster.slot_of("lockkit:x")
        with moving(cluster) as (source, target):
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
        slot = cluster.slot_of("lockkit:x")
        with moving(cluster) as (source, target):
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
        slot = cluster.slot_of("lockkit:x")
        with moving(cluster) as (source, target):
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
