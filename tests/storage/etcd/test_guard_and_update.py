"""Guards and optimistic updates of data in etcd, with both APIs, on a real server."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockkit
import lockkit.aio
from lockkit import fencing, optimistic
from lockkit.backends.etcd import cluster as etcd_cluster
from lockkit.sync import Client, Lease
from lockkit_tools.servers import EtcdServer, FaultProxy, http2_call_ended, require
from tests.tries import tried

TTL = 60.0
PATIENCE = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """One member for all tests."""
    require("etcd", local=True)
    with EtcdServer() as member:
        yield member


@pytest.fixture
def client(server: EtcdServer) -> Iterator[Client]:
    """A client of it."""
    with lockkit.connect(server.url) as made:
        yield made


def value_at(client: Client, key: str) -> bytes | None:
    """Read a key."""
    seen: list[bytes | None] = []
    optimistic.update_key(client, key, seen.append)
    return seen[0]


class TestGuard:
    """`EtcdGuard` and `AsyncEtcdGuard`."""

    def test_holder_writes_as_often_as_it_likes(self, client: Client) -> None:
        """And deletes as often."""
        guard = fencing.EtcdGuard(client)
        with client.lock("g1", ttl=TTL) as lease:
            guard.check(lease=lease)
            guard.put("data/1", "Ada", lease=lease)
            guard.put(b"data/1", b"Ben", lease=lease)
            assert value_at(client, "data/1") == b"Ben"
            assert guard.delete("data/1", lease=lease)
            assert not guard.delete("data/1", lease=lease)

    def test_key_that_is_put_outlives_the_etcd_lease_that_it_had(self, server: EtcdServer, client: Client) -> None:
        """A put that names no lease detaches it."""
        lease = int(server.call("/v3/lease/grant", TTL=600)["ID"])
        server.call("/v3/kv/put", key="bGVhc2Vk", value="YQ==", lease=str(lease))

        with client.lock("g1", ttl=TTL) as held:
            fencing.EtcdGuard(client).put("leased", "b", lease=held)

        server.call("/v3/lease/revoke", ID=str(lease))
        assert value_at(client, "leased") == b"b"

    def test_holder_that_was_replaced_is_refused(self, client: Client) -> None:
        """It does not know yet that it lost the lock; the error names the next holder's token."""
        guard = fencing.EtcdGuard(client)
        stale = client.lock("g2", ttl=TTL, renew=False).acquire()
        client.break_lock("g2")
        with pytest.raises(lockkit.StaleToken, match="does not hold lock 'g2' any more"):
            guard.put("data/2", "nobody holds", lease=stale)
        with client.lock("g2", ttl=TTL) as lease:
            guard.put("data/2", "new", lease=lease)
            assert stale.held

            with pytest.raises(lockkit.StaleToken, match=rf"token {lease.token} .*{stale.token}"):
                guard.put("data/2", "stale", lease=stale)
            with pytest.raises(lockkit.StaleToken):
                guard.delete("data/2", lease=stale)
            with pytest.raises(lockkit.StaleToken):
                guard.check(lease=stale)

            assert value_at(client, "data/2") == b"new"
            with pytest.raises(lockkit.LockLost):
                stale.release()

    def test_released_lease_is_refused(self, client: Client) -> None:
        """It holds no lock."""
        guard = fencing.EtcdGuard(client)
        with client.lock("g3", ttl=TTL) as lease:
            key, revision = guard.condition(lease)
            assert key.startswith(b"lockkit/g3/")
            assert revision == lease.token

        with pytest.raises(lockkit.StaleToken):
            guard.put("data/3", "late", lease=lease)

    def test_extended_lease_is_accepted(self, client: Client) -> None:
        """The same key is then attached to another etcd lease."""
        with client.lock("g4", ttl=TTL) as lease:
            lease.extend(TTL * 2)
            fencing.EtcdGuard(client).put("data/4", "x", lease=lease)

    def test_asyncio_guard_does_the_same(self, server: EtcdServer) -> None:
        """Both through a client that was made before any event loop ran, and through a channel."""
        client = lockkit.aio.connect(server.url)
        guard = fencing.AsyncEtcdGuard(client)

        async def scenario() -> None:
            async with client:
                stale = await client.lock("g5", ttl=TTL, renew=False).acquire()
                await guard.put("data/5", "x", lease=stale)
                await guard.check(lease=stale)
                assert await guard.delete("data/5", lease=stale)
                await client.break_lock("g5")
                with pytest.raises(lockkit.StaleToken):
                    await guard.put("data/5", "y", lease=stale)
                async with grpc.aio.insecure_channel(server.address) as channel:
                    with pytest.raises(lockkit.StaleToken):
                        await fencing.AsyncEtcdGuard(channel).put("data/5", "y", lease=stale)

        asyncio.run(scenario())

    def test_what_is_no_lease_or_no_etcd_is_refused(self, client: Client) -> None:
        """At the call that passes it."""
        guard = fencing.EtcdGuard(client)
        with lockkit.connect("memory://guard") as memory, memory.lock("x") as lease:
            for wrong in (lease, 5, None):
                with pytest.raises(lockkit.ConfigurationError, match="lock on etcd"):
                    guard.put("data", "x", lease=wrong)  # type: ignore[arg-type]
            with pytest.raises(lockkit.ConfigurationError, match="open client of etcd"):
                fencing.EtcdGuard(memory)
        for nothing in (object(), None, "etcd://h"):
            with pytest.raises(lockkit.ConfigurationError, match="gRPC channel"):
                fencing.EtcdGuard(nothing)
        with pytest.raises(lockkit.ConfigurationError, match=r"must be a lockkit\.Client, not a lockkit\.aio\.Client"):
            fencing.EtcdGuard(lockkit.aio.connect("etcd://localhost"))
        with client.lock("g6", ttl=TTL) as held:
            for key in ("", 5):
                with pytest.raises(lockkit.ConfigurationError, match="key must be"):
                    guard.put(key, "x", lease=held)  # type: ignore[arg-type]

    def test_error_says_that_the_answer_was_lost(self, server: EtcdServer, client: Client) -> None:
        """The write may have been made, so it is not sent again."""
        with FaultProxy(server.host, server.port) as proxy, lockkit.connect(f"etcd://{proxy.address}") as behind:
            guard = fencing.EtcdGuard(behind)
            with client.lock("g7", ttl=TTL) as lease:
                guard.check(lease=lease)
                dropped = proxy.drop_next_reply(match=b"data/7", until=http2_call_ended)

                with pytest.raises(lockkit.BackendUnavailable, match="may have been made or not"):
                    guard.put("data/7", "x", lease=lease)

                assert dropped.wait(PATIENCE)


