"""kazoo's recipes (``Lock``, ``ReadLock``, ``WriteLock``, ``Election``) and lockkit share one queue on one path."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.sync import Client
from tests.backends.support import Connect
from tests.backends.zookeeper.support import PATIENCE, Tree
from tests.tries import beside, busy

LONG = 60.0
WAIT: dict[str, Any] = {"ttl": 3 * PATIENCE, "timeout": 6 * PATIENCE}
"""For waiters that must be woken: lockkit looks again by itself after a ttl, and at the end of the timeout."""


def test_locks_exclude_each_other(ours: Client, theirs: KazooClient, tree: Tree) -> None:
    """Kazoo takes a path, lockkit a name. Each sees the other's metadata, and a release wakes the other's waiter."""
    path = "/lockkit/seat%2F12A"
    lock = theirs.Lock(path, "their identifier")
    assert lock.acquire()
    assert busy(ours.lock("seat/12A", ttl=LONG))
    (holder,) = ours.holders("seat/12A")
    assert holder.metadata == {"text": "their identifier"}
    waiting = beside(ours.lock("seat/12A", **WAIT).acquire)
    tree.until_waiting(path, 2)
    assert not waiting.done()

    lock.release()

    lease = waiting.result(PATIENCE)
    assert holder.token is not None
    assert lease.token > holder.token
    assert not lock.acquire(blocking=False)
    assert '"pid"' in lock.contenders()[0]
    lease.release()
    assert lock.acquire(timeout=PATIENCE)
    assert ours.break_lock("seat/12A")
    ours.lock("seat/12A", ttl=LONG).acquire(PATIENCE).release()


def test_names_are_of_their_locks_too(ours: Client, theirs: KazooClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages; not empty directories, nor what is no lock."""
    monkeypatch.setattr("lockkit.backends.zookeeper.backend.PAGE_DIRECTORIES", 2)
    for number in range(3):
        theirs.ensure_path(f"/lockkit/listed-empty-{number}")
    for directory in ("listed-other/child", "listed-%zz/a__lock__0000000001", "listed-%41/a__lock__0000000001"):
        theirs.ensure_path(f"/lockkit/{directory}")
    lock = theirs.Lock("/lockkit/listed-theirs", "their identifier")
    assert lock.acquire()
    with ours.lock("listed-ours/é", ttl=LONG):
        assert sorted(ours.names("listed-")) == ["listed-ours/é", "listed-theirs"]
    lock.release()

    assert list(ours.names("listed-")) == []


def test_one_queue_for_both(theirs: KazooClient, ours: Client, tree: Tree, connect: Connect) -> None:
    """Waiters of both are served in the order of arrival."""
    order, threads = list[int](), list[Future[Any]]()
    contenders: list[Any] = []
    for _ in range(3):
        contenders += [connect(ours.url).lock("line", ttl=LONG, timeout=PATIENCE), theirs.Lock("/lockkit/line")]

    def enter(number: int, lock: Any) -> None:  # noqa: ANN401 - either library's
        with lock:
            order.append(number)

    with ours.lock("line", ttl=LONG):
        for number, lock in enumerate(contenders):
            threads.append(beside(enter, number, lock))
            tree.until_waiting("/lockkit/line", number + 2)
    for thread in threads:
        thread.result(PATIENCE)

    assert order == [*range(6)]


def test_readers_of_both_hold_it_together(ours: Client, theirs: KazooClient, tree: Tree) -> None:
    """A reader of kazoo before and after one of lockkit, laid out alike. A broken lock is free of both."""
    path = "/lockkit/together"
    first, second = theirs.ReadLock(path, "first"), theirs.ReadLock(path, "second")
    assert first.acquire(timeout=PATIENCE)
    lease = ours.rwlock("together", ttl=LONG).read().acquire(PATIENCE)
    (node,) = [node for node in tree.nodes(path) if node.startswith(lease.owner)]
    assert node == f"{lease.owner}__rlock__{node[-10:]}"
    assert tree.client.exists(f"{path}/{node}").czxid == lease.token
    assert second.acquire(timeout=PATIENCE)
    assert [holder.mode for holder in ours.holders("together")] == ["shared"] * 3
    writing = beside(ours.lock("together", **WAIT).acquire)
    tree.until_waiting(path, 4)

    assert ours.break_lock("together")

    written = writing.result(PATIENCE)
    assert not lease.confirm()
    assert written.confirm()
    written.release()


