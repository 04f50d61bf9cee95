"""Files that another program removed, reboots, and the cleaning that lockkit does itself."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lockkit.backend import Busy, Gone, Renewed
from lockkit.backends import lock_state
from lockkit.backends.file import backend as file
from lockkit.backends.file import record_store
from lockkit.backends.file.record import REMOVED
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import drive
from lockkit.testing.processes import Worker
from lockkit.testing.target import Target
from tests.backends.file.support import LONG, Connect, acquire, leave_record, waiter_count
from tests.backends.support import StubHost, granted, tick
from tests.tries import until


def test_record_removed_by_a_stranger(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """The lock is free, also for a client that has the old file open; the holder learns it; tokens keep increasing."""
    holder, other = connect(frozen), connect(frozen)
    grant = granted(drive(holder.try_acquire(frozen.request())))
    assert isinstance(drive(other.try_acquire(frozen.request(queue=False))), Busy)

    (directory / "x.lock").unlink()

    assert granted(drive(other.try_acquire(frozen.request()))).token > grant.token
    tick(frozen, 0.2)
    assert drive(holder.renew([grant])) == [Gone("taken")]


def test_directory_removed_by_a_stranger(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """A client makes it again, and the clients exclude each other there."""
    first, second = connect(frozen), connect(frozen)
    granted(drive(first.try_acquire(frozen.request())))
    granted(drive(second.try_acquire(frozen.request("y"))))

    directory.rename(directory.with_name("moved"))
    tick(frozen, 2.0)

    granted(drive(second.try_acquire(frozen.request())))
    assert isinstance(drive(first.try_acquire(frozen.request(queue=False))), Busy)


def test_client_file_removed_by_a_stranger(
    connect: Connect, frozen: StubHost, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client seems dead for a moment; it logs that, and holds again what it renews."""
    holder, other = connect(frozen), connect(frozen)
    grant = granted(drive(holder.try_acquire(frozen.request(ttl=5.0))))
    granted(drive(holder.try_acquire(frozen.request("long", ttl=20.0))))
    assert holder._directory.fd >= 0
    Path(holder._directory.client_path).unlink()
    drive(other.ping())
    tick(frozen, 2.0)

    assert drive(holder.renew([grant])) == [Renewed()]

    assert "was removed; locks that were held may be lost" in caplog.text
    assert isinstance(drive(other.try_acquire(frozen.request(ttl=5.0))), Busy)
    # The new file still has the largest ttl that the client asked for before.
    (directory / "x.lock").write_text("garbage")
    with pytest.raises(BackendUnavailable, match=r"20\.0 s"):
        drive(other.try_acquire(frozen.request()))


@pytest.mark.parametrize("lost", ["record", "directory", "client file"])
def test_waiter_learns_by_itself_what_was_removed(connect: Connect, host: StubHost, directory: Path, lost: str) -> None:
    """No release reaches it then: it must not sleep until the lease in the removed record would have ended."""
    holder, waiter = connect(host), connect(host)
    grant = granted(drive(holder.try_acquire(host.request(ttl=LONG))))
    waiting = threading.Thread(target=acquire, args=(waiter, host.request(ttl=LONG)), daemon=True)
    waiting.start()
    until(lambda: waiter_count(holder) == 1)

    if lost == "record":
        (directory / "x.lock").unlink()
    elif lost == "directory":
        directory.rename(directory.with_name("moved"))
    else:
        former = waiter._directory.client_id
        Path(waiter._directory.client_path).unlink()
        until(lambda: waiter._directory.client_id != former)
        drive(holder.release(grant))

    until(lambda: not waiting.is_alive())


