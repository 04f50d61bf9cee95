"""Readers beside one another on ZooKeeper, together with kazoo's ``ReadLock``, ``WriteLock`` and ``Lock``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.backend import Request
from lockkit.backends.zookeeper.wakeup import Watches
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, ZooKeeperServer, wait_until
from tests.backends.zookeeper.support import PATIENCE, Connect, Tree, backend_of, holding, kazoo_client, packets_count
from tests.tries import busy, until

LONG = 60.0
WAIT: dict[str, Any] = {"ttl": 3 * PATIENCE, "timeout": 6 * PATIENCE}
"""For waiters that must be woken: lockkit looks again by itself after a ttl, and at the end of the timeout."""


@pytest.fixture
def ours(server: ZooKeeperServer) -> Iterator[Client]:
    """A client of lockkit's."""
    with lockkit.connect(server.url) as client:
        yield client


@pytest.fixture
def theirs(server: ZooKeeperServer) -> Iterator[KazooClient]:
    """A client of kazoo's."""
    with kazoo_client(server.address) as client:
        yield client


class Background:
    """A call in a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        """Start it."""
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(call()), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has returned."""
        return not self._thread.is_alive()

    def result(self) -> Any:  # noqa: ANN401 - whatever it returns
        """Wait for what it returns."""
        self._thread.join(PATIENCE)
        assert self.done
        return self._results[0]


def writer_of(theirs: KazooClient, kind: str, path: str) -> Any:  # noqa: ANN401 - kazoo has no types
    """One of kazoo's exclusive locks that know readers."""
    if kind == "WriteLock":
        return theirs.WriteLock(path)
    return theirs.Lock(path, extra_lock_patterns=["__rlock__"])


def answers(call: Callable[[], object]) -> bool:
    """Tell whether the server answers."""
    try:
        call()
    except lockkit.BackendUnavailable:
        return False
    return True


class TestKazoo:
    """The rules hold between both libraries, in both directions."""

    def test_reader_is_laid_out_as_kazoo_does(self, ours: Client, tree: Tree) -> None:
        """The owner, kazoo's word and ZooKeeper's number; the token is the transaction that created it."""
        with ours.rwlock("layout", ttl=LONG, timeout=PATIENCE).read() as lease:
            (node,) = tree.nodes("/lockkit/layout")
            assert node == f"{lease.owner}__rlock__{node[-10:]}"
            assert tree.client.exists(f"/lockkit/layout/{node}").czxid == lease.token

    def test_readers_of_both_hold_it_together(self, ours: Client, theirs: KazooClient) -> None:
        """A reader of kazoo before and after one of lockkit."""
        reader = ours.rwlock("together", ttl=LONG, timeout=PATIENCE).read()
        first, second = theirs.ReadLock("/lockkit/together", "first"), theirs.ReadLock("/lockkit/together", "second")
        assert first.acquire(timeout=PATIENCE)
        with reader:
            assert second.acquire(timeout=PATIENCE)
            assert [holder.mode for holder in ours.holders("together")] == ["shared"] * 3
            second.release()
        first.release()

    @pytest.mark.parametrize("kind", ["WriteLock", "Lock with a pattern"])
    def test_their_writer_waits_for_our_readers_and_ours_for_it(
        self, ours: Client, theirs: KazooClient, connect: Connect, kind: str
    ) -> None:
        """And stops those that come after it."""
        name = f"writer-{kind[0]}"
        path, reader = f"/lockkit/{name}", connect(ours.url).rwlock(name, **WAIT).read()
        lease = ours.rwlock(name, ttl=LONG).read().acquire(PATIENCE)
        lock = writer_of(theirs, kind, path)
        writing = Background(lambda: lock.acquire(timeout=PATIENCE))
        Tree(theirs).until_waiting(path, 2)
        assert busy(reader)
        reading = Background(reader.acquire)
        Tree(theirs).until_waiting(path, 3)
        assert not writing.done

        lease.release()
        assert writing.result()
        assert not reading.done
        assert lock.release()

        after = reading.result()
        assert after.token > lease.token
        after.release()

    def test_their_reader_waits_for_our_writer_and_ours_for_it(self, ours: Client, theirs: KazooClient) -> None:
        """A waiting writer of lockkit's stops kazoo's readers, too."""
        path, tree = "/lockkit/reader", Tree(theirs)
        lease = ours.lock("reader", ttl=LONG).acquire(PATIENCE)
        lock, late = theirs.ReadLock(path), theirs.ReadLock(path)
        reading = Background(lambda: lock.acquire(timeout=PATIENCE))
        tree.until_waiting(path, 2)
        lease.release()
        assert reading.result()

        writing = Background(ours.lock("reader", **WAIT).acquire)
        tree.until_waiting(path, 2)
        assert not late.acquire(blocking=False)
        assert not writing.done
        lock.release()
        writing.result().release()

    def test_their_plain_lock_knows_no_readers(self, ours: Client, theirs: KazooClient) -> None:
        """
        The limit that the page of this backend describes: kazoo's Lock looks for ``__lock__`` only.

        No name of a node changes that: kazoo's ReadLock looks for the same names in the same way.
        """
        with ours.rwlock("plain", ttl=LONG, timeout=PATIENCE).read():
            assert theirs.Lock("/lockkit/plain").acquire(blocking=False)
            (writer,) = [node for node in Tree(theirs).nodes("/lockkit/plain") if "__lock__" in node]
            theirs.delete(f"/lockkit/plain/{writer}")
        with theirs.Lock("/lockkit/plain"):
            assert busy(ours.rwlock("plain", ttl=LONG).read())

    def test_broken_lock_is_free_of_readers_of_both(self, ours: Client, theirs: KazooClient) -> None:
        """All are removed, and the writer behind them is not."""
        assert theirs.ReadLock("/lockkit/break").acquire(timeout=PATIENCE)
        lease = ours.rwlock("break", ttl=LONG).read().acquire(PATIENCE)
        writing = Background(ours.lock("break", **WAIT).acquire)
        Tree(theirs).until_waiting("/lockkit/break", 3)

        assert ours.break_lock("break")

        written = writing.result()
        assert not lease.confirm()
        assert written.confirm()
        written.release()