@pytest.mark.parametrize("kind", ["WriteLock", "Lock with a pattern"])
def test_their_writer_waits_for_our_readers_and_ours_for_it(
    ours: Client, theirs: KazooClient, tree: Tree, connect: Connect, kind: str
) -> None:
    """And stops those that come after it."""
    name = f"writer-{kind[0]}"
    path, reader = f"/lockkit/{name}", connect(ours.url).rwlock(name, **WAIT).read()
    lease = ours.rwlock(name, ttl=LONG).read().acquire(PATIENCE)
    lock = theirs.WriteLock(path) if kind == "WriteLock" else theirs.Lock(path, extra_lock_patterns=["__rlock__"])
    writing = beside(lambda: lock.acquire(timeout=PATIENCE))
    tree.until_waiting(path, 2)
    assert busy(reader)
    reading = beside(reader.acquire)
    tree.until_waiting(path, 3)
    assert not writing.done()

    lease.release()
    assert writing.result(PATIENCE)
    assert not reading.done()
    assert lock.release()

    after = reading.result(PATIENCE)
    assert after.token > lease.token
    after.release()


def test_their_reader_waits_for_our_writer_and_ours_for_it(ours: Client, theirs: KazooClient, tree: Tree) -> None:
    """A waiting writer of lockkit's stops kazoo's readers, too."""
    path = "/lockkit/reader"
    lease = ours.lock("reader", ttl=LONG).acquire(PATIENCE)
    lock, late = theirs.ReadLock(path), theirs.ReadLock(path)
    reading = beside(lambda: lock.acquire(timeout=PATIENCE))
    tree.until_waiting(path, 2)
    lease.release()
    assert reading.result(PATIENCE)

    writing = beside(ours.lock("reader", **WAIT).acquire)
    tree.until_waiting(path, 2)
    assert not late.acquire(blocking=False)
    assert not writing.done()
    lock.release()
    writing.result(PATIENCE).release()


def test_their_plain_lock_knows_no_readers(ours: Client, theirs: KazooClient, tree: Tree) -> None:
    """
    The limit that the page of this backend describes: kazoo's Lock looks for ``__lock__`` only.

    No name of a node changes that: kazoo's ReadLock looks for the same names in the same way.
    """
    with ours.rwlock("plain", ttl=LONG, timeout=PATIENCE).read():
        assert theirs.Lock("/lockkit/plain").acquire(blocking=False)
        (writer,) = [node for node in tree.nodes("/lockkit/plain") if "__lock__" in node]
        theirs.delete(f"/lockkit/plain/{writer}")
    with theirs.Lock("/lockkit/plain"):
        assert busy(ours.rwlock("plain", ttl=LONG).read())


def test_elections_share_one_queue(ours: Client, theirs: KazooClient, tree: Tree) -> None:
    """Each library sees the leader of the other, and our new metadata; a cancelled kazoo election blocks nobody."""
    contest = ours.election("x", ttl=LONG, value="ours:80")
    term = contest.campaign(PATIENCE)
    election, cancelled = theirs.Election("/lockkit/x", "theirs:80"), theirs.Election("/lockkit/x", "cancelled")
    leading, enough = threading.Event(), threading.Event()

    def lead() -> None:
        leading.set()
        assert enough.wait(PATIENCE)

    calls = []
    for count, one in enumerate((cancelled, election)):
        calls.append(beside(one.run, lead))
        tree.until_waiting("/lockkit/x", 2 + count)
    term.update({"step": 2})
    first, *others = election.contenders()
    assert (json.loads(first)["value"], json.loads(first)["step"]) == ("ours:80", 2)
    assert others == ["cancelled", "theirs:80"]
    assert term.confirm()
    assert not leading.is_set()
    cancelled.cancel()
    calls[0].result(PATIENCE)

    term.resign()

    assert leading.wait(PATIENCE)
    leader = contest.leader()
    assert leader is not None
    assert leader.value == "theirs:80"
    assert leader.term is not None
    assert leader.term > term.token
    with pytest.raises(lockkit.LockTimeout):
        contest.campaign(timeout=0.2)
    enough.set()
    with contest.campaign(PATIENCE) as again:
        assert again.token > leader.term
    calls[1].result(PATIENCE)