def test_record_from_before_a_reboot_is_free(
    connect: Connect, frozen: StubHost, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its times are; tokens keep increasing."""
    holder = connect(frozen)
    grant = granted(drive(holder.try_acquire(frozen.request(ttl=LONG))))
    drive(holder.close())
    monkeypatch.setattr(record_store, "boot_id", lambda: "after-the-reboot")
    monkeypatch.setattr(file, "wall_clock_us", lambda: 0)

    again = granted(drive(connect(frozen).try_acquire(frozen.request())))

    assert again.token == grant.token + 1
    assert b"after-the-reboot" in (directory / "x.lock").read_bytes()


def test_directory_shared_by_two_kernels_is_refused(
    connect: Connect, frozen: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another boot id, but its client lives: their clocks cannot be compared."""
    granted(drive(connect(frozen).try_acquire(frozen.request())))
    monkeypatch.setattr(record_store, "boot_id", lambda: "another-kernel")

    with pytest.raises(ConfigurationError, match="another kernel"):
        drive(connect(frozen).try_acquire(frozen.request()))


@pytest.fixture
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients examine all files whenever they clean."""
    monkeypatch.setattr(record_store, "ENTRIES_MIN", 1000)
    monkeypatch.setattr(record_store, "ENTRIES_MAX", 1000)


def age(directory: Path) -> None:
    """Make all files look unused for two days."""
    for path in directory.rglob("*"):
        if path.is_file():
            changed = path.stat().st_mtime - 2 * 24 * 3600
            os.utime(path, (changed, changed))


@pytest.mark.usefixtures("thorough")
def test_unused_records_are_removed(connect: Connect, host: StubHost, directory: Path) -> None:
    """Also while another client has them open, which then makes a new one; tokens keep increasing."""
    user = connect(host)
    used = leave_record(user, host, "used")
    granted(drive(user.try_acquire(host.request("held", ttl=LONG))))
    age(directory)
    leave_record(user, host, "recent")

    drive(connect(host).ping())

    assert {path.name for path in directory.iterdir()} == {"held.lock", "recent.lock", "clients", ".lockkit"}
    again = granted(drive(user.try_acquire(host.request("used"))))
    assert again.token > used.token
    assert (directory / "used.lock").exists()
    assert isinstance(drive(connect(host).try_acquire(host.request("used", queue=False))), Busy)


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("detached", [True, False])
def test_records_of_leases_that_ended_without_a_release_are_removed(
    connect: Connect, frozen: StubHost, directory: Path, *, detached: bool
) -> None:
    """Of a minimum hold, which outlives its client, and of a client that lives on and does not renew."""
    user = connect(frozen)
    grant = granted(drive(user.try_acquire(frozen.request(ttl=LONG))))
    if detached:
        drive(user.detach(grant))
    for seconds, left in ((LONG / 2, ["x.lock"]), (LONG, [])):
        tick(frozen, seconds)
        age(directory)
        drive(connect(frozen).ping())
        assert [path.name for path in directory.glob("*.lock")] == left


@pytest.mark.usefixtures("thorough")
def test_record_with_a_note_is_kept_until_its_end(
    connect: Connect, host: StubHost, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says for days what was done; a reboot does not end it."""
    user = connect(host)
    grant = granted(drive(user.try_acquire(host.request())))
    assert drive(user.write_note(grant, "done", 3600.0))
    drive(user.release(grant))
    drive(user.close())
    age(directory)
    monkeypatch.setattr(record_store, "boot_id", lambda: "after-the-reboot")

    drive(connect(host).ping())

    note = drive(connect(host).read_note("x"))
    assert note is not None
    assert note.text == "done"
    wall_us = lock_state.wall_clock_us()
    monkeypatch.setattr(record_store, "wall_clock_us", lambda: wall_us + 3601 * 10**6)
    age(directory)
    drive(connect(host).ping())
    assert not (directory / "x.lock").exists()


def test_tokens_increase_when_a_record_was_removed_and_the_clock_set_back(
    connect: Connect, host: StubHost, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory knows the largest token of the records that went; a name that is used once goes at its release."""
    user = connect(host)
    grant = granted(drive(user.try_acquire(host.request())))
    assert drive(user.release(grant))
    assert list(directory.glob("*.lock")) == []
    wall_us = lock_state.wall_clock_us()
    monkeypatch.setattr(file, "wall_clock_us", lambda: wall_us - 3600 * 10**6)

    assert granted(drive(connect(host).try_acquire(host.request()))).token > grant.token


def test_names_that_are_used_once_leave_nothing(connect: Connect, host: StubHost, directory: Path) -> None:
    """Callers over HTTP choose names: they must not fill the disk. A name that comes again keeps its record."""
    client = connect(host)

    for number in range(300):
        assert drive(client.release(granted(drive(client.try_acquire(host.request(f"order-{number}"))))))
    leave_record(client, host)

    assert [path.name for path in directory.glob("*.lock")] == ["x.lock"]


def test_record_of_a_name_that_is_used_once_stays_while_another_waits(
    connect: Connect, host: StubHost, directory: Path
) -> None:
    """The waiter has its place in the record, and its note is there."""
    holder, waiter = connect(host), connect(host)
    awaited, noted = (granted(drive(holder.try_acquire(host.request(name)))) for name in ("awaited", "noted"))
    assert isinstance(drive(waiter.try_acquire(host.request("awaited"))), Busy)
    assert drive(holder.write_note(noted, "done", 60.0))

    assert drive(holder.release(awaited))
    assert drive(holder.release(noted))

    assert {path.name for path in directory.glob("*.lock")} == {"awaited.lock", "noted.lock"}


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        *("of the user", "lockkit-client notes of the user", "lockkit-record of the year"),
        *("\0" * 200 + "data", "\0" * 1_000_000 + "data"),
    ],
    ids=len,
)
def test_files_of_others_are_left_alone(
    connect: Connect, host: StubHost, directory: Path, content: str, *, erase: bool
) -> None:
    """In a home directory given as the directory of locks, whatever the names are."""
    others = {
        *(".bashrc", ".new-left", f".new-{'a' * 32}", "damaged.lock", "poetry.lock", "notes", ".lockkit-notes"),
        *("clients/acme", "clients/.acme", f"clients/{'a' * 16}", f"clients/.{'b' * 16}", "clients/beef"),
    }
    (directory / "clients").mkdir(parents=True, mode=0o700)
    for name in others:
        (directory / name).write_text(content)
    age(directory)

    client = connect(host)
    drive(client.ping())
    if erase:
        drive(client.erase())

    assert others <= {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_file_of_another_program_is_no_record(connect: Connect, host: StubHost, directory: Path) -> None:
    """``poetry.lock`` of a project, in whose directory somebody takes the lock ``poetry``."""
    directory.mkdir(mode=0o700)
    path = directory / "poetry.lock"
    path.write_text("[[package]]\n")
    client = connect(host)

    for call in (client.try_acquire(host.request("poetry")), client.holders("poetry"), client.break_lock("poetry")):
        with pytest.raises(ConfigurationError, match="another program made it") as caught:
            drive(call)
        assert caught.value.name == "poetry"
    assert path.read_text() == "[[package]]\n"


def test_marker_of_another_program_is_left_alone(connect: Connect, host: StubHost, directory: Path) -> None:
    """Then no record is removed, since nothing would keep its token."""
    directory.mkdir(mode=0o700)
    marker = directory / ".lockkit"
    marker.write_text("theirs")
    client = connect(host)

    grant = granted(drive(client.try_acquire(host.request())))
    assert drive(client.release(grant))

    assert marker.read_text() == "theirs"
    assert (directory / "x.lock").exists()


def test_erasing_leaves_a_directory_that_lockkit_did_not_make(
    connect: Connect, host: StubHost, directory: Path, tmp_path: Path
) -> None:
    """One that it made goes, unless something else is in it."""
    directory.mkdir(mode=0o700)
    given, made, shared = (connect(host, path=path) for path in (directory, tmp_path / "made", tmp_path / "shared"))
    for client in (given, made, shared):
        granted(drive(client.try_acquire(host.request())))
    (tmp_path / "shared" / "notes").touch()

    for client in (given, made, shared):
        drive(client.erase())

    assert directory.exists()
    assert not (tmp_path / "made").exists()
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"notes"}


def test_record_that_was_removed_halfway_is_made_anew(connect: Connect, host: StubHost, directory: Path) -> None:
    """The process that removed it died after writing the mark."""
    backend = connect(host)
    grant = leave_record(backend, host)
    path = directory / "x.lock"
    path.write_bytes(REMOVED + path.read_bytes()[len(REMOVED) :])

    assert granted(drive(backend.try_acquire(host.request()))).token > grant.token
    assert path.read_bytes().startswith(b"lockkit-record 1")


@pytest.mark.usefixtures("thorough")
def test_record_that_was_made_anew_is_kept_by_a_cleaner_that_opened_the_former_one(
    connect: Connect, host: StubHost, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients clean at once. Between two steps of the first, the second removes the record; it is made again."""
    first, holder = connect(host), connect(host)
    leave_record(first, host)
    path = directory / "x.lock"
    former = os.open(path, os.O_RDWR)
    path.write_bytes(REMOVED)
    path.unlink()
    granted(drive(holder.try_acquire(host.request())))
    monkeypatch.setattr(record_store, "open_file", lambda _: former)

    assert not first._store.remove(str(path))

    assert isinstance(drive(connect(host).try_acquire(host.request(queue=False))), Busy)


@pytest.mark.usefixtures("thorough")
def test_records_and_files_of_dead_clients_are_removed(connect: Connect, host: StubHost, directory: Path) -> None:
    """Their holders and waiters were killed. A record with a live waiter is kept; tokens keep increasing."""
    living = connect(host)
    with Worker(Target(f"file://{directory}"), "blocking") as worker:
        token = worker.acquire("held", ttl=LONG).token
        worker.acquire("awaited", ttl=LONG)
        assert isinstance(drive(living.try_acquire(host.request("awaited", ttl=LONG))), Busy)
        grant = granted(drive(living.try_acquire(host.request("x", ttl=LONG))))
        worker.start_acquire("x", ttl=LONG)
        until(lambda: waiter_count(living) == 1)
        worker.kill()
    # As after a holder that has ended.
    assert drive(living.release(grant))
    age(directory)

    cleaner = connect(host)
    drive(cleaner.ping())

    assert {path.name for path in directory.glob("*.lock")} == {"awaited.lock"}
    living_ids = {living._directory.client_id, cleaner._directory.client_id}
    assert {path.name for path in (directory / "clients").iterdir()} == living_ids
    assert granted(drive(living.try_acquire(host.request("held")))).token > token


def test_client_removes_all_unused_records_bit_by_bit(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """Not only when it starts, a few at a time, and however many there are."""
    former, backend = connect(frozen), connect(frozen)
    for number in range(60):
        leave_record(former, frozen, f"lock {number}")
    drive(former.close())
    drive(backend.ping())
    age(directory)
    counts = [60]

    while counts[-1]:
        tick(frozen, record_store.CLEANUP_SECONDS)
        drive(backend.ping())
        counts.append(len(list(directory.glob("*.lock"))))
        assert counts[-2] - counts[-1] <= record_store.ENTRIES_MIN
        assert len(counts) < 100


def test_nothing_is_logged_under_a_mutex(connect: Connect, host: StubHost, directory: Path) -> None:
    """A handler may write the log under a lock of the same client, even of the same name."""
    backend = connect(host)
    drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    seen = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            def look() -> None:
                with suppress(BackendUnavailable):
                    drive(backend.holders("x"))
                seen.append(record.getMessage())

            thread = threading.Thread(target=look)
            thread.start()
            thread.join(30)

    handler = Handler()
    logging.getLogger("lockkit").addHandler(handler)
    try:
        assert backend._directory.fd >= 0
        Path(backend._directory.client_path).unlink()
        backend._directory.check_soon()
        drive(backend.ping())
        (directory / "x.lock").write_text("garbage")
        with pytest.raises(BackendUnavailable):
            drive(backend.try_acquire(host.request()))
    finally:
        logging.getLogger("lockkit").removeHandler(handler)

    assert ["was removed" in seen[0], "is damaged" in seen[1]] == [True, True]


def test_client_that_lives_long_touches_its_file(connect: Connect, frozen: StubHost) -> None:
    """Cleaners of temporary directories would remove it."""
    backend = connect(frozen)
    grant = granted(drive(backend.try_acquire(frozen.request(ttl=1e6))))
    assert backend._directory.fd >= 0
    os.utime(backend._directory.client_path, (0, 0))
    drive(backend.renew([grant]))
    assert Path(backend._directory.client_path).stat().st_mtime == 0

    tick(frozen, 2 * 3600.0)
    drive(backend.renew([grant]))

    assert Path(backend._directory.client_path).stat().st_mtime > 0
