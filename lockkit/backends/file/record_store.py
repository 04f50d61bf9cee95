"""
The records of a lock directory: which of them are open, and every operation on one of them, under its flock.

It also decides what to do about records that are damaged, of another version, or from before a reboot, and removes the
files of clients that died and the records that nobody uses: a few now and then, by each client. So a directory needs no
separate cleaner, and no call takes long because of it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NoReturn, TypeVar

from lockkit.backend import NamesPage, in_space, seconds_left
from lockkit.backends.file.directory import (
    CHECK_SECONDS,
    CLIENT_CONTENT,
    CLIENT_NAME,
    DETACHED,
    MARKER,
    Directory,
    boot_id,
    is_at,
    is_ours,
    open_file,
    record_file_prefix,
    record_name,
    unlink,
    write_all,
)
from lockkit.backends.file.record import (
    REMOVED,
    SIZE_MAX,
    DamagedError,
    FileClaim,
    RemovedError,
    VersionError,
    decode,
    encode,
    recorded_name,
    size_of,
)
from lockkit.backends.lock_state import Lease, LockState, wall_clock_us
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Runtime
from lockkit.units import Instant
from lockkit.validation import shown, unescape

log = logging.getLogger("lockkit")

T = TypeVar("T")
State = LockState[FileClaim]

CLOSE_SECONDS = 0.2
"""How long closing waits for operations on records that are under way, seconds: one takes a thousandth of that. Longer
delays the end of a client whose disk hangs; shorter leaves descriptors open."""

OPEN_RECORDS_MAX = 64
"""Record files that a client keeps open. More saves opening them again (4 µs), fewer saves descriptors."""

RECENT_NAMES_MAX = 256
"""Names of which a client knows that it made their record lately. It keeps those that it makes again, since making and
removing one takes five times as long as acquiring and releasing a lock; more names, and fewer records go at once."""

PAGE_RECORDS = 128
"""Records that one page of `RecordStore.names` reads. More blocks an event loop for longer (5 ms for this many)."""

READ_TRIES = 5
"""How often a record is read that looks damaged without its flock."""

LINK_CHECK_SECONDS = 0.1
"""How often operations that take nothing check whether another program removed an open record (lockkit itself writes
`REMOVED`). Not each time: it costs 1 µs itself, and makes Linux stamp the next write precisely, which costs the file
system another 2 µs."""

FLOCK_TRIES_AT_ONCE = 16
"""Tries without a pause: together about as long as an operation holds a flock. A pause would take ten times as long."""

FLOCK_PAUSE_SECONDS_MIN = 0.00005
FLOCK_PAUSE_SECONDS_MAX = 0.005
"""Pauses between further tries. They grow in case the process that has the flock is not running."""

IDLE_SECONDS = 600.0
"""Age by the wall clock after which an unused record is removed. Its lock then gets a new one at its next use, which
takes 50 µs. Tokens keep increasing: the directory's marker knows the largest token of the removed records."""

CLEANUP_SECONDS = 10.0
ENTRIES_MIN = 16
ENTRIES_MAX = 512
"""How often a client that is in use examines how many entries of each folder, at least and at most. In between twice as
many as it made, so that records go faster than they come. More often, or more, delays the call that does it (2 µs an
entry, 50 µs for one that is removed); less keeps thousands of unused records for longer."""

_DAMAGED = FileClaim("damaged", 0.0, "", '{"text":"the record was damaged"}')
"""Holds a record that was found damaged, until all leases that it may have held have ended."""

# Looked up once: one acquire and release calls them eight times.
_flock = fcntl.flock
_pread = os.pread
_pwrite = os.pwrite

_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB
_UNLOCK = fcntl.LOCK_UN
# Enough for most records; a longer one takes a second read. Python allocates objects up to 512 bytes faster.
_READ_SIZE = 478

