"""Locks on Redis while the world behaves badly: real servers are killed, stopped, emptied, filled and failed over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import Literal

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Busy, Gone, Grant, Renewed, Request, Unknown
from lockkit.backends.redis import node as redis_node
from lockkit.backends.redis import wakeup
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.groups import slot_of
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import pack
from lockkit.runtime import BlockingRuntime, drive
from lockkit.sync import Client, Lease
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.target import Face as ApiFace
from lockkit.testing.target import Target as ApiTarget
from lockkit_tools.servers import FaultProxy, RedisCluster, RedisSentinels, RedisServer, require, wait_until
from tests.backends.redis.faces import both
from tests.backends.redis.support import Face, backend_at, moving, queue_up, woken
from tests.backends.support import Connect, StubHost, granted, play
from tests.tries import busy, have_time_to_answer

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _redis() -> None:
    require("redis", local=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A node of this test's own, to be ill-treated."""
    with RedisServer() as node:
        yield node


def eventually_acquired(client: Client, name: str = "x", ttl: float = 30.0) -> Lease:
    """Acquire through an outage that is about to end."""
    return client.lock(name, ttl=ttl).acquire(timeout=PATIENCE)


class TestOneNode:
    """``redis://``."""

    def test_restart_is_noticed_and_all_leases_are_asked_for(self, server: RedisServer, connect: Connect) -> None:
        """The first new connection sees another server, long before the renewals are due."""
        client = connect(server.url)
        leases = [client.lock(f"lock {index}", ttl=600).acquire() for index in range(5)]
        server.restart(crash=True)

        client.ping()

        assert all(lease.wait_lost(PATIENCE) for lease in leases)

    def test_policy_that_may_evict_locks_is_warned_of_once(
        self, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Locks have an expiry, so also a volatile policy removes them."""
        with RedisServer(maxmemory="100mb", settings={"maxmemory-policy": "volatile-lru"}) as server:
            client = connect(server.url)
            with caplog.at_level(logging.WARNING, logger="lockkit"):
                client.ping()
                client.lock("x").acquire().release()
                server.restart()
                client.ping()

        warnings = [record.getMessage() for record in caplog.records if "evict" in record.getMessage()]
        assert len(warnings) == 1
        assert "volatile-lru" in warnings[0]

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_missing_password_is_said_to_be_missing(self, connect: Connect, protocol: int) -> None:
        """Not to be wrong. With RESP3, which is redis-py's default, the server says it in other words."""
        with RedisServer(password="right one") as server:  # noqa: S106 - of a throw-away server
            client = connect(f"redis://{server.address}/0?protocol={protocol}")

            with pytest.raises(lockkit.ConfigurationError, match=r"requires a password\. Give it in the URL"):
                client.lock("x").acquire(timeout=PATIENCE)

    def test_missing_right_to_a_command_within_a_script_is_too(self, connect: Connect) -> None:
        """The server says it with another code there; what the script had done before is undone."""
        users = {"app": "on >secret ~* &* +@all -time"}
        with RedisServer(users=users, login=("app", "secret")) as server:
            client = connect(server.url)

            with pytest.raises(lockkit.ConfigurationError, match="denies this user a right"):
                client.lock("x").acquire(timeout=PATIENCE)

            wait_until(lambda: None if client.holders("x") == [] else "it is still held")

    def test_replica_given_as_the_master_is_recognised(self, server: RedisServer, connect: Connect) -> None:
        """A write to it is refused; the message says what to give instead."""
        with RedisServer(replica_of=server) as replica:
            client = connect(replica.url)

            with pytest.raises(lockkit.BackendUnavailable, match=r"read-only replica: give the address of the master"):
                client.lock("x").acquire(timeout=0.2)

    @pytest.mark.parametrize("face", FACES)
    def test_single_tries_reach_a_server_that_is_far_away(self, server: RedisServer, face: ApiFace) -> None:
        """None has time to connect and log in; a later one finds that done."""

        async def body(driver: FaceDriver) -> None:
            client = await driver.connect()
            for _ in range(10):
                with suppress(lockkit.BackendUnavailable, lockkit.LockTimeout):  # busy: an earlier try is being undone
                    return await (await client.lock("x").acquire(timeout=0)).release()
                await driver.sleep(1.0)
            pytest.fail("it was never reached")

        with FaultProxy(server.host, server.port) as proxy:
            proxy.delay(to_client=0.25)
            play(face, f"redis://{proxy.address}", body)


class TestLostAnswers:
    """The request was carried out, and its answer never came."""

    @pytest.mark.parametrize(("protocol", "face"), [(2, "blocking"), (3, "asyncio")])
    def test_forgotten_subscription_is_noticed_while_waiting(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch, protocol: int, face: ApiFace
    ) -> None:
        """A connection that a NAT has dropped ends without a word: the waiter asks it for an answer now and then."""
        monkeypatch.setattr(wakeup, "HEARTBEAT_SECONDS", 0.5)

        async def body(driver: FaceDriver) -> None:
            holder = await driver.connect()
            waiter = await driver.connect(ApiTarget(f"redis://{nat.address}?socket_timeout=1&protocol={protocol}"))
            lease = await holder.lock("x", ttl=600).acquire()
            waiting = driver.spawn(waiter.lock("x", ttl=600).acquire(timeout=PATIENCE))

            async def queued() -> bool:
                return [one.waiters for one in await holder.holders("x")] == [1]

            await driver.eventually(queued, "a waiter in the queue")
            assert nat.forget() == 2  # that for commands too

            await lease.release()

            await (await waiting.result(PATIENCE / 2)).release()

        with FaultProxy(server.host, server.port) as nat:
            play(face, server.url, body)

    def test_connections_that_the_network_has_dropped_cost_the_time_of_one_answer(self, server: RedisServer) -> None:
        """After a burst of threads many are kept. When one gives no answer, the others are not tried one by one."""
        with FaultProxy(server.host, server.port) as nat:
            target = Target.anywhere({"socket_timeout": 0.5}, tls=False).moved(nat.host, nat.port)
            node = RedisNode(BlockingRuntime(), target)
            for connection in [drive(node._connect(inf)) for _ in range(5)]:
                node.give_back(connection)
            assert nat.forget() == 5

            with pytest.raises(lockkit.BackendUnavailable, match="did not answer in time"):
                drive(node.call(pack("PING")))

            assert drive(node.call(pack("PING"))) == b"PONG"
            drive(node.close())


class TestReplicas:
    """``?replicas=1``."""

    def test_grant_counts_only_when_a_replica_has_it(self, server: RedisServer, connect: Connect) -> None:
        """Without an acknowledgement the grant is undone, and counts as busy."""
        with RedisServer(replica_of=server) as replica:
            client = connect(f"{server.url}?replicas=1")
            client.lock("x").acquire().release()
            lease = client.lock("kept", ttl=120).acquire()
            wait_until(lambda: None if extended(lease) else "not acknowledged yet")

            replica.pause()
            assert busy(client.lock("kept"))
            with pytest.raises(lockkit.LockTimeout):
                client.lock("y").acquire(timeout=0)
            with pytest.raises(lockkit.BackendUnavailable, match="0 of 1 replicas"):
                lease.extend()

            with server.connect() as connection:
                assert connection.call("GET", "lockkit:y") is None
            replica.resume()
            eventually_acquired(client, "y").release()
            wait_until(lambda: None if extended(lease) else "not acknowledged yet")
            lease.release()

    def test_lease_that_was_ended_needs_no_acknowledgement(self, server: RedisServer, connect: Connect) -> None:
        """Its holder is told at once, also while no replica answers, which has less time than the server."""
        with RedisServer(replica_of=server) as replica:
            client = connect(f"{server.url}?replicas=1&socket_timeout=0.9")
            broken, taken, kept = (client.lock(name, ttl=600).acquire(timeout=PATIENCE) for name in "bcd")
            replica.pause()
            told: list[str] = []
            for lease in (broken, taken):
                lease.on_lost(lambda _, reason: told.append(reason))

            assert client.break_lock("b")
            with server.connect() as connection:
                connection.call("SET", "lockkit:c", "somebody else")
            for lease in (broken, taken):
                with pytest.raises(lockkit.LockLost):
                    lease.extend()

            assert told == ["broken", "taken"]
            with pytest.raises(lockkit.BackendUnavailable, match="0 of 1 replicas"):
                kept.extend()
            kept.release()


class TestAddressThatMoves:
    """``redis://`` with an address that leads to another server after a failover: a name in DNS, a virtual address."""

    @pytest.mark.parametrize(
        ("face", "trusted_seconds", "stale"),
        [("sync", 0.0, "yes"), ("sync", 600.0, "no"), ("asyncio", 0.0, "no")],
        ids=["READONLY", "hot MASTERDOWN", "asyncio"],
    )
    def test_new_master_is_found_although_the_old_one_keeps_its_connections(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch, face: str, trusted_seconds: float, stale: str
    ) -> None:
        """A replica refuses writes. Then lockkit connects anew, and subscribes anew, and the call succeeds."""
        monkeypatch.setattr(redis_node, "TRUSTED_SECONDS", trusted_seconds)

        async def scenario(host: StubHost) -> None:
            async with backend_at(f"redis://{address.address}", host) as backend, backend_at(new.url, host) as other:
                first, second = [granted(await backend.try_acquire(host.request(name))) for name in ("x", "y")]
                waiter = host.request("x")
                await queue_up(backend, waiter)
                until_copied(new, "lockkit:x", "lockkit:y", "{lockkit:x}:queue")
                fail_over()

                assert await backend.release(second)

                assert host.confirmations == 1
                assert await woken(waiter)  # its subscription has ended
                waiter.wake.clear()
                await queue_up(backend, waiter)
                assert await other.release(first)
                assert await woken(waiter)
                granted(await backend.try_acquire(waiter))

        def fail_over() -> None:
            with server.connect() as connection:
                connection.call("CONFIG", "SET", "replica-serve-stale-data", stale)
            promote(server, new, address)

        with RedisServer(replica_of=server) as new, FaultProxy(server.host, server.port) as address:
            Face(face).run(scenario)

    @both
    async def test_leases_are_renewed_at_the_new_master(self, server: RedisServer, host: StubHost) -> None:
        """Renewals travel together, and are not sent again at once."""
        with RedisServer(replica_of=server) as new, FaultProxy(server.host, server.port) as address:
            async with backend_at(f"redis://{address.address}", host) as backend:
                grants = [granted(await backend.try_acquire(host.request(name))) for name in ("x", "y")]
                until_copied(new, "lockkit:x", "lockkit:y")
                promote(server, new, address)

                outcomes = await backend.renew(grants)
                assert [type(outcome) for outcome in outcomes] == [Unknown, Unknown]
                assert await backend.renew(grants) == [Renewed(), Renewed()]
                assert host.confirmations == 1


def promote(old: RedisServer, new: RedisServer, address: FaultProxy) -> None:
    """Make a replica the master, to which an address leads from now on; connections stay as they are."""
    with new.connect() as connection:
        connection.call("REPLICAOF", "NO", "ONE")
    with old.connect() as connection:
        # Not of the new one, which would tell its subscribers what is published there.
        connection.call("REPLICAOF", "127.0.0.1", 1)
    address._network.target = (new.host, new.port)


class TestSentinel:
    """A master, a replica, three Sentinels."""

    def test_failover_while_held_and_while_waiting(self, connect: Connect) -> None:
        """Both go on at the promoted replica, which had acknowledged the lock."""
        with RedisSentinels() as group, ThreadPoolExecutor(1) as pool:
            holder, waiter = connect(f"{group.url}?replicas=1"), connect(group.url)
            lease = holder.lock("x", ttl=120).acquire()
            waiting = pool.submit(waiter.lock("x").acquire, PATIENCE)
            wait_until(lambda: None if waiters(holder, "x") == 1 else "nobody waits yet")

            group.failover()

            wait_until(lambda: None if confirmed(lease) else "not confirmed yet")
            assert not waiting.done()
            lease.release()
            later = waiting.result(PATIENCE)
            assert later.token > lease.token
            later.release()

    async def test_master_that_was_demoted_is_not_believed(self, host: StubHost) -> None:
        """Sentinels still name it for a while. A replica tells what its master had, so it is not asked."""
        # So long, that the Sentinels do not put it right while this test runs.
        with RedisSentinels(down_after_ms=60_000) as group:
            async with backend_at(group.url, host) as backend:
                assert await backend.holders("x") == []
            (replica,) = group.replicas
            with group.master.connect() as connection:
                connection.call("REPLICAOF", replica.host, replica.port)
            async with backend_at(group.url, host) as backend:
                with pytest.raises(lockkit.BackendUnavailable, match="it is a replica now"):
                    await backend.holders("x")

    async def test_master_that_refuses_writes_is_left_when_it_is_replaced(self, host: StubHost) -> None:
        """One that is cut off from its replicas answers, with an error, while another is promoted."""
        with RedisSentinels() as group, RedisServer() as other:
            async with backend_at(group.url, host) as backend:
                grant = granted(await backend.try_acquire(host.request()))
                with group.master.connect() as connection:
                    connection.call("CONFIG", "SET", "min-replicas-to-write", 9)
                with pytest.raises(lockkit.BackendUnavailable, match="too few replicas"):
                    await backend.release(grant)
                for sentinel in group.sentinels:
                    with sentinel.connect() as connection:
                        connection.call("SENTINEL", "REMOVE", group.name)
                        connection.call("SENTINEL", "MONITOR", group.name, other.host, other.port, 2)

                granted(await backend.try_acquire(host.request()))

                with other.connect() as connection:
                    assert connection.call("EXISTS", "lockkit:x") == 1

    def test_sentinels_have_a_login_of_their_own(self, connect: Connect) -> None:
        """What the URL has is the master's; the error says where the other one belongs."""
        with RedisSentinels(sentinels=1) as group:
            (sentinel,) = group.sentinels
            with sentinel.connect() as connection:
                connection.call("ACL", "SETUSER", "default", "resetpass", ">secret")
            for options in ({}, {"sentinel_password": "wrong"}):
                with pytest.raises(
                    lockkit.ConfigurationError, match=r"see sentinel_username=, sentinel_pass"
                ) as caught:
                    connect(group.url, **options).lock("x").acquire(timeout=PATIENCE)
                assert sentinel.address in str(caught.value)
                assert "Give it in the URL" not in str(caught.value)
            connect(group.url, sentinel_password="secret").lock("x").acquire(timeout=PATIENCE).release()  # noqa: S106

    async def test_server_that_is_given_as_a_sentinel_is_recognised(self, server: RedisServer, host: StubHost) -> None:
        """The error names what is wrong, not a version."""
        async with backend_at(f"redis+sentinel://{server.address}/mymaster", host) as backend:
            with pytest.raises(lockkit.ConfigurationError, match="is no Sentinel: give the addresses of the"):
                await backend.ping()

    def test_sentinels_that_are_down_are_passed_over(self, connect: Connect) -> None:
        """One that answers is enough; none is an outage, an unknown master a mistake, and so is the other scheme."""
        with RedisSentinels() as group:
            for sentinel in group.sentinels[:2]:
                sentinel.kill()
            client = connect(group.url)
            client.lock("x").acquire(timeout=PATIENCE).release()
            with pytest.raises(lockkit.ConfigurationError, match="knows no master 'other'"):
                connect(f"redis+sentinel://{group.sentinels[2].address}/other").ping()
            with pytest.raises(lockkit.ConfigurationError, match=r"is a Sentinel.* use redis\+sentinel://"):
                connect(f"redis://{group.sentinels[2].address}").lock("x").acquire()
            group.sentinels[2].kill()
            with pytest.raises(lockkit.BackendUnavailable, match="no Sentinel names the master 'mymaster'"):
                connect(group.url).ping()


def extended(lease: Lease) -> bool:
    """Extend a lease, unless the replica is late to acknowledge it."""
    try:
        lease.extend()
    except lockkit.BackendUnavailable:
        return False
    return True


def until_copied(replica: RedisServer, *keys: str) -> None:
    """Wait until a replica has keys of its master."""
    with replica.connect() as connection:
        wait_until(lambda: None if connection.call("EXISTS", *keys) == len(keys) else "not copied yet")


def confirmed(lease: Lease) -> bool:
    """Ask whether the lease is held, through a failover."""
    try:
        return lease.confirm()
    except lockkit.BackendUnavailable:
        return False


def waiters(client: Client, name: str) -> int:
    """Count those who wait for a held lock."""
    return sum(holder.waiters or 0 for holder in client.holders(name))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """For all tests that leave it whole."""
    require("redis", local=True)
    with RedisCluster() as group:
        yield group


class TestCluster:
    """Three masters."""

    def test_lock_in_a_slot_that_is_moving(
        self, cluster: RedisCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Scripts with several keys are refused meanwhile (TRYAGAIN): a held lease is not lost, a new one waits."""
        have_time_to_answer(monkeypatch)
        client = connect(cluster.url)
        with moving(cluster, "moving") as (slot, source, target), ThreadPoolExecutor(1) as pool:
            lease = client.lock("moving", ttl=120).acquire()
            cluster.begin_move(slot, source, target)
            with pytest.raises(lockkit.BackendUnavailable, match="moving this slot"):
                client.lock("moving").acquire(timeout=0)
            waiting = pool.submit(client.lock("moving").acquire, PATIENCE)

            cluster.move_slot(slot, target)

            lease.extend()
            lease.release()
            later = waiting.result(PATIENCE)
            assert later.token > lease.token
            later.release()

    @pytest.mark.parametrize("moved", ["nothing", "beside", "all"])
    async def test_lease_outlives_a_slot_that_moves_for_long(
        self, cluster: RedisCluster, host: StubHost, moved: str
    ) -> None:
        """Renewal and release need the lock's key alone, wherever the others are: at the old node, at the new one."""
        with moving(cluster, "slow") as (slot, source, target):
            async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
                requests = [host.request("slow", ttl=60.0) for _ in range(3)]
                first = granted(await backend.try_acquire(requests[0]))
                for waiter in requests[1:]:
                    assert isinstance(await other.try_acquire(waiter), Busy)
                cluster.begin_move(slot, source, target)
                keys = ["{lockkit:slow}:fence", "{lockkit:slow}:queue", "lockkit:slow"]
                with source.connect() as connection:
                    for key in {"nothing": [], "beside": keys[:1], "all": keys}[moved]:
                        connection.call("MIGRATE", target.host, target.port, key, 0, 5000)

                assert await backend.renew([first] * 3) == [Renewed()] * 3
                assert await backend.release(first)
                if moved != "all":  # there the queue can be looked into, and it was offered
                    assert await requests[1].wake.wait(PATIENCE)
                await other.abandon(requests[1])
                await other.abandon(requests[2])
                assert not await backend.release(first)
                assert await backend.renew([first]) == [Gone("gone")]

    @pytest.mark.parametrize("look", ["release", "readers", "long queue"])
    async def test_lock_that_moves_away_from_its_waiter(self, cluster: RedisCluster, host: StubHost, look: str) -> None:
        """The new node has no subscription: it tells all nodes, and drops no entry before its waiter has looked."""

        def request(*, queue: bool = True) -> Request:
            made = host.request("moved", ttl=600.0, queue=queue)
            made.mode = "shared" if look == "readers" else "exclusive"
            return made

        with moving(cluster, "moved") as (slot, _, target):
            async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
                grant = granted(await backend.try_acquire(request()))
                waiter = host.request("moved", ttl=600.0)
                await queue_up(other, waiter)

                cluster.move_slot(slot, target)

                assert not waiter.wake.is_set()
                if look == "release":
                    assert await backend.release(grant)
                    assert await woken(waiter)
                    granted(await other.try_acquire(waiter))
                elif look == "readers":
                    for _ in range(2):  # the first time it finds out where the lock is now
                        granted(await backend.try_acquire(request()))
                        assert await woken(waiter)
                        waiter.wake.clear()
                        await queue_up(other, waiter)
                    assert isinstance(await backend.try_acquire(request()), Busy)
                    assert not waiter.wake.is_set()
                else:
                    assert isinstance(await backend.try_acquire(request(queue=False)), Busy)  # finds the new node
                    for _ in range(15):
                        await queue_up(backend, request())
                    assert await woken(waiter)

    def test_replicated_lease_outlives_a_slot_that_moves(self) -> None:
        """A renewal is redirected, and counts when a replica of the node to which that leads has acknowledged it."""
        with RedisCluster(replicas=1) as group:
            slot = group.slot_of("lockkit:x")
            masters = [node for node in group.nodes if group.slots_of(node)]
            source = group.owner_of(slot)
            target = next(node for node in masters if node is not source)

            async def scenario(host: StubHost) -> None:
                async with backend_at(group.url, host, replicas=1) as backend:
                    # Again where the replica is late.
                    while not isinstance(grant := await backend.try_acquire(host.request(ttl=600.0)), Grant):
                        await host.runtime.sleep(0.05)

                    async def renewed() -> None:
                        while await backend.renew([grant]) != [Renewed()]:
                            await host.runtime.sleep(0.05)

                    group.begin_move(slot, source, target)
                    with source.connect() as connection:
                        connection.call("MIGRATE", target.host, target.port, "lockkit:x", 0, 5000)
                    await renewed()
                    group.move_slot(slot, target)
                    await renewed()
                    assert await backend.release(grant)
                    group.move_slot(slot, source)

            Face("asyncio").run(scenario)

    def test_replica_takes_over_while_held_and_while_waiting(self, connect: Connect) -> None:
        """After a failover the lease is confirmed at the new master, and a release there wakes the waiter."""
        with RedisCluster(replicas=1) as group, ThreadPoolExecutor(1) as pool:
            client, other = connect(f"{group.url}?replicas=1"), connect(group.url)
            slots = set(group.slots_of(group.owner_of(0)))  # of the master that fails
            name = next(name for name in map(str, range(1000)) if slot_of(f"lockkit:{name}") in slots)
            # So long that the waiter does not look again by itself.
            lease = client.lock(name, ttl=600).acquire()
            waiting = pool.submit(other.lock(name).acquire, PATIENCE)
            wait_until(lambda: None if waiters(client, name) == 1 else "nobody waits yet")

            group.failover()

            wait_until(lambda: None if confirmed(lease) else "not confirmed yet")
            wait_until(lambda: None if waiters(client, name) == 1 else "nobody waits at the new master yet")
            lease.release()
            waiting.result(PATIENCE).release()


async def hold(backend: RedisBackend, host: StubHost, count: int) -> list[Grant]:
    """Acquire the read side so many times."""
    grants = []
    for _ in range(count):
        request = host.request(ttl=60.0)
        request.mode = "shared"
        grants.append(granted(await backend.try_acquire(request)))
    return grants


class TestSharesInCluster:
    """Readers and permits, on three masters."""

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
