"""Records that are damaged, foreign, not files, or on a full disk: never two holders, never locked for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockkit.backend import Gone, Grant, Renewed, Unknown
from lockkit.backends.file import directory, record_store
from lockkit.backends.file.backend import FileBackend
from lockkit.backends.file.record import FileClaim, encode
from lockkit.backends.lock_state import Lease, LockState
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import drive
from tests.backends.file.support import LONG, Connect, leave_record, open_files
from tests.backends.support import StubHost, granted, tick


def with_holder(claim: FileClaim) -> LockState[FileClaim]:
    """Make the state of a lock that is held."""
    state: LockState[FileClaim] = LockState(1)
    state.leases[claim.owner] = Lease(claim, 1e9, 1)
    return state


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda text: text[:60],
    "zeros": lambda text: bytes(len(text)),
    "garbage": lambda _: b"\xff\x00garbage\n" * 50,
    "changed": lambda text: text.replace(b"lock", b"luck", 2),
    "flipped": lambda text: text[:80] + bytes([text[80] ^ 1]) + text[81:],
    "odd client": lambda _: encode(with_holder(FileClaim("a" * 32, 30.0, "../clients")), "x", directory.boot_id()),
    "another lock's": lambda _: encode(LockState(1), "other", directory.boot_id()),
}


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest, directory: Path) -> Callable[[], None]:
    """Damages the record of x."""

    def damage() -> None:
        path = directory / "x.lock"
        path.write_bytes(DAMAGES[request.param](path.read_bytes()))

    return damage


def test_damaged_record_is_repaired_at_once_if_no_other_client_lives(
    connect: Connect, frozen: StubHost, damage: Callable[[], None]
) -> None:
    """No client can hold the lock then. Tokens keep increasing."""
    backend = connect(frozen)
    grant = leave_record(backend, frozen)
    drive(backend.close())

    damage()

    assert granted(drive(connect(frozen).try_acquire(frozen.request()))).token > grant.token


def test_damaged_record_grants_nothing_while_an_old_lease_may_last(
    connect: Connect, frozen: StubHost, directory: Path, damage: Callable[[], None]
) -> None:
    """The lock is free when the largest ttl of any live client has passed."""
    holder, other, third = connect(frozen), connect(frozen), connect(frozen)
    granted(drive(other.try_acquire(frozen.request("some other lock", ttl=50.0))))
    grant = granted(drive(holder.try_acquire(frozen.request(ttl=20.0))))

    damage()

    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=rf"{directory}/x.lock .*50.0 s.*lockkit break 'x'"):
            drive(third.try_acquire(frozen.request()))
    (outcome,) = drive(holder.renew([grant]))
    assert isinstance(outcome, Unknown)
    with pytest.raises(BackendUnavailable):
        drive(holder.release(grant))
    with pytest.raises(BackendUnavailable):
        drive(third.holders("x"))
    tick(frozen, 49.9)
    with pytest.raises(BackendUnavailable):
        drive(third.try_acquire(frozen.request()))
    tick(frozen, 0.2)
    assert granted(drive(third.try_acquire(frozen.request()))).token > grant.token
    assert drive(holder.renew([grant])) == [Gone("taken")]


@pytest.mark.parametrize("seen", [False, True])
def test_damaged_record_is_repaired_by_break_lock(
    seen: bool,  # noqa: FBT001
    connect: Connect,
    frozen: StubHost,
    damage: Callable[[], None],
) -> None:
    """As its message says; whether or not a client has met the damage before."""
    holder, other = connect(frozen), connect(frozen)
    grant = granted(drive(holder.try_acquire(frozen.request())))
    damage()
    if seen:
        with pytest.raises(BackendUnavailable):
            drive(other.try_acquire(frozen.request()))

    assert drive(other.break_lock("x"))

    assert granted(drive(other.try_acquire(frozen.request()))).token > grant.token


def test_damaged_record_and_unreadable_client(connect: Connect, frozen: StubHost, directory: Path) -> None:
    """If lockkit cannot tell how long a lease may last, a person must decide."""
    holder, other = connect(frozen), connect(frozen)
    granted(drive(holder.try_acquire(frozen.request())))
    assert holder._directory.fd >= 0
    Path(holder._directory.client_path).write_text("garbage")
    (directory / "x.lock").write_text("garbage")

    with pytest.raises(BackendUnavailable, match=r"cannot tell.*lockkit break 'x'"):
        drive(other.try_acquire(frozen.request()))
    assert drive(other.break_lock("x"))
    granted(drive(other.try_acquire(frozen.request())))


def test_record_of_another_version_is_left_alone(connect: Connect, host: StubHost, directory: Path) -> None:
    """A newer lockkit may hold the lock."""
    backend = connect(host)
    granted(drive(backend.try_acquire(host.request())))
    path = directory / "x.lock"
    text = path.read_bytes().replace(b"lockkit-record 1", b"lockkit-record 2")
    path.write_bytes(text)

    with pytest.raises(ConfigurationError, match="another version of lockkit") as caught:
        drive(backend.try_acquire(host.request()))
    assert (caught.value.name, caught.value.backend) == ("x", f"file://{directory}")
    with pytest.raises(ConfigurationError, match="another version of lockkit"):
        drive(backend.break_lock("x"))

    assert path.read_bytes() == text


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path.mkdir(), "x.lock is a directory: remove it"),
        (lambda path: path.symlink_to("/etc/passwd"), "x.lock is a symbolic link: remove it"),
        (lambda path: path.symlink_to("nowhere"), "x.lock is a symbolic link: remove it"),
        (os.mkfifo, "x.lock is not a regular file: remove it"),
    ],
    ids=["directory", "symlink", "dangling symlink", "fifo"],
)
def test_record_that_is_no_file(
    make: Callable[[Path], None], match: str, connect: Connect, host: StubHost, directory: Path
) -> None:
    """The error says so, and lockkit does not follow links out of the directory."""
    backend = connect(host)
    drive(backend.ping())
    make(directory / "x.lock")
    before = open_files()

    with pytest.raises(ConfigurationError, match=match) as caught:
        drive(backend.try_acquire(host.request()))

    assert (caught.value.name, caught.value.backend) == ("x", f"file://{directory}")
    assert open_files() == before


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        (errno.EACCES, ConfigurationError, r"may not be used by this user: .*\?group=1"),
        (errno.EROFS, ConfigurationError, "read-only file system: name another directory"),
        (errno.ENOSPC, BackendUnavailable, "file system is full: free some space"),
        (errno.EDQUOT, BackendUnavailable, "quota is used up"),
        (errno.EMFILE, BackendUnavailable, "ulimit -n"),
        (errno.EIO, BackendUnavailable, "could not be read or written"),
    ],
)
def test_system_errors_say_what_to_do(  # noqa: PLR0917 - fixtures
    code: int,
    error: type[LockError],
    match: str,
    connect: Connect,
    host: StubHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the table; and when the fault is gone the lock works."""
    backend = connect(host)
    drive(backend.ping())
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".lock"):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(error, match=match):
            drive(backend.try_acquire(host.request()))

    granted(drive(backend.try_acquire(host.request())))


