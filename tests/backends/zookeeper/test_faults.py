"""Locks on ZooKeeper when sessions end, nodes are deleted and connections cut; and how many requests that takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.backends.zookeeper.path import BROKEN_MAX, says_broken, with_broken
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit_tools.servers import FaultProxy, ZooKeeperServer, wait_until
from tests.backends.support import Connect, inner, play, says_whether_it_was_sent
from tests.backends.zookeeper.support import (
    PATIENCE,
    Tree,
    end_session,
    holding,
    packets_count,
)
from tests.tries import beside, until_renewed

LONG = 60.0
LONGEST = 120.0


def through(proxy: FaultProxy) -> str:
    """The URL that leads through a proxy."""
    return f"zookeeper://{proxy.address}"


class TestSessions:
    """What ends with a session, and what survives a connection."""

    @pytest.mark.parametrize("how", ["session ended", "node deleted"])
    def test_waiter_that_lost_its_place_stands_in_line_again(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect, how: str
    ) -> None:
        """At once, or when it is woken: it does not take the lock without a node."""
        holder, waiter, path = connect(server.url), connect(server.url), f"/lockkit/{how}"
        with holder.lock(how, ttl=LONG):
            (held,) = tree.nodes(path)
            waiting = beside(waiter.lock(how, ttl=LONG).acquire)
            tree.until_waiting(path, 2)
            (place,) = set(tree.nodes(path)) - {held}
            if how == "session ended":
                end_session(server, waiter)
                wait_until(lambda: None if {*tree.nodes(path)} - {held, place} else "it is not back", timeout=PATIENCE)
            else:
                tree.client.delete(f"{path}/{place}")
        waiting.result(PATIENCE).release()
        tree.until_empty(path)

    def test_watched_node_that_goes_is_told_at_once(
        self, server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """Long before the next renewal is due; also after a reconnect, over which kazoo forgets its watches."""
        client, other = connect(through(proxy)), connect(server.url)
        lease = client.lock("watched", ttl=LONG).acquire(PATIENCE)
        for _ in range(3):
            proxy.cut()
            assert lease.confirm()  # over the next connection
            lease.extend()

        assert other.break_lock("watched")

        assert lease.wait_lost(LONG / 4)

    @pytest.mark.parametrize(("how", "reason"), [("broken", "broken"), ("deleted", "gone")])
    @pytest.mark.parametrize("renewed", [True, False], ids=["watched", "not watched yet"])
    def test_holder_gets_the_reason(
        self, server: ZooKeeperServer, tree: Tree, how: str, reason: str, *, renewed: bool
    ) -> None:
        """Whether the server reports it, or the first renewal finds out. What others delete is gone."""

        async def body(driver: FaceDriver) -> None:
            client, other, name = await driver.connect(), await driver.connect(), driver.name()
            told: list[str] = []
            lock = client.lock(name, ttl=LONG, on_lost=lambda _, reason: told.append(reason), raise_on_lost=False)
            lease = await lock.acquire(PATIENCE)
            if renewed:
                await lease.extend()
            if how == "broken":
                assert await other.break_lock(name)
            else:
                tree.client.delete(f"/lockkit/{name}", recursive=True)
            inner(client)._engine.confirm_soon()
            await driver.eventually(lambda: told == [reason], "the holder gets the reason")

        for face in FACES:
            play(face, server.url, body)

    def test_data_of_a_directory_that_others_made_stay(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """Only lockkit's are replaced, by a bounded number of owners."""
        tree.client.create("/lockkit/foreign", b"not lockkit's", makepath=True)
        client = connect(server.url)
        for _ in range(2):
            lease = client.lock("foreign", ttl=LONG).acquire(PATIENCE)
            assert client.break_lock("foreign")
            assert not lease.confirm()
        assert tree.client.get("/lockkit/foreign")[0] == b"not lockkit's"

        data: bytes | None = b""
        for number in range(BROKEN_MAX + 1):
            data = with_broken(data or b"", [str(number)])
        assert data is not None
        assert says_broken(data, str(BROKEN_MAX))
        assert not says_broken(data, "0")


