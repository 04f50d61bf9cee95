"""Fork, threads, descriptors, closing, and processes that were stopped at the wrong moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.backend import Grant, Renewed, Unknown
from lockkit.backends.file import record_store
from lockkit.backends.file.record_store import OPEN_RECORDS_MAX
from lockkit.errors import BackendUnavailable
from lockkit.runtime import drive
from lockkit.testing.stopwatch import Stopwatch
from tests.backends.file.support import Connect, leave_record, open_files
from tests.backends.support import StubHost, granted
from tests.tries import until

_FORK = """
import lockkit, os, sys, time
lease = lockkit.connect(sys.argv[1]).lock("x", ttl=600).acquire()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
sys.stdin.read()
"""


def test_forked_child_does_not_keep_the_dead_parent_alive(connect: Connect, host: StubHost, directory: Path) -> None:
    """It has a copy of the parent's descriptors, and closes it at once."""
    backend = connect(host)
    command = [sys.executable, "-c", _FORK, f"file://{directory}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()

            # As soon as the child has run at all.
            until(lambda: isinstance(drive(backend.try_acquire(host.request(queue=False))), Grant))
        finally:
            os.kill(child, signal.SIGKILL)


_FLOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def flocked(connect: Connect, host: StubHost, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped within the microseconds in which it had the record of the lock x flocked."""
    leave_record(connect(host), host)
    command = [sys.executable, "-c", _FLOCK, str(directory / "x.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


SOON = 2.0
"""Less than the five seconds of a call without a deadline, more than a busy machine takes for half a second."""


def test_calls_with_a_deadline_do_not_wait_for_a_stopped_process(
    connect: Connect, host: StubHost, flocked: subprocess.Popen[bytes]
) -> None:
    """Acquiring, undoing, releasing: each gives up in time, and names the stopped process."""
    backend, now = connect(host), host.runtime.now
    request = host.request()
    grant = Grant("x", request.owner, 1, 30.0)
    began, watch = now(), Stopwatch()

    for answer_by in (began, began + 0.3):
        request.answer_by = answer_by
        request.uncertain = True
        for call in (backend.try_acquire(request), backend.abandon(request), backend.release(grant, answer_by)):
            with pytest.raises(BackendUnavailable, match=rf"process {flocked.pid}\b"):
                drive(call)

    assert watch.stop() < SOON
    flocked.kill()
    flocked.wait()
    granted(drive(backend.try_acquire(host.request())))


def test_stopped_process_delays_no_other_renewal_and_no_other_release(
    connect: Connect, host: StubHost, directory: Path, flocked: subprocess.Popen[bytes]
) -> None:
    """Of many leases, the one whose record it has flocked comes last: the others do not expire meanwhile."""
    del flocked
    (directory / "x.lock").rename(directory / "hidden")
    backend, now = connect(host), host.runtime.now
    names = ["x", *(f"lock {number}" for number in range(20))]
    grants = [granted(drive(backend.try_acquire(host.request(name)))) for name in names]
    # Five times the same lease.
    stuck = [grants[0]] * 5
    (directory / "hidden").rename(directory / "x.lock")
    backend._store.close()

    watch = Stopwatch()
    renewed = drive(backend.renew([*stuck, *grants[1:]]))
    assert watch.stop() < SOON
    watch = Stopwatch()
    with pytest.raises(BackendUnavailable):
        drive(backend.release_all([*stuck, *grants[1:]], now() + 0.3))
    assert watch.stop() < SOON

    assert [type(renewal) for renewal in renewed] == [Unknown] * 5 + [Renewed] * 20
    assert all(drive(backend.holders(name)) == [] for name in names[1:])


def test_number_of_open_records_is_bounded(connect: Connect, host: StubHost) -> None:
    """A client may use any number of names, and hold them all."""
    backend = connect(host)
    before = open_files()
    grants = [granted(drive(backend.try_acquire(host.request(f"lock {index}")))) for index in range(100)]

    assert open_files() <= before + OPEN_RECORDS_MAX + 1
    assert drive(backend.renew(grants)) == [Renewed()] * 100
    assert all(drive(backend.release(grant)) for grant in grants)


def test_threads_share_a_client(connect: Connect, host: StubHost) -> None:
    """More names than records stay open: no thread uses a descriptor that another one has closed."""
    backend = connect(host)
    failures: list[BaseException] = []

    def work(prefix: str) -> None:
        try:
            for index in range(200):
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
    """Ctrl-C between any two system calls: the flock is dropped, and the record decides."""
    backend = connect(host)
    assert drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    real = getattr(record_store, call)
    request = host.request()

    def interrupted(*args: object) -> object:
        monkeypatch.setattr(record_store, call, real)
        if moment == "after":
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(record_store, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(backend.try_acquire(request))

    # As the engine does then.
    request.uncertain = True
    written = (call, moment) == ("_pwrite", "after")
    for client in (connect(host), backend):
        assert [holder.owner for holder in drive(client.holders("x"))] == [request.owner] * written
    drive(backend.abandon(request))
    granted(drive(backend.try_acquire(host.request(queue=False))))
