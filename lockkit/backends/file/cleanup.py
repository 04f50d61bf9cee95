"""
Removes the files of clients that died, and records that no live client uses: a few now and then, by each client.

So a directory needs no separate cleaner, and no call takes long because of it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
from itertools import islice
from typing import TYPE_CHECKING

from lockkit.backends.file.client_file import has_ended
from lockkit.backends.file.directory import boot_id, is_at
from lockkit.backends.file.record import (
    REMOVED,
    DamagedError,
    FileClaim,
    RemovedError,
    VersionError,
    decode,
    open_record,
    read_record,
)
from lockkit.backends.lock_state import wall_clock_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.backends.file.directory import Directory

__all__ = ["Cleanup"]

log = logging.getLogger("lockkit")

IDLE_SECONDS = 24 * 3600.0
"""Age by the wall clock after which an unused record is removed. Tokens then restart from the wall clock: if it was set
back by more than this, they could decrease."""

NAMES_MAX = 1024
"""Names of a folder that are read at once: reading starts at the first each time, and a folder may have 100,000."""

CLEANUP_SECONDS = 10.0
ENTRIES_MAX = 16
"""How often a client that is in use examines how many entries of each folder. More often, or more, delays the call that
does it (2 µs an entry, 50 µs for one that is removed); less keeps thousands of unused records for longer."""


class Cleanup:
    """The cleaning that one client does."""

    def __init__(self, directory: Directory, dead: Callable[[FileClaim], bool]) -> None:
        """
        Remove nothing yet.

        Args:
            directory: Of the locks.
            dead: Tells whether the client of a claim has ended.
        """
        self._directory = directory
        self._dead = dead
        self._at = 0.0
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self._folders = [_Folder(directory.clients), _Folder(directory.path)]

    def run(self, now: float) -> None:
        """Examine some files if it is time to."""
        if now < self._at or not self._mutex.acquire(blocking=False):
            return
        errors = []
        try:
            self._at = now + CLEANUP_SECONDS
            for folder in self._folders:
                errors += self._examine_next(folder)
        finally:
            self._mutex.release()
        for error in errors:
            # Another client was faster, or the file belongs to another user in a sticky directory.
            log.debug("cleaning %s: %s", self._directory.path, error)

    def _examine_next(self, folder: _Folder) -> list[OSError]:
        """Examine the next entries of a folder; return what went wrong."""
        errors = []
        try:
            for name in folder.take(ENTRIES_MAX):
                try:
                    self._examine(folder.path, name)
                except OSError as error:
                    errors.append(error)
        except OSError as error:
            errors.append(error)
        return errors

    def _examine(self, folder: str, name: str) -> None:
        """Remove the file of a dead client, a record that no live client uses, or a file that was never completed."""
        hidden = name.startswith(".")
        if folder == self._directory.clients and not hidden:
            has_ended(self._directory, name)
            return
        path = f"{folder}/{name}"
        status = os.lstat(path)
        if not (hidden or name.endswith(".lock")) or not stat.S_ISREG(status.st_mode):
            return  # a directory, or not a file of lockkit's
        if wall_clock_us() / 1e6 - status.st_mtime < IDLE_SECONDS:
            return
        if hidden:
            os.unlink(path)  # noqa: PTH108
            return
        fd = open_record(path)
        try:
            self._remove_if_unused(fd, path)
        finally:
            os.close(fd)

    def _remove_if_unused(self, fd: int, path: str) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_at(os.fstat(fd), path):
                return  # another client removed it before the flock, and a third may have made it again and hold it
            state, boot = decode(read_record(fd), None)
        except RemovedError:
            os.unlink(path)  # noqa: PTH108 - the process that wrote REMOVED died before it removed the file
            return
        except (BlockingIOError, DamagedError, VersionError):
            return  # in use after all; or for its next user to see
        claims = state.claims
        unused = boot != boot_id() or all(map(self._dead, claims))
        now_us = wall_clock_us()
        noted = state.note is not None and state.note[1] > now_us
        # Without its record a lock starts at the wall clock again, which must be above its last token.
        if unused and not noted and state.token < now_us:
            os.pwrite(fd, REMOVED, 0)
            os.unlink(path)  # noqa: PTH108


class _Folder:
    """The names in a folder, some at a time, again and again, so that each is returned from time to time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._names: list[str] = []
        self._start = 0

    def take(self, count: int) -> list[str]:
        """Return the next names, at most `count`."""
        if not self._names:
            with os.scandir(self.path) as entries:
                self._names = [entry.name for entry in islice(entries, self._start, self._start + NAMES_MAX)]
            self._start = self._start + len(self._names) if len(self._names) == NAMES_MAX else 0
        taken = self._names[:count]
        del self._names[:count]
        return taken
