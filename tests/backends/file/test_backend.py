"""What is special about the lock itself on ``file://``; the conformance suite has what all backends share."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockkit.backend import Busy, Gone, Grant, Renewed
from lockkit.backends.file import backend as file
from lockkit.backends.file import record
from lockkit.runtime import drive
from lockkit.testing.timing import PATIENCE
from tests.backends.file.support import Connect, tick
from tests.backends.support import FakeClock, StubHost, granted


def test_clients_exclude_each_other(connect: Connect, frozen: StubHost) -> None:
    """Two clients, one lock: grant, busy, holders, release, a higher token."""
    first, second = connect(frozen), connect(frozen)
    grant = granted(drive(first.try_acquire(frozen.request(ttl=7.0))))
    tick(frozen, 1.0)

    busy = drive(second.try_acquire(frozen.request(queue=False)))
    assert busy == Busy(6.0, owner=grant.owner, metadata='{"pid":1}')
    (holder,) = drive(second.holders("x"))
    assert (holder.owner, holder.token, holder.remaining, holder.waiters) == (grant.owner, grant.token, 6.0, 0)
    assert holder.metadata == {"pid": 1}
    assert drive(first.renew([grant])) == [Renewed()]
    assert drive(first.release(grant))
    assert not drive(first.release(grant))
    assert drive(second.holders("x")) == []

    assert granted(drive(second.try_acquire(frozen.request()))).token > grant.token


def test_asking_makes_no_record(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """A dashboard that asks for many names leaves nothing in the directory."""
    client = connect(frozen)

    assert drive(client.holders("x")) == []
    assert not drive(client.break_lock("x"))
    assert drive(client.read_note("x")) is None

    assert {path.name for path in directory.iterdir()} == {"clients", ".lockkit"}


def test_record_that_another_thread_has_closed_is_opened_again(connect: Connect, frozen: StubHost) -> None:
    """It does so when too many are open, between the look for the record and its flock."""
    client, other = connect(frozen), connect(frozen)
    grant = granted(drive(client.try_acquire(frozen.request())))

    client._store._files["x"].close()

    assert drive(client.renew([grant])) == [Renewed()]
    assert isinstance(drive(other.try_acquire(frozen.request(queue=False))), Busy)


def test_thread_that_writes_a_record_while_the_client_is_closed_writes_into_no_other_file(
    connect: Connect, host: StubHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file that the program opens would get the number of the record's descriptor."""
    backend = connect(host)
    grant = granted(drive(backend.try_acquire(host.request())))
    writing, go_on, released = threading.Event(), threading.Event(), []

    def interrupted(fd: int, text: bytes, offset: int) -> int:
        writing.set()
        go_on.wait(PATIENCE)
        return os.pwrite(fd, text, offset)

    monkeypatch.setattr(record, "_pwrite", interrupted)
    thread = threading.Thread(target=lambda: released.append(drive(backend.release(grant))))
    thread.start()
    assert writing.wait(PATIENCE)
    drive(backend.close())
    others = [tmp_path / str(number) for number in range(5)]
    with ExitStack() as opened:
        for path in others:
            opened.enter_context(path.open("wb"))
        go_on.set()
        thread.join(PATIENCE)

    assert released == [True]
    assert [path.read_bytes() for path in others] == [b""] * len(others)


def test_unusual_names_are_different_locks(connect: Connect, host: StubHost) -> None:
    """Whatever the file system makes of their characters."""
    backend = connect(host)
    names = ["a", "A", "a ", "é", "e\u0301", ".", "..", "a/b", "/a", "%61", "clients", "x" * 255, "X" * 255, "\n"]

    for name in names:
        grant = granted(drive(backend.try_acquire(host.request(name))))
        assert [holder.owner for holder in drive(backend.holders(name))] == [grant.owner]


