"""Permits of semaphores on ZooKeeper: nodes, marks and watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lockkit
from lockkit.backend import Request
from lockkit.backends.zookeeper import queue
from lockkit.backends.zookeeper.node import LockNode
from lockkit.backends.zookeeper.path import slot_mark
from lockkit.backends.zookeeper.wakeup import Watches
from lockkit.runtime import drive, monotonic
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, ZooKeeperServer
from tests.backends.zookeeper.support import PATIENCE, Connect, Tree, packets_count
from tests.backends.zookeeper.test_readers import Background
from tests.tries import have_time_to_answer

LONG = 60.0
WAIT: dict[str, Any] = {"ttl": 3 * PATIENCE, "timeout": 6 * PATIENCE}
"""For waiters that must be woken: lockkit looks again by itself after a ttl, and at the end of the timeout."""

ROOT = "/lockkit+sem"


@pytest.fixture
def ours(server: ZooKeeperServer) -> Iterator[Client]:
    """A client of lockkit's."""
    with lockkit.connect(server.url) as client:
        yield client


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
    first = ours.semaphore("together", limit=3, ttl=LONG).try_acquire()
    second = Background(clients[0].semaphore("together", limit=3, ttl=LONG).try_acquire)
    assert marking.wait(PATIENCE)
    third = Background(clients[1].semaphore("together", limit=3, ttl=LONG).try_acquire)
    tree.until_waiting(f"{ROOT}/together", 3)
    go_on.set()

    got = [first, second.result(), third.result()]
    assert [lease.slot for lease in got] == [0, 1, 2]
    for lease in got:
        lease.release()


def test_slots_are_the_lowest_free_ones(ours: Client) -> None:
    """Also of a slot that was held by the first."""
    semaphore = ours.semaphore("slots", limit=4, ttl=LONG, timeout=PATIENCE)
    leases = [semaphore.acquire() for _ in range(4)]
    assert [lease.slot for lease in leases] == [0, 1, 2, 3]

    for number in (2, 0, 1):
        leases[number].release()
        leases[number] = semaphore.acquire()
        assert leases[number].slot == number

    for lease in leases:
        lease.release()


def test_all_holders_leave_at_once(ours: Client, tree: Tree, connect: Connect) -> None:
    """Then the first waiter has slot 0 without having asked for it, and the next one gets a permit, too."""
    clients = [connect(ours.url) for _ in range(4)]
    held = [ours.semaphore("at-once", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    waiting = []
    for number, client in enumerate(clients):
        waiting.append(Background(client.semaphore("at-once", limit=2, **WAIT).acquire))
        tree.until_waiting(f"{ROOT}/at-once", 4 + number)

    transaction = tree.client.transaction()
    for node in tree.nodes(f"{ROOT}/at-once"):
        if node.startswith(tuple(lease.owner for lease in held)):
            transaction.delete(f"{ROOT}/at-once/{node}")
    assert all(found is True for found in transaction.commit())
    for lease in held:
        with pytest.raises(lockkit.LockLost):
            lease.release()

    first, second = waiting[0].result(), waiting[1].result()
    assert {first.slot, second.slot} == {0, 1}
    assert not waiting[2].done
    first.release()
    third = waiting[2].result()
    assert third.slot == first.slot
    second.release()
    for lease in (third, waiting[3].result()):
        lease.release()
    tree.until_empty(f"{ROOT}/at-once")


def test_mark_of_the_one_before_between_listing_and_watching(
    ours: Client, tree: Tree, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The second waiter sees the first one wait; that gets its permit; the second one begins to watch its node.

    Two permits are free, and nothing wakes the second waiter any more unless it looks again.
    """
    clients = [connect(ours.url) for _ in range(2)]
    held = [ours.semaphore("between", limit=3, ttl=LONG).acquire(PATIENCE) for _ in range(3)]
    first = Background(clients[0].semaphore("between", limit=3, **WAIT).acquire)
    tree.until_waiting(f"{ROOT}/between", 6)
    watch, came = Watches.watch_predecessor, threading.Event()

    def release_before(watches: Watches, path: str, request: Request) -> object:
        if not came.is_set():
            came.set()
            held[1].release()
            held[2].release()
            first.result()
        return watch(watches, path, request)

    monkeypatch.setattr(Watches, "watch_predecessor", release_before)
    second = Background(clients[1].semaphore("between", limit=3, **WAIT).acquire).result()

    assert came.is_set()
    assert {first.result().slot, second.slot} == {1, 2}
    for lease in (held[0], first.result(), second):
        lease.release()


def test_holder_leaves_between_listing_and_watching(
    ours: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waiter sees that all permits are held; one is released; it begins to watch the directory."""
    held = [ours.semaphore("leaves", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    watch = Watches.watch_directory

    def release_before(watches: Watches, path: str, request: Request) -> object:
        if held[1].held:
            held[1].release()
        return watch(watches, path, request)

    monkeypatch.setattr(Watches, "watch_directory", release_before)
    lease = Background(connect(ours.url).semaphore("leaves", limit=2, **WAIT).acquire).result()

    assert lease.slot == 1
    lease.release()
    held[0].release()


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


def test_lost_answer_to_a_release_frees_the_permit_once(server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
    """It can be called again, and reports no loss."""
    other = connect(server.url)
    held = other.semaphore("freed", limit=2, ttl=LONG).acquire(PATIENCE)
    with FaultProxy(server.host, server.port) as proxy:
        client = connect(f"zookeeper://{proxy.address}")
        lease = client.semaphore("freed", limit=2, ttl=LONG).acquire(PATIENCE)
        dropped = proxy.drop_next_reply(match=lease.owner.encode())

        with pytest.raises(lockkit.BackendUnavailable):
            lease.release()
        assert dropped.is_set()
        again = other.semaphore("freed", limit=2, ttl=LONG).acquire(PATIENCE)
        lease.release()

        assert (again.slot, again.confirm()) == (1, True)
    again.release()
    held.release()
    tree.until_empty(f"{ROOT}/freed")


def test_release_wakes_one_waiter(server: ZooKeeperServer, ours: Client, tree: Tree, connect: Connect) -> None:
    """No herd: only the first waiter watches the holders, the others the waiter before them."""
    clients = [connect(ours.url) for _ in range(12)]
    held = [ours.semaphore("herd", limit=3, ttl=LONG).acquire(PATIENCE) for _ in range(3)]
    waiting = []
    for number, client in enumerate(clients):
        waiting.append(Background(client.semaphore("herd", limit=3, **WAIT).acquire))
        tree.until_waiting(f"{ROOT}/herd", 6 + number)
    tree.client.sync("/")
    before = packets_count(server)

    held[1].release()
    lease = waiting[0].result()
    asked = packets_count(server) - before

    # Deletion, listing and mark; listing, watch and look of the next one. Ten others would ask at least twenty times.
    assert 3 <= asked <= 20
    assert not any(one.done for one in waiting[1:])
    for one in (held[0], held[2], lease):
        one.release()
    for call in waiting[1:]:
        call.result().release()
    tree.until_empty(f"{ROOT}/herd")
