"""Locks on ZooKeeper while the world behaves badly: servers are killed and stopped, connections cut, sessions ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.protocol.states import KazooState

import lockkit
import lockkit.aio
from lockkit.backend import Grant, Request
from lockkit.backends.zookeeper.path import BROKEN_MAX, says_broken, with_broken
from lockkit.backends.zookeeper.quirks import create_and_list
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, ZooKeeperEnsemble, ZooKeeperServer, require, wait_until
from tests.backends.support import broken_reason
from tests.backends.zookeeper.support import (
    PATIENCE,
    Connect,
    Tree,
    Waiters,
    backend_of,
    end_session,
    holding,
    kazoo_client,
    packets_count,
    sessions_of,
    watches_count,
)
from tests.tries import busy, until_renewed

pytestmark = pytest.mark.timeout(240)

TTL = 3.0
LONG = 60.0
LONGEST = 120.0


@pytest.fixture(scope="module")
def ensemble() -> Iterator[ZooKeeperEnsemble]:
    """Three servers. A test that stops one starts it again."""
    require("zookeeper-ensemble", local=True)
    with ZooKeeperEnsemble() as running:
        yield running


def through(proxy: FaultProxy) -> str:
    """The URL that leads through a proxy."""
    return f"zookeeper://{proxy.address}"


class TestLostAnswers:
    """The server carried out a request, and the client cannot know."""

    def test_creation_that_arrives_late_is_removed(
        self, server: ZooKeeperServer, tree: Tree, proxy: FaultProxy, connect: Connect
    ) -> None:
        """It was given up while the network kept it; then the network delivers it."""
        client, other = connect(through(proxy)), connect(server.url)
        with client.lock("late", ttl=TTL):
            pass  # the session is there, and the directory
        proxy.blackhole()

        with pytest.raises(lockkit.BackendUnavailable):
            client.lock("late", ttl=TTL).acquire(timeout=0.5)
        proxy.heal()

        with other.lock("late", ttl=LONG, timeout=PATIENCE):
            pass
        tree.until_empty("/lockkit/late")

    def test_grant_that_the_caller_does_not_take_is_given_back(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """The answer came too late to be believed, or Ctrl-C struck just after it."""
        client = connect(server.url)
        backend, runtime = backend_of(client), client._engine.client.runtime
        request = Request("too-late", runtime.owner(), LONG, "{}", queue=False, runtime=runtime)
        client.ping()
        assert isinstance(drive(backend.try_acquire(request)), Grant)
        assert tree.nodes("/lockkit/too-late")

        drive(backend.abandon(request))

        assert tree.nodes("/lockkit/too-late") == []

    @pytest.mark.parametrize("outage", [False, True], ids=["at once", "after an outage"])
    def test_creation_that_goes_to_the_next_session_is_removed(
        self,
        server: ZooKeeperServer,
        tree: Tree,
        proxy: FaultProxy,
        connect: Connect,
        monkeypatch: pytest.MonkeyPatch,
        *,
        outage: bool,
    ) -> None:
        """
        The session ends just before the request is handed over, and kazoo sends it in the next one.

        kazoo keeps that session alive, and with it the node, for as long as the client lives.
        """
        client, other = connect(through(proxy)), connect(server.url)
        client.lock("next", ttl=LONG).acquire(PATIENCE).release()
        (session,) = sessions_of(client)
        former, ended = session.id, threading.Event()

        def listen(state: str) -> None:
            if state == KazooState.LOST:
                if outage:
                    proxy.refuse()
                ended.set()

        def create(*arguments: Any) -> list[Any]:
            monkeypatch.undo()
            session.client.add_listener(listen)
            end_session(server, client)
            assert ended.wait(PATIENCE)
            if not outage:
                wait_until(lambda: None if session.id not in {0, former} else "no next session", timeout=PATIENCE)
            return create_and_list(*arguments)

        monkeypatch.setattr("lockkit.backends.zookeeper.queue.create_and_list", create)
        with pytest.raises(lockkit.BackendUnavailable):
            client.lock("next", ttl=LONG).acquire(timeout=0 if outage else 0.001)
        assert ended.is_set()
        proxy.heal()

        with other.lock("next", ttl=LONG, timeout=PATIENCE):
            client.lock("connected", ttl=LONG).acquire(PATIENCE).release()
        tree.until_empty("/lockkit/next")

    def test_lease_released_in_vain_is_removed_when_the_server_is_back(
        self, tree: Tree, proxy: FaultProxy, connect: Connect
    ) -> None:
        """The session is kept alive through the outage, so nothing else would free the lock."""
        client = connect(through(proxy))
        with client.lock("in-vain", ttl=LONG):
            proxy.refuse()
            proxy.cut()
        assert tree.nodes("/lockkit/in-vain")

        proxy.heal()

        tree.until_empty("/lockkit/in-vain", within=LONG / 2)


class TestSessions:
    """What ends with a session, and what survives a connection."""

    def test_expired_session_is_told_at_once_and_the_next_one_is_fresh(
        self, server: ZooKeeperServer, connect: Connect
    ) -> None:
        """The server ends the session long before the deadline; the holder is notified at once."""
        client, other = connect(server.url), connect(server.url)
        reasons: list[str] = []
        told = threading.Event()

        def on_lost(_: object, reason: str) -> None:
            reasons.append(reason)
            told.set()

        lease = client.lock("expired", ttl=LONG, renew=False, on_lost=on_lost).acquire(PATIENCE)

        end_session(server, client)

        assert told.wait(PATIENCE)
        assert reasons == ["session"]
        with other.lock("expired", ttl=LONG, timeout=PATIENCE) as after:
            assert after.token > lease.token
        with pytest.raises(lockkit.LockLost):
            lease.release()
        client.lock("expired", ttl=LONG).acquire(timeout=PATIENCE).release()

    def test_waiter_whose_session_expired_stands_in_line_again(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """Its node is gone with the session; it gets another one, and then the lock."""
        holder, waiter = connect(server.url), connect(server.url)
        waiters = Waiters(tree, "/lockkit/again")
        with holder.lock("again", ttl=LONG):
            waiters.add(waiter, "again", LONG, 1)
            before = tree.nodes("/lockkit/again")

            end_session(server, waiter)

            wait_until(lambda: None if changed(before, tree) else "the waiter has not come back", timeout=PATIENCE)
        assert waiters.end() == [0]

    def test_waiter_whose_node_an_operator_deletes_stands_in_line_again(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """It finds out when it is woken, and does not take the lock without a node."""
        holder, waiter = connect(server.url), connect(server.url)
        waiters = Waiters(tree, "/lockkit/removed")
        with holder.lock("removed", ttl=LONG):
            (held,) = tree.nodes("/lockkit/removed")
            waiters.add(waiter, "removed", LONG, 1)
            (place,) = set(tree.nodes("/lockkit/removed")) - {held}
            tree.client.delete(f"/lockkit/removed/{place}")

        assert waiters.end() == [0]
        tree.until_empty("/lockkit/removed")

    def test_node_that_an_operator_deletes_is_a_lost_lease(self, server: ZooKeeperServer, connect: Connect) -> None:
        """The first renewal detects it at the latest; after that it is detected at once."""
        client = connect(server.url)
        lease = client.lock("deleted", ttl=TTL).acquire(PATIENCE)

        with kazoo_client(server.address) as operator:
            operator.delete("/lockkit/deleted", recursive=True)

        assert lease.wait_lost(PATIENCE)
        assert lease.remaining() == 0
        client.lock("deleted", ttl=TTL).acquire(timeout=PATIENCE).release()

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

    @pytest.mark.parametrize("how", ["broken", "deleted"])
    @pytest.mark.parametrize("renewed", [True, False], ids=["watched", "not watched yet"])
    def test_holder_gets_the_reason(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect, how: str, *, renewed: bool
    ) -> None:
        """Whether the server reports it, or the first renewal finds out. What others delete is gone."""
        client, name = connect(server.url), f"reason {how} {renewed}"
        lease = client.lock(name, ttl=LONG).acquire(PATIENCE)
        told: list[str] = []
        lease.on_lost(lambda _, reason: told.append(reason))
        if renewed:
            lease.extend()

        if how == "broken":
            assert connect(server.url).break_lock(name)
        else:
            (node,) = tree.nodes(f"/lockkit/{name}")
            tree.client.delete(f"/lockkit/{name}/{node}")
        client._engine.confirm_soon()

        reason = "broken" if how == "broken" else "gone"
        wait_until(lambda: None if told == [reason] else f"reasons: {told}", timeout=PATIENCE)
        if how == "broken":
            assert asyncio.run(broken_reason(server.url, f"{name} async", renewed=renewed)) == "broken"

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

    def test_broken_leases_leave_no_watch(self, server: ZooKeeperServer, connect: Connect) -> None:
        """Neither at the server nor in kazoo, also if they are broken before the server was asked to watch them."""
        client, other = connect(server.url), connect(server.url)
        before = watches_count(server)
        for number in range(20):
            lease = client.lock(f"leak {number}", ttl=LONG).acquire(PATIENCE)
            if number % 2:
                lease.extend()
            assert other.break_lock(f"leak {number}")
            client._engine.confirm_soon()
            assert lease.wait_lost(PATIENCE)

        (session,) = sessions_of(client)
        assert watches_count(server) <= before
        assert not any(session.client._data_watchers.values())
        assert session.watches._leases == {}

    def test_places_in_line_survive_fifty_reconnects(
        self, tree: Tree, proxy: FaultProxy, server: ZooKeeperServer, connect: Connect
    ) -> None:
        """Twenty waiters keep their order, and the holder its lock."""
        holder = connect(server.url)
        waiters = Waiters(tree, "/lockkit/storm", timeout=LONGEST)

        def away() -> str | None:
            return None if proxy.counts.open == 20 else "a waiter is away"

        def unwatched() -> str | None:
            found = watches_count(server)
            return None if found == 21 else f"{found} nodes are watched"

        # Longer than all this takes: a waiter asks again after its ttl, and one that is cut off then begins anew.
        with holder.lock("storm", ttl=LONGEST) as lease:
            for _ in range(20):
                waiters.add(connect(through(proxy)), "storm", LONGEST, 1)
            nodes = tree.nodes("/lockkit/storm")
            wait_until(unwatched, timeout=PATIENCE)

            settled_at = time.monotonic()
            for _ in range(50):
                proxy.cut()
                wait_until(away, timeout=PATIENCE)
                # One who has no answer for five seconds begins anew: on a busy machine that might be several cuts.
                if time.monotonic() > settled_at + 0.5:
                    wait_until(unwatched, timeout=PATIENCE)
                    settled_at = time.monotonic()

            assert lease.confirm()
            assert tree.nodes("/lockkit/storm") == nodes
        assert waiters.end() == [*range(20)]
        tree.until_empty("/lockkit/storm")


class TestCrowds:
    """How many requests the server gets, as it counts them."""

    def test_release_wakes_one_waiter(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """No herd: a hand-over takes a few requests, however long the queue is."""
        clients = [connect(server.url) for _ in range(20)]
        waiters = Waiters(tree, "/lockkit/herd")
        entered, leave = threading.Event(), threading.Event()

        def second() -> None:
            with clients[1].lock("herd", ttl=LONG, timeout=PATIENCE):
                entered.set()
                leave.wait(PATIENCE)

        first = clients[0].lock("herd", ttl=LONG).acquire(PATIENCE)
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        tree.until_waiting("/lockkit/herd", 2)
        for client in clients[2:]:
            waiters.add(client, "herd", LONG, 2)
        before = packets_count(server)

        first.release()
        assert entered.wait(PATIENCE)
        asked = packets_count(server) - before

        # delete; get_children of the one that was woken, after a long wait with sync. Room for a heartbeat; 18 others
        # would ask 36 times.
        assert 2 <= asked <= 8
        leave.set()
        thread.join(PATIENCE)
        assert waiters.end() == [*range(18)]

    @pytest.mark.parametrize(
        ("share", "ttl", "waited", "expected"),
        [(0.9, LONG, 0.0, 2), (0.0, LONG, 0.0, 3), (0.9, 3600.0, 130.0, 3)],
        ids=["short wait", "long wait", "long for the session, not for the ttl"],
    )
    def test_requests_of_a_hand_off(
        self,
        server: ZooKeeperServer,
        connect: Connect,
        monkeypatch: pytest.MonkeyPatch,
        *,
        share: float,
        ttl: float,
        waited: float,
        expected: int,
    ) -> None:
        """The holder's delete, and one listing of the queue by the waiter; after a long wait it asks the leader too."""
        monkeypatch.setattr("lockkit.backends.zookeeper.session.RECENT_SHARE", share)
        holder, waiter = connect(server.url), connect(server.url)
        counts = []
        for _ in range(3):  # a heartbeat may fall into one
            entered, leave = threading.Event(), threading.Event()

            def wait(entered: threading.Event = entered, leave: threading.Event = leave) -> None:
                with waiter.lock("hand-off", ttl=ttl, timeout=PATIENCE) as lease:
                    assert lease.remaining() > 0
                    entered.set()
                    leave.wait(PATIENCE)

            lease = holder.lock("hand-off", ttl=LONG).acquire(PATIENCE)
            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            wait_until(
                lambda: None if "/hand-off/" in server.four_letters("wchp") else "nothing is watched", timeout=PATIENCE
            )
            for session in sessions_of(waiter):
                session._leader_answered -= waited
            before = packets_count(server)
            lease.release()
            assert entered.wait(PATIENCE)
            counts.append(packets_count(server) - before - 1)  # the question before
            leave.set()
            thread.join(PATIENCE)

        assert min(counts) == expected

    def test_renewals_of_many_leases_are_one_request(self, server: ZooKeeperServer, connect: Connect) -> None:
        """
        The server reports when a node goes away, so one heartbeat of their session serves all that are due.

        They were acquired one after the other and are due in some batches; asked for one by one it would be 100.
        """
        client = connect(server.url)
        with holding(client.lock(f"many-{number}", ttl=9) for number in range(100)) as leases:
            until_renewed(*leases)
            before = packets_count(server)

            until_renewed(*leases)

            assert packets_count(server) - before <= 50

    def test_a_hundred_idle_waiters_ask_nothing(self, server: ZooKeeperServer, tree: Tree) -> None:
        """In five seconds there is no request at all: the first heartbeat of a session is due after forty."""

        async def wait(client: lockkit.aio.Client) -> None:
            async with client.lock("idle", ttl=LONGEST):
                pass

        async def scenario() -> int:
            clients = [lockkit.aio.connect(server.url) for _ in range(101)]
            lease = await clients[0].lock("idle", ttl=LONGEST, renew=False).acquire(PATIENCE)
            waiting = [asyncio.create_task(wait(client)) for client in clients[1:]]
            await asyncio.to_thread(tree.until_waiting, "/lockkit/idle", 101)
            asked = 101
            for _ in range(3):  # the first time, on a busy machine, the last ones set their watches
                before = await asyncio.to_thread(packets_count, server)
                await asyncio.sleep(5)
                asked = await asyncio.to_thread(packets_count, server) - before
                if asked <= 5:
                    break
            await lease.release()
            await asyncio.gather(*waiting)
            await asyncio.gather(*(client.close() for client in clients))
            return asked

        assert asyncio.run(scenario()) <= 5  # of the client that looks at the tree