def test_expired_lease_is_neither_renewed_nor_released(connect: Connect, frozen: StubHost) -> None:
    """A lease ends with its ttl."""
    backend = connect(frozen)
    grant = granted(drive(backend.try_acquire(frozen.request(ttl=10.0))))
    tick(frozen, 10.0)

    assert drive(backend.holders("x")) == []
    assert drive(backend.renew([grant])) == [Gone("expired")]
    other = granted(drive(connect(frozen).try_acquire(frozen.request())))
    assert drive(backend.renew([grant])) == [Gone("taken")]
    assert not drive(backend.release(grant))
    assert [holder.owner for holder in drive(backend.holders("x"))] == [other.owner]


def test_renewal_reports_a_broken_lease(connect: Connect, frozen: StubHost) -> None:
    """Also when another client holds the lock by then, with a higher token."""
    first, second = connect(frozen), connect(frozen)
    grant = granted(drive(first.try_acquire(frozen.request())))

    assert drive(second.break_lock("x"))
    assert not drive(second.break_lock("x"))
    assert not drive(second.break_lock("never seen"))

    assert drive(first.confirm(grant)) == Gone("broken")
    assert granted(drive(second.try_acquire(frozen.request()))).token > grant.token
    assert drive(first.renew([grant])) == [Gone("broken")]
    assert drive(first.confirm(grant)) == Gone("broken")


def test_confirmation_says_why_a_lease_is_gone(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """Asking changes nothing; a client whose file was removed holds nothing that is certain."""
    first, second = connect(frozen), connect(frozen)
    grant = granted(drive(first.try_acquire(frozen.request())))
    assert drive(first.confirm(grant)) is None

    (directory / "clients" / first._client_file.id).unlink()
    assert drive(second.confirm(grant)) == Gone("gone")
    other = granted(drive(second.try_acquire(frozen.request())))
    assert drive(first.confirm(grant)) == Gone("taken")

    assert drive(second.release(other))
    assert drive(second.confirm(other)) == Gone("gone")


def test_expired_leases_are_forgotten(connect: Connect, frozen: StubHost) -> None:
    """A client that has its leases expire, and never releases one, remembers none of them."""
    backend = connect(frozen)
    assert isinstance(frozen.runtime, FakeClock)
    for number in range(100):
        granted(drive(backend.try_acquire(frozen.request(f"lock {number % 5}", ttl=1.0))))
        frozen.runtime.time += 2.0

    assert len(backend._store.held) == 1


def test_queue_is_first_come_first_served_between_clients(connect: Connect, frozen: StubHost) -> None:
    """A client that releases and acquires again at once is behind the waiters."""
    clients = [connect(frozen) for _ in range(5)]
    requests = [frozen.request(owner=f"{index}") for index in range(5)]
    grant = granted(drive(clients[0].try_acquire(requests[0])))
    for client, request in zip(clients[1:], requests[1:], strict=True):
        assert isinstance(drive(client.try_acquire(request)), Busy)
    (holder,) = drive(clients[0].holders("x"))
    assert holder.waiters == 4

    for turn in range(1, 5):
        assert drive(clients[turn - 1].release(grant))
        for index in (0, 4, 3, 2, 1):
            outcome = drive(clients[index].try_acquire(requests[index])) if index != turn else None
            assert not isinstance(outcome, Grant)
        grant = granted(drive(clients[turn].try_acquire(requests[turn])))
        requests[turn - 1] = frozen.request()


def test_uncertain_grant_is_undone(connect: Connect, host: StubHost) -> None:
    """A request that was interrupted after its grant leaves nothing behind."""
    backend = connect(host)
    request = host.request()
    granted(drive(backend.try_acquire(request)))
    request.uncertain = True

    drive(backend.abandon(request))
    drive(backend.abandon(request))

    assert drive(backend.holders("x")) == []


def test_token_grows_though_the_clock_is_set_back(
    connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record keeps the last token, and the wall clock is the lower bound."""
    backend = connect(host)
    tokens = []
    for wall_us in (5000, 5000, 1, 9000):
        monkeypatch.setattr(file, "wall_clock_us", lambda value=wall_us: value)
        grant = granted(drive(backend.try_acquire(host.request())))
        drive(backend.release(grant))
        tokens.append(grant.token)

    assert tokens == [5000, 5001, 5002, 9000]
