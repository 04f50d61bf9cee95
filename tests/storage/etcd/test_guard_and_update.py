"""Guards and optimistic updates of data in etcd, with both APIs, on a real server."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

import lockkit
import lockkit.aio
from lockkit import fencing, optimistic
from lockkit.testing.servers import EtcdServer, FaultProxy, http2_call_ended, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.sync import Client

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
            with pytest.raises(lockkit.ConfigurationError, match="no etcd"):
                fencing.EtcdGuard(memory)
        for nothing in (object(), None, "etcd://h"):
            with pytest.raises(lockkit.ConfigurationError, match="gRPC channel"):
                fencing.EtcdGuard(nothing)
        with pytest.raises(lockkit.ConfigurationError, match=r"not a lockkit\.aio\.Client"):
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


class TestUpdate:
    """`update_key` and `update_key_async`."""

    def test_no_change_is_lost_among_threads(self, client: Client) -> None:
        """Each thread increments a counter."""

        def count_up() -> None:
            for _ in range(20):
                optimistic.update_key(client, "count", lambda now: str(int(now or 0) + 1), attempts=None, timeout=60)

        threads = [threading.Thread(target=count_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)

        assert value_at(client, "count") == b"80"

    def test_change_in_between_means_another_try(self, client: Client) -> None:
        """With the new value; `attempts` ends it."""
        seen: list[bytes | None] = []

        def slow(now: bytes | None) -> str:
            seen.append(now)
            if len(seen) == 1:
                optimistic.update_key(client, "slow", lambda _: "other")
            return "mine"

        assert optimistic.update_key(client, "slow", slow) == "mine"
        assert seen == [None, b"other"]

        def always(now: bytes | None) -> bytes:
            optimistic.update_key(client, "slow", lambda _: (now or b"") + b"!")
            return b"never"

        with pytest.raises(lockkit.LockTimeout, match="others were quicker in all of 3 tries"):
            optimistic.update_key(client, "slow", always, attempts=3)

    def test_delete_and_nothing(self, client: Client) -> None:
        """DELETE removes, None leaves, an exception changes nothing."""
        optimistic.update_key(client, "gone", lambda _: "x")
        assert optimistic.update_key(client, "gone", lambda _: None) is None
        assert value_at(client, "gone") == b"x"
        with pytest.raises(ZeroDivisionError):
            optimistic.update_key(client, "gone", lambda _: str(1 // 0))

        assert optimistic.update_key(client, "gone", lambda _: optimistic.DELETE) is optimistic.DELETE

        assert value_at(client, "gone") is None
        for wrong in (5, object(), True):
            with pytest.raises(lockkit.ConfigurationError, match="fn returned"):
                optimistic.update_key(client, "gone", lambda _, wrong=wrong: wrong)  # type: ignore[misc]

    def test_key_keeps_its_etcd_lease(self, server: EtcdServer, client: Client) -> None:
        """The key ends with the etcd lease, as before the update."""
        lease = int(server.call("/v3/lease/grant", TTL=600)["ID"])
        server.call("/v3/kv/put", key="bGVhc2Vk", value="YQ==", lease=str(lease))

        optimistic.update_key(client, "leased", lambda now: (now or b"") + b"b")

        assert value_at(client, "leased") == b"ab"
        server.call("/v3/lease/revoke", ID=str(lease))
        assert value_at(client, "leased") is None

    def test_lost_answer_is_not_tried_again(self, server: EtcdServer, client: Client) -> None:
        """A second try could count one order twice."""
        with FaultProxy(server.host, server.port) as proxy, grpc.insecure_channel(proxy.address) as channel:
            optimistic.update_key(channel, "orders", lambda _: "1")

            def count_up(now: bytes | None) -> str:
                proxy.drop_next_reply(match=b"orders", until=http2_call_ended)
                return str(int(now or 0) + 1)

            with pytest.raises(lockkit.BackendUnavailable, match="may have been made or not"):
                optimistic.update_key(channel, "orders", count_up)

        assert value_at(client, "orders") == b"2"

    def test_asyncio_does_the_same(self, server: EtcdServer) -> None:
        """Functions may be coroutine functions."""

        async def scenario() -> None:
            async with lockkit.aio.connect(server.url) as client:

                async def count_up(now: bytes | None) -> str:
                    await asyncio.sleep(0)
                    return str(int(now or 0) + 1)

                await asyncio.gather(
                    *(optimistic.update_key_async(client, "aio", count_up, attempts=None, timeout=60) for _ in range(8))
                )
                assert await optimistic.update_key_async(client, "aio", count_up) == "9"

        asyncio.run(scenario())