class TestEnsemble:
    """Three servers."""

    def test_leases_and_places_survive_the_death_of_the_leader(
        self, ensemble: ZooKeeperEnsemble, connect: Connect
    ) -> None:
        """The sessions move to the members that are left; tokens keep increasing."""
        client, other = connect(ensemble.url), connect(ensemble.url)
        lease = client.lock("election", ttl=40).acquire(PATIENCE)
        entered: list[int] = []
        thread = threading.Thread(target=lambda: enter(other, "election", entered), daemon=True)
        thread.start()
        old = ensemble.leader

        old.kill()
        try:
            wait_until(lambda: None if holds(lease) else "nobody confirms", timeout=PATIENCE)
            assert not entered
            lease.release()
            thread.join(PATIENCE)
            assert entered[0] > lease.token
        finally:
            old.start()

    def test_without_a_majority_nobody_is_granted_a_lock(self, ensemble: ZooKeeperEnsemble, connect: Connect) -> None:
        """A bounded, clear error; the holder is notified by its deadline; afterwards everything works again."""
        client, other = connect(ensemble.url), connect(ensemble.url)
        lease = client.lock("majority", ttl=TTL).acquire(PATIENCE)
        for member in ensemble.members[:2]:
            member.kill()
        try:
            began = time.monotonic()
            with pytest.raises(lockkit.BackendUnavailable, match="majority"):
                other.lock("majority", ttl=TTL).acquire(timeout=2)
            assert time.monotonic() - began < 20
            assert lease.wait_lost(PATIENCE)
        finally:
            ensemble.start()

        with other.lock("majority", ttl=TTL, timeout=PATIENCE) as after:
            assert after.token > lease.token

    def test_member_that_hangs_costs_no_lease(self, ensemble: ZooKeeperEnsemble, connect: Connect) -> None:
        """Its clients leave it after the first question that it does not answer; a new client gets past it, too."""
        follower, *_ = ensemble.followers
        hosts = sorted((member.address for member in ensemble.members), key=lambda address: address != follower.address)
        client, later = (connect(f"zookeeper://{','.join(hosts)}", randomize_hosts=False) for _ in range(2))
        lease = client.lock("hangs", ttl=40).acquire(PATIENCE)

        follower.pause()
        try:
            later.ping()
            client.lock("another", ttl=20).acquire(timeout=PATIENCE).release()
            assert lease.confirm()
            lease.release()
        finally:
            follower.resume()

    def test_readers_and_permits_outlive_a_member_that_is_restarted(
        self, ensemble: ZooKeeperEnsemble, connect: Connect
    ) -> None:
        """Those that were connected to it move on; a writer waits for all of them, whatever moved."""
        clients = [connect(f"zookeeper://{member.address}") for member in ensemble.members]
        clients = [*clients, *(connect(ensemble.url) for _ in range(3))]
        readers = [client.rwlock("restart", ttl=40).read().acquire(PATIENCE) for client in clients]
        permits = [client.semaphore("restart", limit=6, ttl=40).acquire(PATIENCE) for client in clients]
        follower, *_ = ensemble.followers

        follower.kill()
        follower.start()
        for lease in (*readers, *permits):
            wait_until(lambda lease=lease: None if holds(lease) else "nobody confirms", timeout=PATIENCE)  # type: ignore[misc]

        assert len({permit.slot for permit in permits}) == 6
        assert clients[-1].semaphore("restart", limit=7, ttl=20).available() == 1
        writer = connect(ensemble.url)
        assert busy(writer.lock("restart", ttl=20))
        entered: list[int] = []
        thread = threading.Thread(target=lambda: enter(writer, "restart", entered), daemon=True)
        thread.start()
        for lease in readers:
            assert not entered
            lease.release()
        thread.join(PATIENCE)
        assert entered[0] > max(lease.token for lease in readers)
        for lease in permits:
            lease.release()