class TestDowngrade:
    """A writer that becomes a reader."""

    def test_node_stays_and_gets_a_mark(self, ours: Client, theirs: KazooClient, tree: Tree, connect: Connect) -> None:
        """Readers of lockkit's get in, kazoo's wait, writers of both wait; nothing is left after the release."""
        path, other = "/lockkit/down", connect(ours.url)
        lease = ours.lock("down", ttl=LONG).acquire(PATIENCE)
        token, (node,) = lease.token, tree.nodes(path)
        reading = Background(other.rwlock("down", **WAIT).read().acquire)
        tree.until_waiting(path, 2)

        lease.downgrade()

        beside = reading.result()
        assert {node, f"{node}__read"} < {*tree.nodes(path)}
        assert lease.token == token < beside.token
        assert {(holder.owner, holder.token, holder.mode) for holder in ours.holders("down")} == {
            (one.owner, one.token, "shared") for one in (lease, beside)
        }
        assert busy(other.lock("down", ttl=LONG))
        for theirs_too in (theirs.WriteLock(path), theirs.Lock(path), theirs.ReadLock(path)):
            assert not theirs_too.acquire(blocking=False)
        beside.release()
        lease.extend()
        lease.release()
        tree.until_empty(path)

    def test_metadata_survive_it(self, ours: Client, tree: Tree) -> None:
        """It writes the data of the node, to wake those that watch that."""
        with ours.lock("data", ttl=LONG, timeout=PATIENCE, metadata="first") as lease:
            lease.update("second")
            lease.downgrade()
            assert ours.holders("data")[0].metadata["text"] == "second"
            lease.update("third")
            (holder,) = ours.holders("data")
            assert (holder.mode, holder.metadata["text"]) == ("shared", "third")
        tree.until_empty("/lockkit/data")

    def test_asked_again_after_a_lost_answer_it_is_the_same(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """The server carried it out, and the client cannot know."""
        with FaultProxy(server.host, server.port) as proxy:
            client = connect(f"zookeeper://{proxy.address}")
            lease = client.lock("lost", ttl=LONG).acquire(PATIENCE)
            dropped = proxy.drop_next_reply(match=b"__read")

            with pytest.raises(lockkit.BackendUnavailable):
                lease.downgrade()
            assert dropped.wait(PATIENCE)
            assert len(tree.nodes("/lockkit/lost")) == 2
            lease.downgrade()

            assert lease.mode == "shared"
            assert lease.confirm()
            lease.release()
        tree.until_empty("/lockkit/lost")

    def test_mark_that_never_arrived_is_no_obstacle_to_the_release(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """The request is lost on its way, and the lease is released over the next connection."""
        with FaultProxy(server.host, server.port) as proxy:
            client = connect(f"zookeeper://{proxy.address}")
            lease = client.lock("never", ttl=LONG).acquire(PATIENCE)
            proxy.blackhole()
            with pytest.raises(lockkit.BackendUnavailable):
                lease.downgrade()
            proxy.cut()
            proxy.heal()
            (node,) = tree.nodes("/lockkit/never")
            assert node.startswith(lease.owner)
            until(lambda: answers(lease.confirm))  # else the release could be sent over the connection that was cut

            lease.release()
        tree.until_empty("/lockkit/never")

    def test_broken_lease_is_not_downgraded(self, ours: Client, tree: Tree, connect: Connect) -> None:
        """No mark is left."""
        lease = ours.lock("gone", ttl=LONG).acquire(PATIENCE)
        assert connect(ours.url).break_lock("gone")

        with pytest.raises(lockkit.LockLost):
            lease.downgrade()

        assert tree.nodes("/lockkit/gone") == []

    def test_mark_between_listing_and_watching_is_seen(
        self, ours: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        A reader lists the queue and sees a writer; the writer becomes a reader; the reader begins to watch its node.

        Nothing wakes it any more: that the node was changed tells it to look again.
        """
        other = connect(ours.url)
        lease = ours.lock("between", ttl=LONG).acquire(PATIENCE)
        watch = Watches.watch_predecessor

        def downgrade_before(watches: Watches, path: str, request: Request) -> object:
            if lease.mode == "exclusive":
                lease.downgrade()
            return watch(watches, path, request)

        monkeypatch.setattr(Watches, "watch_predecessor", downgrade_before)
        Background(other.rwlock("between", **WAIT).read().acquire).result().release()
        lease.release()


class TestCrowds:
    """How many requests the server gets, as it counts them."""

    def test_a_hundred_readers_of_one_client(self, server: ZooKeeperServer, ours: Client) -> None:
        """Two requests each, sent together, and none waits for another."""
        with ours.rwlock("hundred", ttl=LONG, timeout=PATIENCE).read():
            pass
        before = packets_count(server)
        with holding([ours.rwlock("hundred", ttl=LONG).read()]) as (first,):
            leases = [Background(ours.rwlock("hundred", ttl=LONG).read().acquire) for _ in range(99)]
            tokens = {first.token, *(lease.result().token for lease in leases)}
            asked = packets_count(server) - before
            assert len(tokens) == 100
            assert len(ours.holders("hundred")) == 100
            for lease in leases:
                lease.result().release()
        assert asked <= 210

    def test_writer_s_release_wakes_readers_with_one_listing(
        self, server: ZooKeeperServer, ours: Client, tree: Tree
    ) -> None:
        """Those of one client share it; the writer behind them is not woken."""
        with lockkit.connect(server.url) as other, lockkit.connect(server.url) as last:
            lease = other.lock("run", ttl=LONG).acquire(PATIENCE)
            reading = [Background(ours.rwlock("run", **WAIT).read().acquire) for _ in range(30)]
            tree.until_waiting("/lockkit/run", 31)
            writing = Background(last.lock("run", **WAIT).acquire)
            tree.until_waiting("/lockkit/run", 32)
            (session,) = backend_of(ours)._sessions.all()
            wait_until(
                lambda: (
                    None if all(len(found) == 30 for found in session.watches._waiters.values()) else "not all wait"
                ),
                timeout=PATIENCE,
            )
            before = packets_count(server)

            lease.release()
            leases = [one.result() for one in reading]
            asked = packets_count(server) - before

            # delete, sync and get_children; room for heartbeats. One listing for each reader would be sixty.
            assert 3 <= asked <= 15
            assert not writing.done
            for one in leases:
                one.release()
            writing.result().release()
