"""On the same path kazoo's ``Lock`` and lockkit exclude each other, first come, first served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.sync import Client
from lockkit_tools.servers import ZooKeeperServer
from tests.backends.zookeeper.support import PATIENCE, Tree, kazoo_client
from tests.tries import busy

LONG = 60.0


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


def test_their_lock_keeps_us_out(ours: Client, theirs: KazooClient) -> None:
    """Its release deletes its node, which lockkit watches, and so wakes lockkit's waiter."""
    lock = theirs.Lock("/lockkit/x", "their identifier")
    assert lock.acquire()
    assert busy(ours.lock("x", ttl=LONG))
    (holder,) = ours.holders("x")
    assert holder.metadata == {"text": "their identifier"}
    got: list[lockkit.Lease] = []
    thread = threading.Thread(target=lambda: got.append(ours.lock("x", ttl=LONG).acquire(timeout=PATIENCE)))
    thread.start()
    Tree(theirs).until_waiting("/lockkit/x", 2)
    assert got == []

    lock.release()

    thread.join(PATIENCE)
    assert holder.token is not None
    assert got[0].token > holder.token
    got[0].release()


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


def test_our_lock_keeps_them_out(ours: Client, theirs: KazooClient) -> None:
    """Kazoo sees our metadata as the identifier of a contender."""
    lease = ours.lock("x", ttl=LONG).acquire(PATIENCE)
    lock = theirs.Lock("/lockkit/x")
    assert not lock.acquire(blocking=False)
    assert '"pid"' in lock.contenders()[0]

    lease.release()

    assert lock.acquire(timeout=PATIENCE)
    assert busy(ours.lock("x", ttl=LONG))
    lock.release()


def test_one_queue_for_both(server: ZooKeeperServer, theirs: KazooClient, ours: Client) -> None:
    """Waiters of both are served in the order of arrival."""
    tree, order, threads = Tree(theirs), list[int](), list[threading.Thread]()
    clients = [lockkit.connect(server.url) for _ in range(3)]
    contenders: list[Any] = []
    for client in clients:
        contenders += [client.lock("line", ttl=LONG, timeout=PATIENCE), theirs.Lock("/lockkit/line")]

    def enter(number: int, lock: Any) -> None:  # noqa: ANN401 - either library's
        with lock:
            order.append(number)

    with ours.lock("line", ttl=LONG):
        for number, lock in enumerate(contenders):
            threads.append(threading.Thread(target=enter, args=(number, lock)))
            threads[-1].start()
            tree.until_waiting("/lockkit/line", number + 2)
    for thread in threads:
        thread.join(PATIENCE)

    assert order == [*range(6)]
    for client in clients:
        client.close()


def test_readers_of_theirs_keep_us_out(ours: Client, theirs: KazooClient) -> None:
    """As they keep out kazoo's WriteLock."""
    lock = theirs.ReadLock("/lockkit/read")
    assert lock.acquire()

    assert busy(ours.lock("read", ttl=LONG), 0.2)

    lock.release()
    ours.lock("read", ttl=LONG).acquire(timeout=PATIENCE).release()


def test_names_lead_to_the_same_path(ours: Client, theirs: KazooClient) -> None:
    """Kazoo takes a path, lockkit a name: ``/`` and ``%`` are escaped."""
    with theirs.Lock("/lockkit/seat%2F12A"):
        assert busy(ours.lock("seat/12A", ttl=LONG))