def test_acquisition_says_whether_it_was_sent(server: ZooKeeperServer) -> None:
    """What was not need not be undone."""
    says_whether_it_was_sent(server)


class TestCrowds:
    """How many requests the server gets, as it counts them."""

    def test_renewals_of_many_leases_are_one_request(self, server: ZooKeeperServer, connect: Connect) -> None:
        """
        The server reports when a node goes away, so one heartbeat of their session serves all that are due.

        They were acquired one after the other and are due in some batches; asked for one by one it would be 100.
        """
        client = connect(server.url)
        with holding(client.lock(f"many-{number}", ttl=9) for number in range(100)) as leases:
            until_renewed(*leases, begin=client._engine.confirm_soon)
            before = packets_count(server)

            until_renewed(*leases, begin=client._engine.confirm_soon)

            assert packets_count(server) - before <= 50


class TestShared:
    """Leases beside one another: each ends by itself."""

    def test_expired_session_is_told_at_once_and_ends_all_its_leases(
        self, server: ZooKeeperServer, connect: Connect
    ) -> None:
        """At once, also the one that was downgraded; the readers of others go on, and new ones get in beside them."""
        client, other = connect(server.url), connect(server.url)
        told: list[str] = []
        all_told = threading.Semaphore(0)

        def on_lost(_: object, reason: str) -> None:
            told.append(reason)
            all_told.release()

        options: dict[str, Any] = {"ttl": LONG, "renew": False, "on_lost": on_lost}
        leases = [client.lock("several", **options).acquire(PATIENCE)]
        leases[0].downgrade()
        # In other threads: in the same one it would be the same lease.
        leases += [beside(client.rwlock("several", **options).read().acquire).result(PATIENCE) for _ in range(3)]
        living = other.rwlock("several", ttl=LONG).read().acquire(PATIENCE)
        leases.append(client.semaphore("several", limit=2, **options).acquire(PATIENCE))

        end_session(server, client)

        for _ in leases:
            assert all_told.acquire(timeout=PATIENCE)
        assert told == ["session"] * 5
        living.check()
        assert [holder.owner for holder in other.holders("several")] == [living.owner]
        again = client.rwlock("several", ttl=LONG).read().acquire(PATIENCE)
        assert again.token > living.token
        for lease in leases:
            with pytest.raises(lockkit.LockLost):
                lease.release()
        for lease in (again, living):
            lease.release()

    def test_those_that_wait_keep_their_places_over_reconnects(
        self, server: ZooKeeperServer, tree: Tree, proxy: FaultProxy, connect: Connect
    ) -> None:
        """Also what they watch: a release after the reconnects wakes them, in their order."""
        client, other = connect(through(proxy)), connect(server.url)
        lease = other.lock("places", ttl=LONG).acquire(PATIENCE)
        permits = [other.semaphore("places", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
        waiting = []
        for number, lock in enumerate(
            (
                client.rwlock("places", ttl=LONGEST).read(),
                client.rwlock("places", ttl=LONGEST).read(),
                client.lock("places", ttl=LONGEST),
                client.semaphore("places", limit=2, ttl=LONGEST),
            )
        ):
            waiting.append(beside(lock.acquire))
            tree.until_waiting("/lockkit/places", min(number, 2) + 2)
        tree.until_waiting("/lockkit+sem/places", 4)
        nodes = tree.nodes("/lockkit/places") + tree.nodes("/lockkit+sem/places")

        for _ in range(5):
            proxy.cut()
            wait_until(lambda: None if proxy.counts.open else "the waiters are away", timeout=PATIENCE)

        assert not any(one.done() for one in waiting)
        assert tree.nodes("/lockkit/places") + tree.nodes("/lockkit+sem/places") == nodes
        lease.release()
        permits.pop().release()
        *readers, writer, permit = waiting
        for reader in readers:
            reader.result(PATIENCE)
        assert not writer.done()
        for one in (*(reader.result(PATIENCE) for reader in readers), permit.result(PATIENCE), permits[0]):
            one.release()
        assert permit.result(PATIENCE).slot == 1
        writer.result(PATIENCE).release()
