"""What is special about the lock itself on ``file://``; the conformance suite has what all backends share."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockkit.backend import Busy, Gone, Renewed
from lockkit.backends.file import record_store
from lockkit.runtime import drive
from lockkit.testing.timing import PATIENCE
from tests.backends.file.support import Connect
from tests.backends.support import StubHost, granted
from tests.tries import until


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

    client._store._records["x"].close()

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

    monkeypatch.setattr(record_store, "_pwrite", interrupted)
    thread = threading.Thread(target=lambda: released.append(drive(backend.release(grant))))
    thread.start()
    assert writing.wait(PATIENCE)
    closing = threading.Thread(target=lambda: drive(backend.close()))
    closing.start()
    until(lambda: backend._closed)
    closing.join(0.1)  # it waits for the writer
    others = [tmp_path / str(number) for number in range(5)]
    with ExitStack() as opened:
        for path in others:
            opened.enter_context(path.open("wb"))
        go_on.set()
        thread.join(PATIENCE)
        closing.join(PATIENCE)

    assert released == [True]
    assert [path.read_bytes() for path in others] == [b""] * len(others)


def test_confirmation_says_why_a_lease_is_gone(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """Asking changes nothing; a client whose file was removed holds nothing that is certain."""
    first, second = connect(frozen), connect(frozen)
    grant = granted(drive(first.try_acquire(frozen.request())))
    assert drive(first.confirm(grant)) is None

    (directory / "clients" / first._directory.client_id).unlink()
    assert drive(second.confirm(grant)) == Gone("gone")
    other = granted(drive(second.try_acquire(frozen.request())))
    assert drive(first.confirm(grant)) == Gone("taken")

    assert drive(second.release(other))
    assert drive(second.confirm(other)) == Gone("gone")