class TestShared:
    """Leases beside one another: each ends by itself."""

    def test_client_that_loses_its_session_loses_all_its_readers(
        self, server: ZooKeeperServer, connect: Connect
    ) -> None:
        """At once, also the one that was downgraded; the readers of others go on, and new ones get in beside them."""
        client, other = connect(server.url), connect(server.url)
        told: list[str] = []
        all_told = threading.Semaphore(0)

        def on_lost(_: object, reason: str) -> None:
            told.append(reason)
            all_told.release()

        def options() -> dict[str, Any]:
            return {"ttl": LONG, "renew": False, "on_lost": on_lost}

        leases = [client.lock("several", **options()).acquire(PATIENCE)]
        leases[0].downgrade()
        leases += [read_in_a_thread(client, "several", **options()) for _ in range(3)]
        living = other.rwlock("several", ttl=LONG).read().acquire(PATIENCE)
        leases.append(client.semaphore("several", limit=2, **options()).acquire(PATIENCE))

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

    def test_readers_and_permits_that_wait_keep_their_places_over_reconnects(
        self, server: ZooKeeperServer, tree: Tree, proxy: FaultProxy, connect: Connect
    ) -> None:
        """Also what they watch: a release after the reconnects wakes them."""
        client, other = connect(through(proxy)), connect(server.url)
        lease = other.lock("places", ttl=LONG).acquire(PATIENCE)
        permits = [other.semaphore("places", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
        got: list[lockkit.Lease] = []
        calls = [
            lambda: got.append(client.rwlock("places", ttl=LONGEST).read().acquire()),
            lambda: got.append(client.rwlock("places", ttl=LONGEST).read().acquire()),
            lambda: got.append(client.semaphore("places", limit=2, ttl=LONGEST).acquire()),
        ]
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        tree.until_waiting("/lockkit/places", 3)
        tree.until_waiting("/lockkit+sem/places", 4)
        nodes = tree.nodes("/lockkit/places") + tree.nodes("/lockkit+sem/places")

        for _ in range(5):
            proxy.cut()
            wait_until(lambda: None if proxy.counts.open else "the waiters are away", timeout=PATIENCE)

        assert not got
        assert tree.nodes("/lockkit/places") + tree.nodes("/lockkit+sem/places") == nodes
        lease.release()
        permits[1].release()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(str(one.slot) for one in got) == ["1", "None", "None"]
        for one in (*got, permits[0]):
            one.release()


def read_in_a_thread(client: Client, name: str, **options: Any) -> lockkit.Lease:
    """Read in another thread: in the same one it would be the same lease."""
    got: list[lockkit.Lease] = []
    thread = threading.Thread(target=lambda: got.append(client.rwlock(name, **options).read().acquire(PATIENCE)))
    thread.start()
    thread.join(PATIENCE)
    return got[0]


def changed(before: list[str], tree: Tree) -> bool:
    """Whether the waiter's node is a new one."""
    after = tree.nodes("/lockkit/again")
    return len(after) == 2 and set(after) != set(before)


def enter(client: Client, name: str, tokens: list[int]) -> None:
    """Wait for a lock, and take down its token."""
    with client.lock(name, ttl=20, timeout=PATIENCE) as lease:
        tokens.append(lease.token)


def holds(lease: lockkit.Lease) -> bool:
    """Ask through an election."""
    try:
        return lease.confirm()
    except lockkit.BackendUnavailable:
        return False
