"""Contenders that become others: permits of semaphores, downgraded writers. Nodes, marks and watches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.backend import Request
from lockkit.backends.zookeeper import queue
from lockkit.backends.zookeeper.nodes import LockNode
from lockkit.backends.zookeeper.path import slot_mark
from lockkit.backends.zookeeper.session import Session
from lockkit.runtime import drive, monotonic
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, ZooKeeperServer
from tests.backends.support import Connect, answers
from tests.backends.zookeeper.support import (
    PATIENCE,
    Tree,
    packets_count,
    sessions_of,
)
from tests.tries import beside, busy, have_time_to_answer, until

LONG = 60.0
WAIT: dict[str, Any] = {"ttl": 3 * PATIENCE, "timeout": 6 * PATIENCE}
"""For waiters that must be woken: lockkit looks again by itself after a ttl, and at the end of the timeout."""

ROOT = "/lockkit+sem"


def test_permits_are_laid_out_apart_from_locks(ours: Client, tree: Tree) -> None:
    """The first has slot 0 without a mark; the mark of another says its slot, and goes with it."""
    semaphore = ours.semaphore("layout", limit=3, ttl=LONG, timeout=PATIENCE)
    first, second = semaphore.acquire(), semaphore.acquire()

    nodes = tree.nodes(f"{ROOT}/layout")
    mine = next(node for node in nodes if node.startswith(first.owner))
    other = next(node for node in nodes if node.startswith(second.owner) and "slot" not in node)
    assert set(nodes) == {mine, other, f"{other}__slot1"}
    assert mine == f"{first.owner}__permit__{mine[-10:]}"
    assert tree.client.exists(f"{ROOT}/layout/{other}").czxid == second.token

    second.release()
    assert tree.nodes(f"{ROOT}/layout") == [mine]
    first.release()
    tree.until_empty(f"{ROOT}/layout")
    assert tree.nodes("/lockkit/layout") == []


def test_single_tries_that_come_together_all_get_permits(
    ours: Client, tree: Tree, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has joined the queue, and has no mark yet, is not taken for one that has to wait."""
    monkeypatch.setattr(queue, "LOOKS_MAX", 1_000_000)
    have_time_to_answer(monkeypatch)
    marking, go_on, create_mark = threading.Event(), threading.Event(), LockNode.create_mark

    async def stopped(*arguments: Any, **keywords: Any) -> bool:
        if not marking.is_set():
            marking.set()
            assert go_on.wait(PATIENCE)
        return await create_mark(*arguments, **keywords)

    monkeypatch.setattr(LockNode, "create_mark", stopped)
    clients = [connect(ours.url) for _ in range(2)]
    first = ours.semaphore("together", limit=3, ttl=LONG).acquire(0)
    second = beside(clients[0].semaphore("together", limit=3, ttl=LONG).acquire, 0)
    assert marking.wait(PATIENCE)
    third = beside(clients[1].semaphore("together", limit=3, ttl=LONG).acquire, 0)
    tree.until_waiting(f"{ROOT}/together", 3)
    go_on.set()

    got = [first, second.result(PATIENCE), third.result(PATIENCE)]
    assert [lease.slot for lease in got] == [0, 1, 2]
    for lease in got:
        lease.release()