# Retrying does not help here.
_CONFIGURATION = {
    errno.EACCES: "may not be used by this user: fix its owner and mode, or share it with ?group=1",
    errno.EPERM: "may not be used by this user: fix its owner and mode, or share it with ?group=1",
    errno.EROFS: "is on a read-only file system: name another directory",
    errno.EISDIR: "is a directory: remove it",
    errno.ENOTDIR: "has something on its path that is not a directory: remove that, or name another directory",
    errno.EEXIST: "is not a directory: remove it, or name another directory",
    errno.ELOOP: "is a symbolic link: remove it",
    errno.ENXIO: "is not a regular file: remove it",
    errno.ESPIPE: "is not a regular file: remove it",
    errno.ENAMETOOLONG: "is too long for this file system: name a directory with a shorter path",
}
_UNAVAILABLE = {
    errno.ENOSPC: "could not be written, the file system is full: free some space",
    errno.EDQUOT: "could not be written, the disk quota is used up: free some space",
    errno.EFBIG: "could not be written, this process may not write files of that size (ulimit -f): raise the limit",
    errno.EMFILE: "could not be opened, this process has too many open files: raise its limit (ulimit -n)",
    errno.ENFILE: "could not be opened, this machine has too many open files",
}


@dataclass(slots=True, eq=False)
class _Record:
    """
    One open record.

    The last state is kept in memory, because parsing a record takes as long as all system calls of an operation.
    """

    name: str
    escaped: str
    path: str
    fd: int  # -1 when closed
    status: os.stat_result  # of the file when it was opened
    size: int  # a record may become so long without a change of the file's size
    single_use: bool  # this client made it, and lately no other of that name: it goes with the release
    # Held during an operation and `close`, by the threads of this client: they share the descriptor, and so the flock.
    mutex: threading.Lock = field(default_factory=threading.Lock)
    text: bytes = b""  # the record that `state` was read from or written as; empty if `state` must not be used
    state: State = field(default_factory=State)
    check_at: Instant = 0.0  # when an operation that takes nothing looks whether another program removed it
    look_at: Instant = 0.0  # when a waiter looks at it again that nothing has woken

    def write(self, text: bytes) -> None:
        """Write the record, as a whole."""
        if len(text) > self.size:
            if len(text) > SIZE_MAX:
                message = (
                    f"{self.path} would need {len(text)} bytes, and a record has at most {SIZE_MAX}: too many hold the "
                    "lock beside one another, or wait for it. Give them shorter metadata, or use another backend"
                )
                raise BackendUnavailable(message)
            # What is behind the file's end first. The disk may be full: find out before anything has changed.
            end = os.fstat(self.fd).st_size  # another client may have moved it
            write_all(self.fd, text[end:], end)
            self.size = min(max(end, len(text)), SIZE_MAX)
        _pwrite(self.fd, text, 0)

    def close(self) -> None:
        """Close the descriptor. Idempotent. Under `mutex`, or where no other thread can use the record."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class RecordStore:
    """The records that one client uses."""

    def __init__(self, runtime: Runtime, directory: Directory, url: str) -> None:
        """Open nothing yet."""
        self._runtime, self._now = runtime, runtime.now
        self._directory, self._url = directory, url
        self._warnings: deque[tuple[str, str, str, float]] = deque()
        self._records: dict[str, _Record] = {}
        self.clear()

    def clear(self) -> None:
        """Close everything and start again: in a forked child, or after the client was dropped. No thread uses it."""
        for record in self._records.values():
            record.close()
        # Real ones, also under asyncio: they are never held across an await.
        self._mutex = threading.Lock()
        self._cleaning = threading.Lock()
        self._records = {}
        self._recent: dict[str, None] = {}
        self._made_count = 0  # records made since the last cleaning
        self._clean_at = 0.0
        self._entries: dict[str, list[str]] = {}  # the names in a folder that come next

    def close(self) -> None:
        """Close the records; each is opened again when needed. One that a thread uses at a disk that hangs stays."""
        with self._mutex:
            records, self._records = self._records, {}
        until = self._now() + CLOSE_SECONDS
        for record in records.values():
            # When no other thread uses it: else that could write into a file that gets the number of the descriptor.
            if record.mutex.acquire(timeout=max(0.0, until - self._now())):
                try:
                    record.close()
                finally:
                    record.mutex.release()

    # -- one operation on one record -------------------------------------------------------------------------------

    def ping(self) -> None:
        """Make the directory and the client file if they are missing."""
        try:
            self._check(self._now())
        except (OSError, LockError) as error:
            self._fail(error, None, self._directory.path)

    def _check(self, now: Instant) -> None:
        self._directory.check(now)
        self._clean(now)

    async def update(
        self,
        name: str,
        change: Callable[[State, float], T],
        answer_by: float = inf,
        taking: bool = False,  # noqa: FBT001, FBT002 - faster than those that are only given by name
        forced: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> T:
        """Call `change` with the state of a lock, and keep the state that it leaves, under the flock of the record."""
        tries, began, now = 0, 0.0, 0.0
        while True:
            try:
                now = self._now()
                if now >= self._directory.check_at:
                    self._check(now)
                record = self._records.get(name) or self._open(name, create=taking)
                if record is None:
                    return change(State(), now)
                with record.mutex:
                    return self._apply(record, change, now, taking, forced)
            except RemovedError:
                self._drop(name)
            except BlockingIOError:
                began, tries = began or now, tries + 1
                await self._wait_for_flock(name, tries, began, answer_by)
            except (OSError, LockError) as error:
                self._fail(error, name, self._path(name))
            finally:
                # Not under mutex and flock: a handler may be slow, or use a lock of this client.
                while self._warnings:
                    log.warning(*self._warnings.popleft())

    def _apply(
        self,
        record: _Record,
        change: Callable[[State, float], T],
        now: Instant,
        taking: bool,  # noqa: FBT001
        forced: bool,  # noqa: FBT001
    ) -> T:
        """Read a record, call `change`, and write the record if that changed it: all under its mutex and flock."""
        fd = record.fd
        if fd < 0:
            raise RemovedError  # closed by another thread, to open another record
        # The flock within the try: an interrupt may come in the instant in which it is granted.
        try:
            _flock(fd, _LOCK)
            if taking or now >= record.check_at:
                if not is_at(record.status, record.path):
                    raise RemovedError  # noqa: TRY301 - as what `_load` raises
                record.check_at = now + LINK_CHECK_SECONDS
            text = _pread(fd, _READ_SIZE, 0)
            # If an interrupt comes from here on, the copy in memory may differ from the file.
            known, record.text = record.text, b""
            if known and text.startswith(known):
                state = record.state
            else:
                state, known = self._load(record, text, now, forced)
            result = change(state, now)
            text = encode(state, record.escaped, boot_id())
            if text != known:
                record.write(text)
            record.state, record.text = state, text
            return result  # noqa: TRY300 - one place for all that happens under the flock
        except RemovedError:
            # The process that wrote REMOVED may have died before it removed the file.
            if is_at(record.status, record.path):
                os.unlink(record.path)  # noqa: PTH108
            record.close()
            raise
        finally:
            if record.fd >= 0:
                _flock(fd, _UNLOCK)

    async def _wait_for_flock(self, name: str, tries: int, began: float, answer_by: float) -> None:
        """
        Pause before the next try: not at first, then for longer and longer; raise if it would be too late.

        No process has the flock of a record for more than some microseconds unless it is stopped.
        """
        if tries <= FLOCK_TRIES_AT_ONCE:
            return
        now, path = self._now(), self._path(name)
        left = began + seconds_left(answer_by, began) - now
        if left <= 0:
            message = (
                f"{path} has been flocked for {now - began:.1f} s by {_flock_owner(path)}, which was stopped within "
                "the few microseconds that this takes, or does not use lockkit: let it continue, or end it"
            )
            self._fail(BackendUnavailable(message), name, path)
        pause = min(FLOCK_PAUSE_SECONDS_MIN * 2 ** (tries - FLOCK_TRIES_AT_ONCE), FLOCK_PAUSE_SECONDS_MAX)
        await self._runtime.sleep(min(pause * self._runtime.random.uniform(0.5, 1.5), left))

    def _fail(self, error: OSError | LockError, name: str | None, path: str) -> NoReturn:
        """Raise an error of lockkit's that says which lock and which backend it is about."""
        # `BackendUnavailable` is an OSError too.
        explained = error if isinstance(error, LockError) else _explain(error, path)
        explained.name, explained.backend = name, self._url
        raise explained from (explained.__cause__ if explained is error else error)

    def must_look(self, name: str) -> bool:
        """
        Tell a waiter that nothing has woken for `CHECK_SECONDS` whether to try again.

        Of all readers of this client that wait for a lock, only one: reading a record takes the longer, the more wait,
        and a thousand that each read it once a second would use up a core.
        """
        record, now = self._records.get(name), self._now()
        if record is None or now >= record.look_at:
            if record is not None:
                record.look_at = now + CHECK_SECONDS / 2  # less, in case that a wait ends a moment early
            return True
        return not is_at(record.status, record.path)

    # -- listing ---------------------------------------------------------------------------------------------------

    def names(self, prefix: str, start: list[str] | None) -> NamesPage:
        """
        Return the locks that are held or waited for, of some of the records.

        A record is written as a whole, so it can be read without its flock. A damaged one is left out.
        """
        try:
            if start is None:
                self._check(self._now())
                begin = record_file_prefix(prefix)
                entries = os.listdir(self._directory.path)  # noqa: PTH208 - names, not paths
                start = [entry for entry in entries if entry.startswith(begin) and entry.endswith(".lock")]
            part, left = start[:PAGE_RECORDS], start[PAGE_RECORDS:]
            names = [name for file in part if (name := self._name_in_use(file, prefix)) is not None]
        except (OSError, LockError) as error:
            self._fail(error, None, self._directory.path)
        return NamesPage(names, left or None)

    def _name_in_use(self, file: str, prefix: str) -> str | None:
        """Return the name of the lock in a record file if it is held or waited for."""
        for _ in range(READ_TRIES):
            try:
                fd = open_file(f"{self._directory.path}/{file}")
                try:
                    text = _read(fd)
                finally:
                    os.close(fd)
                state, boot = decode(text, None)
                name = unescape(recorded_name(text))
            except DamagedError:
                continue  # a long one is read in two parts, between which it may have been written
            except (FileNotFoundError, RemovedError, VersionError, ConfigurationError):
                return None  # removed meanwhile; or for its next user to see
            if boot != boot_id() or record_name(name)[1] != file or not in_space(name, prefix):
                return None
            return name if state.in_use(self._now(), self.dead) else None
        return None

    def dead(self, claim: FileClaim) -> bool:
        """Tell whether the client of a claim has ended."""
        return self._directory.has_ended(claim.client)

    # -- records that cannot be used as they are -------------------------------------------------------------------

    def _load(self, record: _Record, text: bytes, now: Instant, forced: bool) -> tuple[State, bytes]:  # noqa: FBT001
        """Parse a record; repair it if it is damaged."""
        try:
            text = _read(record.fd, text)
            state, boot = decode(text, record.escaped)
        except VersionError as error:
            message = (
                f"{record.path} was written by another version of lockkit (record version {error}): "
                "use that version, or remove the file when nobody uses the lock"
            )
            raise ConfigurationError(message) from error
        except DamagedError as error:
            if not (is_ours(text) or self._directory.read_marker()[0]):
                message = (
                    f"{record.path} is not a record: another program made it, and lockkit leaves it as it is. Use a "
                    "directory of its own for the locks, or another name; if it was a record, remove it"
                )
                raise ConfigurationError(message) from error
            state, boot = self._repaired(record, error, now, forced=forced), boot_id()
            text = encode(state, record.escaped, boot)
            record.write(text)  # now: it stays even if the rest of the operation fails
        if boot != boot_id():
            self._free_after_boot(record, state)
        # Read after the record was made: what another client removed before that has raised it.
        state.token = state.token or self._directory.read_marker()[1]
        holder = state.alone
        if holder is not None and not holder.claim.client and now < holder.until and not forced:
            message = (
                f"the record {record.path} was found damaged; the lock is free in {holder.until - now:.1f} s, when "
                "every lease that it may have held has ended. If nobody holds the lock: lockkit break "
                f"{shown(record.name)}"
            )
            raise BackendUnavailable(message)
        return state, text

    def _repaired(self, record: _Record, error: DamagedError, now: Instant, *, forced: bool) -> State:
        """
        Give the state to write into a damaged record: held by nobody until the last possible lease has ended.

        The token starts again from the wall clock, which is above all tokens before.
        """
        state = State()
        if forced:
            until = now + 1.0  # any time will do: the lock is about to be freed
        else:
            ttl_max = self._directory.live_ttl_max()
            if ttl_max is None:
                message = (
                    f"the record {record.path} is damaged ({error}), and lockkit cannot tell when its lease ends: a "
                    f"file in {self._directory.clients} is damaged too. If nobody holds the lock: lockkit break "
                    f"{shown(record.name)}"
                )
                raise BackendUnavailable(message) from error
            until = now + ttl_max
            warning = "the record %s is damaged (%s); the lock is free in %.1f s"
            self._warnings.append((warning, record.path, str(error), until - now))
        if until > now:
            state.leases[_DAMAGED.owner], state.until = Lease(_DAMAGED, until, state.token), inf
        return state

    def _free_after_boot(self, record: _Record, state: State) -> None:
        """Free a lock that was held when the machine was shut down."""
        for claim in state.claims:
            if claim.client not in {"", DETACHED} and not self.dead(claim):
                message = (
                    f"{record.path} is in use under another kernel or time namespace, whose times mean nothing here: "
                    "name a directory that only this machine uses, or use a backend for several machines"
                )
                raise ConfigurationError(message)
        state.leases.clear()
        state.queue.clear()

    # -- open records ----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._directory.path}/{record_name(name)[1]}"

    def _open(self, name: str, *, create: bool) -> _Record | None:
        """Open a record, and close another if too many are open; None if it is missing and must not be made."""
        escaped, file_name = record_name(name)
        path, made = f"{self._directory.path}/{file_name}", False
        if len(self._records) >= OPEN_RECORDS_MAX:
            self.close()
        with self._mutex:
            if name in self._records:
                return self._records[name]
            try:
                fd, status = self._directory.open(path)
            except FileNotFoundError:
                if not create:
                    return None
                made = self._make(path, escaped)
                fd, status = self._directory.open(path)
            single_use = made and name not in self._recent
            record = self._records[name] = _Record(
                name, escaped, path, fd, status, min(status.st_size, SIZE_MAX), single_use
            )
            if made:
                self._made_count += 1
                self._recent[name] = None
                if len(self._recent) > RECENT_NAMES_MAX:
                    del self._recent[next(iter(self._recent))]
            # Another program may have replaced the directory since the last check, and with it the client file.
            self._directory.check_soon()
        return record

    def _make(self, path: str, escaped: str) -> bool:
        """
        Make a record under another name and link it, complete, to its own: no process ever sees an empty one.

        Its block is filled, so that most later records need no free disk space. Returns False if another process makes
        it at the same time.
        """
        directory = self._directory
        hidden = f"{directory.path}/.new-{self._runtime.owner()}"
        content = encode(State(), escaped, boot_id()).ljust(4096, b"\n")
        try:
            fd = directory.create(hidden, content)
        except FileNotFoundError:
            directory.prepare()  # another program removed it while this client used it
            fd = directory.create(hidden, content)
        os.close(fd)
        try:
            os.link(hidden, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EOPNOTSUPP}:
                raise
            message = f"{directory.path} is on a file system without hard links: name another directory"
            raise ConfigurationError(message) from error
        finally:
            unlink(hidden)
        return True

    def _drop(self, name: str) -> None:
        """Forget a record whose file was closed, so that it is opened again."""
        with self._mutex:
            record = self._records.get(name)
            if record is not None and record.fd < 0:
                del self._records[name]

    # -- cleaning --------------------------------------------------------------------------------------------------

    def remove_single_use(self, name: str) -> None:
        """Remove the record of a lock that was released, if it is unused and its name is not one that comes again."""
        record = self._records.get(name)
        if record is None or not record.single_use:
            return
        with suppress(OSError):  # then it goes later
            if self.remove(record.path):
                with record.mutex:
                    record.close()
                self._drop(name)

    def _clean(self, now: Instant) -> None:
        """Examine some files if it is time to."""
        if now < self._clean_at or not self._cleaning.acquire(blocking=False):
            return
        try:
            self._clean_at = now + CLEANUP_SECONDS
            count, self._made_count = min(max(ENTRIES_MIN, 2 * self._made_count), ENTRIES_MAX), 0
            for folder in (self._directory.clients, self._directory.path):
                names = self._entries.get(folder) or os.listdir(folder)  # noqa: PTH208 - names, not paths
                self._entries[folder] = names[count:]
                for name in names[:count]:
                    # Else another client was faster, or the file belongs to another user in a sticky directory.
                    with suppress(OSError):
                        self._examine(folder, name)
        finally:
            self._cleaning.release()

    def _examine(self, folder: str, name: str) -> None:
        """Remove the file of a dead client, or a record that nobody uses."""
        if folder == self._directory.clients:
            if CLIENT_NAME.fullmatch(name):
                self._directory.has_ended(name)
        elif name.endswith(".lock"):
            path = f"{folder}/{name}"
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and wall_clock_us() / 1e6 - status.st_mtime >= IDLE_SECONDS:
                self.remove(path)

    def remove(self, path: str) -> bool:
        """Remove a record that nobody uses; return whether it was one."""
        fd = open_file(path)
        try:
            fcntl.flock(fd, _LOCK)
            # Another client may have removed it before the flock, and a third made it again and holds it.
            if is_at(os.fstat(fd), path) and _is_made_here(fd, path) and self._is_unused(fd):
                os.unlink(path)  # noqa: PTH108
                return True
        except (BlockingIOError, ConfigurationError):
            pass  # in use after all; or the marker is another user's
        finally:
            os.close(fd)
        return False

    def _is_unused(self, fd: int) -> bool:
        """Mark a record as removed if nobody holds or awaits its lock; return whether it is. Under its flock."""
        try:
            state, boot = decode(_read(fd), None)
        except RemovedError:
            return True  # the process that wrote REMOVED died before it removed the file
        noted = state.note is not None and state.note[1] > wall_clock_us()
        if noted or (boot == boot_id() and state.in_use(self._now(), self.dead)):
            return False
        self._directory.raise_token_floor(state.token)
        os.pwrite(fd, REMOVED, 0)
        return True

    def erase(self) -> None:
        """Remove all that is lockkit's, in use or not, and the directory itself if lockkit made it."""
        directory = self._directory
        made, _ = directory.read_marker()
        for folder in (directory.clients, directory.path):
            with suppress(FileNotFoundError):
                for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
                    path = f"{folder}/{name}"
                    if not stat.S_ISREG(os.lstat(path).st_mode):
                        continue
                    fd = open_file(path)
                    try:
                        if _is_made_here(fd, path):
                            unlink(path)
                    finally:
                        os.close(fd)
        if made:
            with suppress(OSError):  # something else is in it, or it is gone already
                os.rmdir(directory.clients)  # noqa: PTH106
                unlink(f"{directory.path}/{MARKER}")
                os.rmdir(directory.path)  # noqa: PTH106