class TestReaders:
    """Leases that are held beside others, or that were downgraded."""

    def test_reader_changes_nothing(self, client: Client) -> None:
        """But can be checked, and compared in a transaction of the application."""
        guard = fencing.EtcdGuard(client)
        with client.rwlock("r1", ttl=TTL).read().acquire(PATIENCE) as lease:
            guard.check(lease=lease, shared=True)
            assert guard.condition(lease, shared=True)[1] == lease.token
            for refused in (
                lambda: guard.put("data/r1", "x", lease=lease),
                lambda: guard.delete("data/r1", lease=lease),
                lambda: guard.check(lease=lease),
                lambda: guard.condition(lease),
            ):
                with pytest.raises(lockkit.StaleToken, match="only for reading"):
                    refused()

        with pytest.raises(lockkit.StaleToken, match="does not hold lock 'r1'"):
            guard.check(lease=lease, shared=True)
        assert value_at(client, "data/r1") is None

    def test_downgraded_lease_reads_only(self, client: Client) -> None:
        """From the moment at which etcd knows it, even if the client does not know that yet."""
        guard = fencing.EtcdGuard(client)
        lease = client.rwlock("r2", ttl=TTL).write().acquire(PATIENCE)
        guard.put("data/r2", "written", lease=lease)
        key, _ = guard.condition(lease)
        optimistic.update_key(client, key, lambda value: b"\0shared " + (value or b""))
        with pytest.raises(lockkit.StaleToken, match="only for reading"):
            guard.put("data/r2", "late", lease=lease)

        lease.downgrade()

        guard.check(lease=lease, shared=True)
        with pytest.raises(lockkit.StaleToken, match="only for reading"):
            guard.put("data/r2", "late", lease=lease)
        assert value_at(client, "data/r2") == b"written"
        lease.release()

    def test_each_permit_writes_while_it_is_held(self, client: Client) -> None:
        """A newer one beside it does not shut it out."""
        guard = fencing.EtcdGuard(client)
        semaphore = client.semaphore("r3", limit=2, ttl=TTL)
        first, second = semaphore.acquire(PATIENCE), semaphore.acquire(PATIENCE)
        for permit in (second, first):
            guard.put("data/r3", str(permit.slot), lease=permit)
        first.release()

        with pytest.raises(lockkit.StaleToken, match="does not hold"):
            guard.put("data/r3", "late", lease=first)

        guard.check(lease=second)
        second.release()


@pytest.fixture(scope="module")
def clients(server: EtcdServer) -> Iterator[list[Client]]:
    """Holders of their own, and one that breaks locks."""
    with ExitStack() as stack:
        yield [stack.enter_context(lockkit.connect(server.url)) for _ in range(4)]


