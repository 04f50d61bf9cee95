"""
One record file: opening, making, reading, writing and removing it.

Nothing here decides who holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lockkit.backends.file.directory import Directory, boot_id, reserve
from lockkit.backends.file.record import (
    REMOVED,
    SIZE_MAX,
    DamagedError,
    FileClaim,
    RemovedError,
    VersionError,
    decode,
    encode,
    size_of,
)
from lockkit.backends.lock_state import Ledger
from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RecordFile", "make_record", "open_record", "reap_file", "wall_clock_ns", "who_flocked"]

T = TypeVar("T")
A = TypeVar("A")

LINK_SECONDS = 0.1
"""How often a record that stays open is checked for having been removed by a stranger (lockkit itself leaves a mark).
Not each time: besides its own cost (1 µs) asking for the status of a file makes Linux stamp the next write precisely,
which costs the file system another 2 µs."""

IDLE_SECONDS = 24 * 3600.0
"""Age by the wall clock after which an unused record is removed. The time floor of the token needs some of it: a clock
set back by more than this could make tokens go back."""

# The wall clock of this machine is the "server time" of the hybrid token; it decides nothing else.
wall_clock_ns = time.time_ns  # noqa: TID251

# Looked up once: together they are called eight times in a pair.
_flock = fcntl.flock
_fstat = os.fstat
_pread = os.pread
_pwrite = os.pwrite

_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB
_UNLOCK = fcntl.LOCK_UN
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Without it each of our writes would have the next read write its time back to the inode.
_NO_ATIME = getattr(os, "O_NOATIME", 0)
# What most records need; a longer one is read once more. Python allocates objects up to 512 bytes faster.
_READ_SIZE = 478


class RecordFile:
    """
    One open record.

    Attributes:
        fd: Descriptor, -1 when closed.
        mutex: Held during `apply` and `close`.
        name: The lock.
        escaped: Its escaped name, as in the record.
        path: Of the file.
        boot: Boot id of this machine.
    """

    __slots__ = (
        "_check_at",
        "_disk",
        "_known",
        "_ledger",
        "_reserved",
        "boot",
        "escaped",
        "fd",
        "mutex",
        "name",
        "path",
    )

    def __init__(self, fd: int, name: str, escaped: str, path: str, *, group: bool = False) -> None:
        """
        Take over an open file.

        Raises:
            OSError: It is no regular file. It has been closed.
            ConfigurationError: It belongs to another user, and is not shared with the group. It has been closed.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
        if not group and status.st_uid not in {0, os.geteuid()}:
            os.close(fd)
            message = (
                f"{path} belongs to another user (uid {status.st_uid}), who could change it while the lock is held: "
                "remove it, name a directory of your own, or share the locks with a group by ?group=1"
            )
            raise ConfigurationError(message)
        self.fd = fd
        self.mutex = threading.Lock()
        self.name = name
        self.escaped = escaped
        self.path = path
        self.boot = boot_id()
        self._check_at = 0.0
        self._reserved = status.st_size
        self._disk = b""  # the text in the file, as far as we know
        self._known = b""  # the text that `_ledger` was read from or written as; empty if it is worth nothing
        self._ledger: Ledger[FileClaim] = Ledger()

    def apply(
        self,
        change: Callable[[Ledger[FileClaim], float, A], T],
        now: float,
        argument: A,
        load: Callable[[RecordFile, bytes, float, bool], Ledger[FileClaim]],
        forced: bool = False,  # noqa: FBT001, FBT002 - handed on
    ) -> T:
        """
        Read the record, let `change` look at the ledger and alter it, write it back: all under mutex and flock.

        The mutex is for the threads of this client, which share the descriptor and with it the flock.

        Args:
            change: Called with the ledger, `now` and `argument`; its result is returned.
            now: The time.
            argument: For `change`.
            load: Parses a text that is not the one we wrote last; called with this file, the text, `now` and `forced`.
            forced: For `load`.

        Raises:
            BlockingIOError: Somebody else has it flocked.
            RemovedError: This is not the record any more; the file has been closed.
            OSError: The operating system refuses.
        """
        with self.mutex:
            fd = self.fd
            if fd < 0:
                raise RemovedError  # closed by another thread that needed the room
            # The flock within the try: an interrupt may come in the instant in which it is granted.
            try:
                _flock(fd, _LOCK)
                if now >= self._check_at:
                    self._check(now)
                text = _pread(fd, _READ_SIZE, 0)
                # Should we be interrupted from here on, what is in memory is worth nothing.
                known, self._known = self._known, b""
                # What we wrote ourselves need not be parsed again.
                ledger = self._ledger if known and text.startswith(known) else load(self, text, now, forced)
                result = change(ledger, now, argument)
                text = encode(ledger, self.escaped, self.boot)
                if text != self._disk:
                    self._write(text)
                self._ledger = ledger
                self._known = text
                return result  # noqa: TRY300 - one place for the whole life of the flock
            except RemovedError:
                # Its remover may have died halfway.
                if _fstat(fd).st_nlink:
                    os.unlink(self.path)  # noqa: PTH108
                self.close()
                raise
            finally:
                if self.fd >= 0:
                    _flock(fd, _UNLOCK)

    def _check(self, now: float) -> None:
        if _fstat(self.fd).st_nlink == 0:
            raise RemovedError
        self._check_at = now + LINK_SECONDS

    def parse(self, text: bytes) -> tuple[Ledger[FileClaim], str]:
        """
        Parse what `apply` read.

        Args:
            text: The beginning of the file.

        Returns:
            The ledger, and the boot id under which it was written.

        Raises:
            DamagedError, VersionError, RemovedError: See `lockkit.backends.file.record`.
        """
        self._disk = b""
        text = _whole(self.fd, text)
        ledger, boot = decode(text, self.escaped)
        self._disk = text
        return ledger, boot

    def replace(self, ledger: Ledger[FileClaim]) -> None:
        """Write another ledger while `apply` loads, to stay even if that fails then."""
        self._write(encode(ledger, self.escaped, self.boot))

    def _write(self, text: bytes) -> None:
        if len(text) > self._reserved:
            # The disk may be full: it must turn out before anything has changed.
            if len(text) > SIZE_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
            reserve(self.fd, self._reserved, len(text))
            self._reserved = os.fstat(self.fd).st_size
        self._disk = b""
        if _pwrite(self.fd, text, 0) != len(text):
            # Only a limit on the size of files does that here. The record is damaged now, and will be mended.
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        self._disk = text

    def peek(self) -> Ledger[FileClaim] | None:
        """Read the record without its flock; None if that does not succeed."""
        with self.mutex:
            if self.fd < 0:
                return None
            try:
                return decode(_whole(self.fd), self.escaped)[0]
            except (OSError, DamagedError, VersionError, RemovedError):
                return None

    def close(self) -> None:
        """Close the descriptor. Idempotent. Under the mutex, or where nobody else is."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_record(path: str) -> int:
    """Open a record file for reading and writing: not through a link, and without waiting if it is a pipe."""
    try:
        return os.open(path, _OPEN | _NO_ATIME)
    except PermissionError:
        return os.open(path, _OPEN)  # it belongs to somebody else of the group


def make_record(directory: Directory, path: str, escaped: str, unique: str) -> None:
    """
    Make a record under another name and link it, complete, to its own: nobody ever sees an empty one.

    Args:
        directory: Made again if it was removed.
        path: Of the record. No error if somebody else makes it at the same time.
        escaped: The lock's escaped name.
        unique: A random word.

    Raises:
        OSError: It cannot be made; nothing is left of it.
        ConfigurationError: The file system has no hard links.
    """
    hidden = f"{directory.path}/.new-{unique}"
    content = encode(Ledger(), escaped, boot_id())
    try:
        fd = directory.create(hidden, content)
    except FileNotFoundError:
        directory.prepare()  # it was removed while we had it in use
        fd = directory.create(hidden, content)
    os.close(fd)
    try:
        os.link(hidden, path)
    except FileExistsError:
        pass  # somebody else was faster
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP}:
            raise
        message = f"{directory.path} lies on a file system without hard links: name another directory"
        raise ConfigurationError(message) from error
    finally:
        os.unlink(hidden)  # noqa: PTH108


def reap_file(path: str, dead: Callable[[FileClaim], bool]) -> None:
    """
    Remove a record that no living client holds or waits for, or what is left of the making of a file.

    Args:
        path: Of a file in the directory.
        dead: Tells whether the client of a claim has ended.

    Raises:
        OSError: It cannot be looked at or removed.
    """
    hidden = os.path.basename(path).startswith(".")  # noqa: PTH119
    status = os.lstat(path)
    if not (hidden or path.endswith(".lock")) or not stat.S_ISREG(status.st_mode):
        return  # a directory, or none of ours
    if wall_clock_ns() / 1e9 - status.st_mtime < IDLE_SECONDS:
        return
    if hidden:
        os.unlink(path)  # noqa: PTH108
        return
    fd = open_record(path)
    try:
        _flock(fd, _LOCK)
        ledger, boot = decode(_whole(fd), None)
        claims = ledger.queue if ledger.holder is None else [ledger.holder, *ledger.queue]
        unused = boot != boot_id() or all(map(dead, claims))
        # Without its record a lock starts at the time floor again, which must be above its last token.
        if unused and ledger.token < wall_clock_ns() // 1000:
            _pwrite(fd, REMOVED, 0)
            os.unlink(path)  # noqa: PTH108
    except RemovedError:
        os.unlink(path)  # noqa: PTH108 - its remover died halfway
    except (BlockingIOError, DamagedError, VersionError):
        pass  # in use after all; or for its next user to see
    finally:
        os.close(fd)


def who_flocked(path: str) -> str:
    """Name the process that has a record flocked, for messages."""
    who = "a process that this one cannot see"
    try:
        inode = os.stat(path).st_ino  # noqa: PTH116
        # proc_locks(5): number, FLOCK, ADVISORY, WRITE, pid, major:minor:inode, start, end
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[-3].rpartition(":")[2] == str(inode):
                who = f"process {fields[-4]}"
    except OSError:
        pass  # macOS, or no /proc: the message does without
    return who


def _whole(fd: int, text: bytes = b"") -> bytes:
    """Read the record, of which `text` has been read already; without what may stand behind it."""
    text = text or _pread(fd, _READ_SIZE, 0)
    size = size_of(text)
    return text[:size] if size <= len(text) else _pread(fd, size, 0)