def _read(fd: int, text: bytes = b"") -> bytes:
    """Read a record, of which this may be the beginning, without what may follow after its end."""
    text = text or _pread(fd, _READ_SIZE, 0)
    size = size_of(text)
    return text[:size] if size <= len(text) else _pread(fd, size, 0)


def _is_made_here(fd: int, path: str) -> bool:
    """Tell from its name and its content whether lockkit made a file."""
    name = os.path.basename(path)  # noqa: PTH119
    if name.endswith(".lock"):
        try:
            text = _read(fd)
            decode(text, None)
            return record_name(unescape(recorded_name(text)))[1] == name
        except RemovedError:
            return True
        except (DamagedError, VersionError, ConfigurationError):
            return False
    return CLIENT_NAME.fullmatch(name) is not None and CLIENT_CONTENT.match(os.pread(fd, 100, 0)) is not None


def _flock_owner(path: str) -> str:
    """Name the process that has a record flocked, for messages."""
    with suppress(OSError):  # macOS, or no /proc: the message does without
        inode = Path(path).stat().st_ino
        # proc_locks(5): number, FLOCK, ADVISORY, WRITE, pid, major:minor:inode, start, end
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[-3].rpartition(":")[2] == str(inode):
                return f"process {fields[-4]}"
    return "a process that this one cannot see"


def _explain(error: OSError, path: str) -> LockError:
    """Turn an error of the operating system into one of lockkit's."""
    where = error.filename if isinstance(error.filename, str) else path
    code = error.errno or 0
    if code in _CONFIGURATION:
        return ConfigurationError(f"{where} {_CONFIGURATION[code]} ({error.strerror})")
    said = _UNAVAILABLE.get(code, "could not be read or written")
    return BackendUnavailable(f"{where} {said} ({error.strerror})")