def test_something_in_the_way_of_the_directory(connect: Connect, host: StubHost, tmp_path: Path) -> None:
    """A file where the directory or its parent should be."""
    (tmp_path / "file").write_text("")

    for path in (tmp_path / "file", tmp_path / "file" / "locks"):
        with pytest.raises(ConfigurationError, match="not a directory"):
            drive(connect(host, path=path).ping())


def test_directory_that_may_not_be_made(
    connect: Connect, host: StubHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no home: the error names what is there, and where else to go."""
    home = tmp_path / "home"
    home.mkdir()
    real = os.mkdir

    def refuse(path: str, mode: int = 0o777) -> None:
        if Path(path).parent == home:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", refuse)

    expected = rf"{home}/\.local cannot be made in {home} \(Permission denied\): .*LOCKKIT_STATE_DIR"
    with pytest.raises(ConfigurationError, match=expected):
        drive(connect(host, path=home / ".local" / "state" / "lockkit").ping())


def permit_of(backend: FileBackend, host: StubHost, metadata_size: int) -> Grant:
    """Take one of many permits."""
    request = host.request()
    request.mode, request.limit, request.metadata = "permit", 1000, "x" * metadata_size
    return granted(drive(backend.try_acquire(request)))


def test_record_that_grows_stays_whole_if_its_writer_is_killed(
    connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two writes, also if another client had made the file larger."""
    first, second = connect(host), connect(host)
    grant = permit_of(first, host, 10)
    permit_of(second, host, 6000)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(record_store, "_pwrite", killed)
        with pytest.raises(KeyboardInterrupt):
            drive(first.update(grant, "x" * 200))

    assert len(drive(connect(host).holders("x"))) == 2


def test_record_that_would_be_too_large_stays_as_it_is(connect: Connect, host: StubHost, directory: Path) -> None:
    """Its size has six digits: one more made the record damaged, and ended the leases of all who held permits."""
    backend = connect(host)

    def permit(metadata_size: int) -> Grant:
        return permit_of(backend, host, metadata_size)

    def size() -> int:
        return int((directory / "x.lock").read_bytes().split(maxsplit=4)[3])

    grants = [permit(100_000)]
    first = size()
    grants += [permit(100_000) for _ in range(8)]
    rest = (size() - first) // 8 - 100_000
    grants.append(permit(999_900 - size() - rest))
    assert size() == 999_900  # the file has whole pages: more would fit into it
    with pytest.raises(BackendUnavailable, match="too many hold the lock"):
        permit(200)

    assert drive(backend.renew(grants)) == [Renewed()] * len(grants)


def test_full_disk_later(connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that have a record keep working; new ones and long queues fail, and the record stays intact."""
    backend = connect(host)
    grant = granted(drive(backend.try_acquire(host.request())))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in (directory, record_store):
        monkeypatch.setattr(module, "write_all", refuse)  # what makes a file, or a larger one

    with pytest.raises(BackendUnavailable, match="full: free some space"):
        drive(backend.try_acquire(host.request("new")))
    assert drive(backend.renew([grant])) == [Renewed()]
    waiters = [host.request(ttl=LONG) for _ in range(200)]

    async def queue_up() -> None:
        for waiter in waiters:
            await backend.try_acquire(waiter)

    with pytest.raises(BackendUnavailable, match="full: free some space"):
        drive(queue_up())
    assert len(drive(backend.holders("x"))) == 1
    assert drive(backend.release(grant))
    granted(drive(backend.try_acquire(waiters[0])))
