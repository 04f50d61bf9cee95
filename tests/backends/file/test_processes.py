"""Fork, threads, descriptors, closing."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from lockkit.backend import Busy, Grant, Renewed
from lockkit.backends import _recordfile, _store
from lockkit.backends._record import decode
from lockkit.backends._store import OPEN_RECORDS_MAX
from lockkit.backends.file import FileBackend
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import drive
from lockkit.url import parse
from tests.backends.file.peer import Peer
from tests.backends.file.support import LONG, Connect, open_files, until
from tests.backends.support import StubHost, granted


def test_forked_child_does_not_keep_the_dead_parent_alive(connect: Connect, host: StubHost, directory: Path) -> None:
    """It has a copy of the parent's descriptors, and closes it at once."""
    backend = connect(host)
    with Peer(f"file://{directory}") as peer:
        peer.ask(f"acquire x {LONG}")
        child = int(peer.ask("fork")[1])
        try:
            peer.kill()

            # As soon as the child has run at all.
            until(lambda: isinstance(drive(backend.try_acquire(host.request(queue=False))), Grant))
        finally:
            os.kill(child, signal.SIGKILL)


def test_forked_child_shares_no_flock_with_its_parent(connect: Connect, host: StubHost) -> None:
    """A lock taken through an inherited descriptor would exclude nobody."""
    backend = connect(host)
    granted(drive(backend.try_acquire(host.request("x"))))
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # rather than hang
        ok = (
            backend._presence.client is None
            and backend._store.files == {}
            and isinstance(drive(backend.try_acquire(host.request("y"))), Grant)
        )
        os._exit(0 if ok and isinstance(drive(backend.try_acquire(host.request("x", queue=False))), Busy) else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert backend._presence.client is not None
    # What the child held went with it.
    granted(drive(backend.try_acquire(host.request("y"))))
    assert len(drive(backend.holders("x"))) == 1


def test_flock_that_is_not_given_back_is_blamed_on_its_process(
    connect: Connect, host: StubHost, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody was stopped within the few microseconds: the error says who."""
    monkeypatch.setattr(_store, "FLOCK_SECONDS_MAX", 0.2)
    backend = connect(host)
    grant = granted(drive(backend.try_acquire(host.request())))
    fd = os.open(directory / "x.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(BackendUnavailable, match=rf"process {os.getpid()}\b"):
            drive(backend.release(grant))
    finally:
        os.close(fd)

    assert drive(backend.release(grant))


def test_clients_close_what_they_opened(directory: Path, host: StubHost) -> None:
    """After close: no descriptor, no thread, no client file, no place in a queue."""
    holder = FileBackend.open(parse(f"file://{directory}"), {"group": False}, host)
    files, threads = open_files(), threading.active_count()
    backend = FileBackend.open(parse(f"file://{directory}"), {"group": False}, host)
    granted(drive(backend.try_acquire(host.request("mine", ttl=LONG))))
    granted(drive(holder.try_acquire(host.request(ttl=LONG))))
    request = host.request(ttl=LONG)
    busy = drive(backend.try_acquire(request))
    assert isinstance(busy, Busy)
    request.wake.set()
    drive(backend.wait(request, busy, host.runtime.now() + 30))
    assert len(list((directory / "clients").iterdir())) == 2

    drive(backend.close())
    drive(backend.close())

    assert decode((directory / "x.lock").read_bytes(), "x")[0].queue == []
    drive(holder.close())
    assert open_files() == files
    until(lambda: threading.active_count() == threads)
    assert list((directory / "clients").iterdir()) == []
    with pytest.raises(LockError, match="closed"):
        drive(backend.try_acquire(host.request()))


def test_number_of_open_records_is_bounded(connect: Connect, host: StubHost) -> None:
    """A client may use any number of names, and hold them all."""
    backend = connect(host)
    before = open_files()
    grants = [granted(drive(backend.try_acquire(host.request(f"lock {index}")))) for index in range(200)]

    assert open_files() <= before + OPEN_RECORDS_MAX + 1
    assert drive(backend.renew(grants)) == [Renewed()] * 200
    assert all(drive(backend.release(grant)) for grant in grants)


def test_threads_share_a_client(connect: Connect, host: StubHost) -> None:
    """More names than records stay open: nobody uses a descriptor that another thread has closed."""
    backend = connect(host)
    failures: list[BaseException] = []

    def work(prefix: str) -> None:
        try:
            for index in range(600):
                grant = granted(drive(backend.try_acquire(host.request(f"{prefix} {index % 40}"))))
                assert drive(backend.release(grant))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []


@pytest.mark.parametrize("call", ["_flock", "_pread", "_pwrite"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_interrupt_within_an_operation(
    call: str, moment: str, connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between any two system calls: the flock is given back, and what the record says counts."""
    backend = connect(host)
    assert drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    real = getattr(_recordfile, call)
    request = host.request()

    def interrupted(*args: object) -> object:
        monkeypatch.setattr(_recordfile, call, real)
        if moment == "after":
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(_recordfile, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(backend.try_acquire(request))

    # As the engine does then.
    request.uncertain = True
    written = (call, moment) == ("_pwrite", "after")
    for client in (connect(host), backend):
        assert [holder.owner for holder in drive(client.holders("x"))] == [request.owner] * written
    drive(backend.abandon(request))
    granted(drive(backend.try_acquire(host.request(queue=False))))
