"""
The records of a lock directory: which of them are open, and every operation on one of them, under its flock.

It also decides what to do about records that are damaged, of another version, or from before a reboot.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NoReturn, TypeVar

from lockkit.backend import NamesPage, in_space, seconds_left
from lockkit.backends.file.cleanup import Cleanup
from lockkit.backends.file.client_file import CHECK_SECONDS, ClientFile, live_ttl_max
from lockkit.backends.file.directory import Directory, boot_id, is_ours, record_file_prefix, record_name
from lockkit.backends.file.record import (
    DamagedError,
    FileClaim,
    RecordFile,
    RemovedError,
    VersionError,
    decode,
    make_record,
    open_record,
    read_record,
    recorded_name,
)
from lockkit.backends.lock_state import LockState
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Runtime
from lockkit.validation import shown, unescape

log = logging.getLogger("lockkit")

T = TypeVar("T")

OPEN_RECORDS_MAX = 64
"""Record files that a client keeps open. More saves opening them again (4 µs), fewer saves descriptors."""

RECENT_NAMES_MAX = 256
"""Names of which a client knows that it made their record lately. It keeps those that it makes again, since making and
removing one takes five times as long as acquiring and releasing a lock; more names, and fewer records go at once."""

PAGE_RECORDS = 128
"""Records that one page of `RecordStore.names` reads. More blocks an event loop for longer (5 ms for this many)."""

READ_TRIES = 5
"""How often a record is read that looks damaged without its flock."""

FLOCK_TRIES_AT_ONCE = 16
"""Tries without a pause: together about as long as an operation holds a flock. A pause would take ten times as long."""

FLOCK_PAUSE_SECONDS_MIN = 0.00005
FLOCK_PAUSE_SECONDS_MAX = 0.005
"""Pauses between further tries. They grow in case the process that has the flock is not running."""

CLOSE_SECONDS = 0.2
"""How long closing waits for operations on records that are under way, seconds: one takes a thousandth of that. Longer
delays the end of a client whose disk hangs; shorter leaves descriptors open."""

DAMAGED = "damaged"
"""Owner in a record that was found damaged, until all leases that it may have held have ended."""


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


class RecordStore:
    """The records that one client uses."""

    def __init__(self, runtime: Runtime, directory: Directory, client_file: ClientFile, url: str) -> None:
        """Open nothing yet."""
        self._runtime = runtime
        self._now = runtime.now
        self._directory = directory
        self._client_file = client_file
        self._url = url
        self._warnings: deque[tuple[str, str, str, float]] = deque()
        self._files: dict[str, RecordFile] = {}
        self.clear()

    def clear(self) -> None:
        """Close everything and start again: in a forked child, or after the client was dropped. No thread uses it."""
        for file in self._files.values():
            file.close()
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self._files = {}
        self._recent: dict[str, None] = {}
        self._cleanup = Cleanup(self._directory, self._client_file.dead)

    def reopen(self) -> None:
        """Have all records opened again: another program may have replaced the directory."""
        with self._mutex:
            files, self._files = self._files, {}
        for file in files.values():
            with file.mutex:
                file.close()

    def close(self) -> None:
        """
        Close the records, each when no other thread uses it: else it could write into a file that gets its descriptor.

        A record that is in use for longer stays open.
        """
        until = self._now() + CLOSE_SECONDS
        for file in tuple(self._files.values()):
            if file.mutex.acquire(timeout=max(0.0, until - self._now())):
                try:
                    file.close()
                finally:
                    file.mutex.release()

    # -- one operation on one record -------------------------------------------------------------------------------

    def ping(self) -> None:
        """Make the directory and the client file if they are missing."""
        try:
            self._check_client_file(self._now())
        except (OSError, LockError) as error:
            self._fail(error, None, self._directory.path)

    def _check_client_file(self, now: float) -> None:
        self._client_file.check(now)
        self._cleanup.run(now)

    async def update(
        self,
        name: str,
        change: Callable[[LockState[FileClaim], float], T],
        answer_by: float = inf,
        taking: bool = False,  # noqa: FBT001, FBT002 - faster than those that are only given by name
        forced: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> T:
        """Call `change` with the state of a lock, and keep the state that it leaves, under the flock of the record."""
        tries, began, now = 0, 0.0, 0.0
        while True:
            try:
                now = self._now()
                if now >= self._client_file.check_at:
                    self._check_client_file(now)
                file = self._files.get(name)
                if file is not None:
                    return file.update(change, now, self._load, forced, taking)
                if not self._open(name, create=taking):
                    return change(LockState(), now)
            except RemovedError:
                self._drop(name)
            except BlockingIOError:
                began, tries = began or now, tries + 1
                await self._wait_for_flock(name, tries, began, answer_by)
            except (OSError, LockError) as error:
                self._fail(error, name, self._path(name))
            finally:
                if self._warnings:
                    self._warn()

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

    def _warn(self) -> None:
        """Log what was noticed under mutex and flock: a handler may be slow, or use a lock of this client."""
        while self._warnings:
            log.warning(*self._warnings.popleft())

    def must_look(self, name: str) -> bool:
        """
        Tell a reader that nothing has woken for `CHECK_SECONDS` whether to try again.

        Of all readers of this client that wait for a lock, only one: reading a record takes the longer, the more wait,
        and a thousand that each read it once a second would use up a core.
        """
        file, now = self._files.get(name), self._now()
        if file is None or now >= file.look_at:
            if file is not None:
                file.look_at = now + CHECK_SECONDS / 2  # less, in case that a wait ends a moment early
            return True
        return not file.is_linked()

    # -- listing -----------------------------------------------------------------------------------------------------

    def names(self, prefix: str, start: list[str] | None) -> NamesPage:
        """
        Return the locks that are held or waited for, of some of the records.

        A record is written as a whole, so it can be read without its flock. A damaged one is left out.
        """
        try:
            if start is None:
                self._check_client_file(self._now())
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
                text = _read(f"{self._directory.path}/{file}")
                state, boot = decode(text, None)
                name = unescape(recorded_name(text))
            except DamagedError:
                continue  # a long one is read in two parts, between which it may have been written
            except (FileNotFoundError, RemovedError, VersionError, ConfigurationError):
                return None  # removed meanwhile; or for its next user to see
            if boot != boot_id() or record_name(name)[1] != file or not in_space(name, prefix):
                return None
            return name if state.in_use(self._now(), self._client_file.dead) else None
        return None

    # -- records that cannot be used as they are -------------------------------------------------------------------

    def _load(
        self,
        file: RecordFile,
        text: bytes,
        now: float,
        forced: bool,  # noqa: FBT001 - handed on
    ) -> tuple[LockState[FileClaim], bytes]:
        """Parse a record; repair it if it is damaged."""
        try:
            state, boot, text = file.read(text)
        except VersionError as error:
            message = (
                f"{file.path} was written by another version of lockkit (record version {error}): "
                "use that version, or remove the file when nobody uses the lock"
            )
            raise ConfigurationError(message) from error
        except DamagedError as error:
            if not (is_ours(text) or self._directory.made):
                message = (
                    f"{file.path} is not a record: another program made it, and lockkit leaves it as it is. Use a "
                    "directory of its own for the locks, or another name; if it was a record, remove it"
                )
                raise ConfigurationError(message) from error
            state, boot = self._repaired(file, error, now, forced=forced), file.boot
            text = file.replace(state)
        if boot != file.boot:
            self._free_after_boot(file, state)
        # Read after the record was made: what another client removed before that has raised it.
        state.token = state.token or self._directory.token_floor
        holder = state.holder
        if holder is not None and not holder.client and now < state.until and not forced:
            message = (
                f"the record {file.path} was found damaged; the lock is free in {state.until - now:.1f} s, when every "
                f"lease that it may have held has ended. If nobody holds the lock: lockkit break {shown(file.name)}"
            )
            raise BackendUnavailable(message)
        return state, text

    def _repaired(self, file: RecordFile, error: DamagedError, now: float, *, forced: bool) -> LockState[FileClaim]:
        """
        Give the state to write into a damaged record: held by nobody until the last possible lease has ended.

        The token starts again from the wall clock, which is above all tokens before.
        """
        state: LockState[FileClaim] = LockState()
        if forced:
            state.until = now + 1.0  # any time will do: the lock is about to be freed
        else:
            try:
                state.until = now + live_ttl_max(self._directory)
            except ValueError as unknown:
                message = (
                    f"the record {file.path} is damaged ({error}), and lockkit cannot tell when its lease ends "
                    f"({unknown}). If nobody holds the lock: lockkit break {shown(file.name)}"
                )
                raise BackendUnavailable(message) from error
            warning = "the record %s is damaged (%s); the lock is free in %.1f s"
            self._warnings.append((warning, file.path, str(error), state.until - now))
        if state.until > now:
            state.holder = FileClaim(DAMAGED, 0.0, "", '{"text":"the record was damaged"}')
        return state

    def _free_after_boot(self, file: RecordFile, state: LockState[FileClaim]) -> None:
        """Free a lock that was held when the machine was shut down."""
        for claim in state.claims:
            if claim.client and not self._client_file.dead(claim):
                message = (
                    f"{file.path} is in use under another kernel or time namespace, whose times mean nothing here: "
                    "name a directory that only this machine uses, or use a backend for several machines"
                )
                raise ConfigurationError(message)
        state.holder = None
        state.shares.clear()
        state.queue.clear()

    # -- open records ----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._directory.path}/{record_name(name)[1]}"

    def _open(self, name: str, *, create: bool) -> bool:
        """Open a record, and close another if too many are open; False if it is missing and must not be made."""
        escaped, file_name = record_name(name)
        path = f"{self._directory.path}/{file_name}"
        made = False
        with self._mutex:
            if name in self._files:
                return True
            try:
                fd = open_record(path)
            except FileNotFoundError:
                if not create:
                    return False
                made = make_record(self._directory, path, escaped, self._runtime.owner())
                fd = open_record(path)
            file = self._files[name] = RecordFile(fd, name, escaped, path, group=self._directory.trusted)
            file.single_use = made and name not in self._recent
            if made:
                self._note_made(name)
            # Another program may have replaced the directory since the last check, and with it the client file.
            self._client_file.check_soon()
            if len(self._files) > OPEN_RECORDS_MAX:
                self._close_one()
        return True

    def _note_made(self, name: str) -> None:
        self._cleanup.made += 1
        self._recent[name] = None
        if len(self._recent) > RECENT_NAMES_MAX:
            del self._recent[next(iter(self._recent))]

    def remove_single_use(self, name: str) -> None:
        """Remove the record of a lock that was released, if it is unused and its name is not one that comes again."""
        file = self._files.get(name)
        if file is None or not file.single_use:
            return
        try:
            removed = self._cleanup.remove(file.path)
        except OSError as error:
            log.debug("cleaning %s: %s", self._directory.path, error)  # it goes later
            return
        if removed:
            with file.mutex:
                file.close()
            self._drop(name)

    def _close_one(self) -> None:
        """Close the record that was opened first, of those that no thread uses."""
        for name, file in self._files.items():
            if file.mutex.acquire(blocking=False):
                try:
                    del self._files[name]
                    file.close()
                finally:
                    file.mutex.release()
                return

    def _drop(self, name: str) -> None:
        """Forget a record whose file was closed, so that it is opened again."""
        with self._mutex:
            file = self._files.get(name)
            if file is not None and file.fd < 0:
                del self._files[name]


def _read(path: str) -> bytes:
    fd = open_record(path)
    try:
        return read_record(fd)
    finally:
        os.close(fd)


def _flock_owner(path: str) -> str:
    """Name the process that has a record flocked, for messages."""
    owner = "a process that this one cannot see"
    try:
        inode = Path(path).stat().st_ino
        # proc_locks(5): number, FLOCK, ADVISORY, WRITE, pid, major:minor:inode, start, end
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[-3].rpartition(":")[2] == str(inode):
                owner = f"process {fields[-4]}"
    except OSError:
        pass  # macOS, or no /proc: the message does without
    return owner


def _explain(error: OSError, path: str) -> LockError:
    """Turn an error of the operating system into one of lockkit's."""
    where = error.filename if isinstance(error.filename, str) else path
    code = error.errno or 0
    if code in _CONFIGURATION:
        return ConfigurationError(f"{where} {_CONFIGURATION[code]} ({error.strerror})")
    said = _UNAVAILABLE.get(code, "could not be read or written")
    return BackendUnavailable(f"{where} {said} ({error.strerror})")