class History:
    """Holders of one lock, in any order; and what each of them should be allowed to do."""

    def __init__(self, clients: list[Client], name: str) -> None:
        """Begin with a free lock."""
        *self.clients, self.breaker = clients
        self.name = name
        self.guard = fencing.EtcdGuard(self.breaker)
        self.marks = fencing.TokenGuard()
        self.leases: dict[int, Lease] = {}
        self.known: list[Lease] = []
        self.holding: dict[int, Lease] = {}

    def acquire(self, number: int) -> None:
        """A client tries to read (even numbers) or to write, unless it has a lease."""
        who, shared = number // 2 % len(self.clients), number % 2 == 0
        if who in self.leases:
            return
        rwlock = self.clients[who].rwlock(self.name, ttl=TTL, renew=False)
        lease = tried(rwlock.read() if shared else rwlock.write())
        assert (lease is not None) == all(shared and one.mode == "shared" for one in self.holding.values())
        if lease is not None:
            self.leases[who] = self.holding[lease.token] = lease
            self.known.append(lease)

    def downgrade(self, _: int) -> None:
        """The writer becomes a reader."""
        for lease in self.holding.values():
            if lease.mode == "exclusive":
                lease.downgrade()

    def release(self, number: int) -> None:
        """A client releases its lease, which it may have lost."""
        lease = self.leases.pop(number % len(self.clients), None)
        if lease is not None:
            with suppress(lockkit.LockLost):
                lease.release()
            self.holding.pop(lease.token, None)

    def break_lock(self, _: int) -> None:
        """All lose it, and none of them knows."""
        assert self.breaker.break_lock(self.name) == bool(self.holding)
        self.holding.clear()

    def put(self, number: int) -> None:
        """Change data under any lease that there ever was."""
        if self.known:
            lease = self.known[number % len(self.known)]
            with self.expecting(lease, lease.token in self.holding and lease.mode == "exclusive"):
                self.guard.put("data/history", self.name, lease=lease)
                self.marks.accept(lease.token)

    def check(self, number: int) -> None:
        """Look at any lease that there ever was."""
        if self.known:
            lease = self.known[number % len(self.known)]
            shared = lease.mode == "shared"
            with self.expecting(lease, lease.token in self.holding):
                self.guard.check(lease=lease, shared=shared)
                self.marks.accept(lease.token, shared=shared)

    @contextmanager
    def expecting(self, lease: Lease, allowed: bool) -> Iterator[None]:  # noqa: FBT001 - a value, not a switch
        """Fail unless the block does what is allowed, and refuses what is not."""
        if allowed:
            yield
            return
        with pytest.raises(lockkit.StaleToken, match=f"{lease.token}"):
            yield


Step: TypeAlias = "Callable[[History, int], None]"
SELDOM: list[Step] = [History.downgrade, History.release, History.break_lock]
STEPS: list[Step] = [*[History.acquire] * 3, *[History.put, History.check] * 3, *SELDOM]
RUNS = count(1)


@settings(max_examples=150)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), min_size=8, max_size=25))
def test_history_of_holders_breaks_no_mark(clients: list[Client], steps: list[tuple[Step, int]]) -> None:
    """
    The guard accepts what the present holders may do and nothing else, whichever lease comes late.

    So it accepts nothing that the two marks of `TokenGuard` would refuse.
    """
    history = History(clients, f"history {next(RUNS)}")
    for step, number in steps:
        step(history, number)
    for number in range(len(clients)):
        history.release(number)


class TestUpdate:
    """`update_key` and `update_key_async`: what is etcd's own. For all stores, see `tests.storage.test_updates`."""

    def test_key_keeps_its_etcd_lease(self, server: EtcdServer, client: Client) -> None:
        """The key ends with the etcd lease, as before the update."""
        lease = int(server.call("/v3/lease/grant", TTL=600)["ID"])
        server.call("/v3/kv/put", key="bGVhc2Vk", value="YQ==", lease=str(lease))

        optimistic.update_key(client, "leased", lambda now: (now or b"") + b"b")

        assert value_at(client, "leased") == b"ab"
        server.call("/v3/lease/revoke", ID=str(lease))
        assert value_at(client, "leased") is None

    def test_updates_on_a_channel_leave_nothing(self, server: EtcdServer) -> None:
        """Each call uses the application's channel, which may go when the application drops it."""

        async def scenario() -> tuple[int, weakref.ref[grpc.aio.Channel]]:
            before = len(etcd_cluster._aio_channels)
            channel = grpc.aio.insecure_channel(server.address)
            for _ in range(20):
                await optimistic.update_key_async(channel, "left", lambda _: "x")
            await channel.close()
            return len(etcd_cluster._aio_channels) - before, weakref.ref(channel)

        left, channel = asyncio.run(scenario())
        gc.collect()

        assert left <= 1
        assert channel() is None