def test_all_holders_leave_at_once(ours: Client, tree: Tree, connect: Connect) -> None:
    """Then the first waiter has slot 0 without having asked for it, and the next one gets a permit, too."""
    clients = [connect(ours.url) for _ in range(4)]
    held = [ours.semaphore("at-once", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    waiting = []
    for number, client in enumerate(clients):
        waiting.append(beside(client.semaphore("at-once", limit=2, **WAIT).acquire))
        tree.until_waiting(f"{ROOT}/at-once", 4 + number)

    transaction = tree.client.transaction()
    for node in tree.nodes(f"{ROOT}/at-once"):
        if node.startswith(tuple(lease.owner for lease in held)):
            transaction.delete(f"{ROOT}/at-once/{node}")
    assert all(found is True for found in transaction.commit())
    for lease in held:
        with pytest.raises(lockkit.LockLost):
            lease.release()

    first, second = waiting[0].result(PATIENCE), waiting[1].result(PATIENCE)
    assert {first.slot, second.slot} == {0, 1}
    assert not waiting[2].done()
    first.release()
    third = waiting[2].result(PATIENCE)
    assert third.slot == first.slot
    second.release()
    for lease in (third, waiting[3].result(PATIENCE)):
        lease.release()
    tree.until_empty(f"{ROOT}/at-once")


@pytest.mark.parametrize("what", ["the one before is marked", "the writer is marked", "a holder leaves"])
def test_news_between_listing_and_watching_are_seen(
    ours: Client, tree: Tree, connect: Connect, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """
    A contender lists the queue; what it waits for happens; it begins to watch.

    Nothing wakes it any more: that the node was changed, or the directory lists others, tells it to look again.
    """
    name = f"between {what}"
    came: list[str] = []
    limited = ours.semaphore(name, limit=3, ttl=LONG)
    if what == "the writer is marked":
        held = [ours.lock(name, ttl=LONG).acquire(PATIENCE)]
        late = connect(ours.url).rwlock(name, **WAIT).read()
    else:
        held = [limited.acquire(PATIENCE) for _ in range(3)]
        late = connect(ours.url).semaphore(name, limit=3, **WAIT)
    first, ahead = None, connect(ours.url)
    if what == "the one before is marked":
        first = beside(ahead.semaphore(name, limit=3, **WAIT).acquire)
        tree.until_waiting(f"{ROOT}/{name}", 6)
    add_waiter = Session._add_waiter

    def happen_before(session: Session, path: str, request: Request) -> None:
        if not came and session not in sessions_of(ahead):
            came.append(path)
            if what == "the writer is marked":
                held[0].downgrade()
            else:
                held.pop().release()
            if first is not None:
                held.pop().release()
                held.append(first.result(PATIENCE))
        add_waiter(session, path, request)

    monkeypatch.setattr(Session, "_add_waiter", happen_before)
    held.append(beside(late.acquire).result(PATIENCE))

    assert came
    assert len({lease.slot for lease in held}) == (1 if what == "the writer is marked" else 3)
    for lease in held:
        lease.release()


@pytest.mark.filterwarnings("ignore:lease of .* was dropped:ResourceWarning")
def test_mark_needs_its_node_and_the_one_before(ours: Client, tree: Tree) -> None:
    """Created again, it is there; without either of the nodes there is none, and no permit."""
    first, second = (ours.semaphore("marks", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2))
    before, node = (lease._record.grant.state for lease in (first, second))

    def is_marked(end: str) -> bool:
        found: bool = drive(node.create_mark(end, monotonic() + PATIENCE, behind=before.path))
        return found

    assert is_marked(slot_mark(1))
    tree.client.delete(before.path)
    assert not is_marked(slot_mark(2))
    tree.client.create(before.path)
    tree.client.delete(node.path)
    assert not is_marked(slot_mark(2))


def test_lost_answer_to_a_mark_leaves_nothing(server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
    """The permit was given to a request that is used no more: it is undone, and another one gets it."""
    other = connect(server.url)
    held = other.semaphore("lost", limit=2, ttl=LONG).acquire(PATIENCE)
    with FaultProxy(server.host, server.port) as proxy:
        client = connect(f"zookeeper://{proxy.address}")
        client.ping()
        dropped = proxy.drop_next_reply(match=b"__slot1")

        lease = client.semaphore("lost", limit=2, ttl=LONG).acquire(PATIENCE)

        assert dropped.is_set()
        assert lease.slot == 1
        assert other.semaphore("lost", limit=2).available() == 0
        lease.release()
    held.release()
    tree.until_empty(f"{ROOT}/lost")


@pytest.mark.parametrize("kind", ["lock", "permit"])
def test_release_wakes_one_waiter(
    server: ZooKeeperServer, ours: Client, tree: Tree, connect: Connect, kind: str
) -> None:
    """No herd: each watches the one before it, and of those that wait for a permit only the first the holders."""

    def contender(client: Client, **options: Any) -> lockkit.Lock | lockkit.Semaphore:
        return client.lock("herd", **options) if kind == "lock" else client.semaphore("herd", limit=3, **options)

    path, nodes = ("/lockkit/herd", 1) if kind == "lock" else (f"{ROOT}/herd", 5)
    held = [contender(ours, ttl=LONG).acquire(PATIENCE) for _ in range(1 if kind == "lock" else 3)]
    waiting = []
    for number in range(12):
        waiting.append(beside(contender(connect(ours.url), **WAIT).acquire))
        tree.until_waiting(path, nodes + number + 1)
    tree.client.sync("/")
    before = packets_count(server)

    held.pop(-2 if kind == "permit" else 0).release()
    held.append(waiting[0].result(PATIENCE))
    asked = packets_count(server) - before

    # Deletion, listing and mark; listing, watch and look of the next one. Ten others would ask at least twenty times.
    assert 2 <= asked <= 20
    assert not any(one.done() for one in waiting[1:])
    for lease in held:
        lease.release()
    for call in waiting[1:]:
        call.result(PATIENCE).release()
    tree.until_empty(path)


def test_downgraded_node_stays_and_gets_a_mark(ours: Client, theirs: KazooClient, tree: Tree, connect: Connect) -> None:
    """Readers of lockkit's get in, kazoo's wait, writers of both wait; metadata stay; the release leaves nothing."""
    path, other = "/lockkit/down", connect(ours.url)
    lease = ours.lock("down", ttl=LONG, metadata="first").acquire(PATIENCE)
    token, (node,) = lease.token, tree.nodes(path)
    lease.update("second")
    reading = beside(other.rwlock("down", **WAIT).read().acquire)
    tree.until_waiting(path, 2)

    lease.downgrade()

    second = reading.result(PATIENCE)
    assert {node, f"{node}__read"} < {*tree.nodes(path)}
    assert lease.token == token < second.token
    holders = {holder.owner: holder for holder in ours.holders("down")}
    assert {(one.token, one.mode) for one in holders.values()} == {(one.token, "shared") for one in (lease, second)}
    assert holders[lease.owner].metadata["text"] == "second"
    assert busy(other.lock("down", ttl=LONG))
    for theirs_too in (theirs.WriteLock(path), theirs.Lock(path), theirs.ReadLock(path)):
        assert not theirs_too.acquire(blocking=False)
    second.release()
    lease.update("third")
    assert [(one.mode, one.metadata["text"]) for one in ours.holders("down")] == [("shared", "third")]
    lease.extend()
    lease.release()
    tree.until_empty(path)
    lost = ours.lock("down", ttl=LONG).acquire(PATIENCE)
    assert other.break_lock("down")
    with pytest.raises(lockkit.LockLost):
        lost.downgrade()
    assert tree.nodes(path) == []


def test_downgrade_that_did_not_arrive(tree: Tree, proxy: FaultProxy, connect: Connect) -> None:
    """A mark that is not there is no obstacle to the release."""
    lease = connect(f"zookeeper://{proxy.address}").lock("unanswered", ttl=LONG).acquire(PATIENCE)
    proxy.blackhole()

    with pytest.raises(lockkit.BackendUnavailable):
        lease.downgrade()

    proxy.cut()
    proxy.heal()
    assert len(tree.nodes("/lockkit/unanswered")) == 1
    until(lambda: answers(lease.confirm))  # else the release could be sent over the connection that was cut
    lease.release()
    tree.until_empty("/lockkit/unanswered")
