"""
Removes the files of clients that died, and records that no live client uses: a few now and then, by each client.

So a directory needs no separate cleaner, and no call takes long because of it. A file goes only if its name and its
content, read from one descriptor, say that it is lockkit's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from lockkit.backends.file.client_file import CONTENT, NAME, has_ended
from lockkit.backends.file.directory import MARKER, Directory, boot_id, is_at, record_name, unlink
from lockkit.backends.file.record import (
    HEAD,
    REMOVED,
    SIZE_MAX,
    DamagedError,
    FileClaim,
    RemovedError,
    VersionError,
    decode,
    open_record,
    read_record,
    recorded_name,
)
from lockkit.backends.lock_state import wall_clock_us
from lockkit.errors import ConfigurationError
from lockkit.validation import unescape

log = logging.getLogger("lockkit")

IDLE_SECONDS = 600.0
"""Age by the wall clock after which an unused record is removed. Its lock then gets a new one at its next use, which
takes 50 µs. Tokens keep increasing: the directory's marker knows the largest token of the removed records."""

NAMES_MAX = 1024
"""Names of a folder that are read at once: reading starts at the first each time, and a folder may have 100,000."""

CLEANUP_SECONDS = 10.0
ENTRIES_MIN = 16
ENTRIES_MAX = 512
"""How often a client that is in use examines how many entries of each folder, at least and at most. In between twice as
many as it made, so that records go faster than they come. More often, or more, delays the call that does it (2 µs an
entry, 50 µs for one that is removed); less keeps thousands of unused records for longer."""

_UNFINISHED = re.compile(r".*/(\.new-[0-9a-f]{32}|clients/\.[0-9a-f]{1,16})", re.DOTALL)
"""Paths of files that are being made: a record, or the file of a client. They may be empty still."""


class Cleanup:
    """
    The cleaning that one client does.

    Attributes:
        made: How many records this client has made since it cleaned last.
    """

    def __init__(self, directory: Directory, dead: Callable[[FileClaim], bool]) -> None:
        """Remove nothing yet."""
        self._directory = directory
        self._dead = dead
        self.made = 0
        self._at = 0.0
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self._left: dict[str, Iterator[str]] = {}  # the names in a folder that come next

    def run(self, now: float) -> None:
        """Examine some files if it is time to."""
        if now < self._at or not self._mutex.acquire(blocking=False):
            return
        try:
            self._at = now + CLEANUP_SECONDS
            count, self.made = min(max(ENTRIES_MIN, 2 * self.made), ENTRIES_MAX), 0
            for folder in (self._directory.clients, self._directory.path):
                self._examine_next(folder, count)
        finally:
            self._mutex.release()

    def _examine_next(self, folder: str, count: int) -> None:
        """Examine the next entries of a folder."""
        names = self._left.pop(folder, None) or _names(folder)
        for number in range(1, count + 1):
            try:
                name = next(names, None)
                if name is None:
                    return
                self._examine(folder, name)
            except OSError as error:
                # Another client was faster, or the file belongs to another user in a sticky directory.
                log.debug("cleaning %s: %s", self._directory.path, error)
            if number == count:
                self._left[folder] = names

    def _examine(self, folder: str, name: str) -> None:
        """Remove the file of a dead client, a record that no live client uses, or a file that was never completed."""
        if folder == self._directory.clients and NAME.fullmatch(name):
            has_ended(self._directory, name)
            return
        path = f"{folder}/{name}"
        if not (name.endswith(".lock") or _UNFINISHED.fullmatch(path)):
            return
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and wall_clock_us() / 1e6 - status.st_mtime >= IDLE_SECONDS:
            self.remove(path)

    def remove(self, path: str) -> bool:
        """Remove a record that no live client uses, or a file that was never completed; return whether it was one."""
        fd = open_record(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another client may have removed it before the flock, and a third made it again and holds it.
            if is_at(os.fstat(fd), path) and _is_ours(fd, path) and self._is_unused(fd, path):
                os.unlink(path)  # noqa: PTH108
                return True
        except (BlockingIOError, ConfigurationError):
            pass  # in use after all; or the marker is another user's
        finally:
            os.close(fd)
        return False

    def _is_unused(self, fd: int, path: str) -> bool:
        """Mark a record as removed if no live client uses it; return whether it is. Under its flock."""
        if not path.endswith(".lock"):
            return True
        try:
            state, boot = decode(read_record(fd), None)
        except RemovedError:
            return True  # the process that wrote REMOVED died before it removed the file
        noted = state.note is not None and state.note[1] > wall_clock_us()
        if noted or (boot == boot_id() and not all(map(self._dead, state.claims))):
            return False
        self._directory.raise_token_floor(state.token)
        os.pwrite(fd, REMOVED, 0)
        return True


def erase(directory: Directory) -> None:
    """Remove all that is lockkit's in a directory, in use or not, and the directory itself if lockkit made it."""
    made = directory.made
    for folder in (directory.clients, directory.path):
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
                path = f"{folder}/{name}"
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    continue
                fd = open_record(path)
                try:
                    if _is_ours(fd, path):
                        unlink(path)
                finally:
                    os.close(fd)
    if made:
        with suppress(OSError):  # something else is in it, or it is gone already
            os.rmdir(directory.clients)  # noqa: PTH106
            unlink(f"{directory.path}/{MARKER}")
            os.rmdir(directory.path)  # noqa: PTH106


def _is_ours(fd: int, path: str) -> bool:
    """Tell from its name and its content whether lockkit made a file."""
    name = os.path.basename(path)  # noqa: PTH119
    if name.endswith(".lock"):
        try:
            text = read_record(fd)
            decode(text, None)
            return record_name(unescape(recorded_name(text)))[1] == name
        except RemovedError:
            return True
        except (DamagedError, VersionError, ConfigurationError):
            return False
    if NAME.fullmatch(name):
        return CONTENT.match(os.pread(fd, 100, 0)) is not None
    if not _UNFINISHED.fullmatch(path):
        return False
    start = os.pread(fd, SIZE_MAX + 1, 0)
    return bool(CONTENT.match(start) or HEAD.match(start)) or (len(start) <= SIZE_MAX and not start.strip(b"\0"))


def _names(folder: str) -> Iterator[str]:
    """Yield the names in a folder, and read some of them at a time."""
    start, names = 0, [""] * NAMES_MAX
    while len(names) == NAMES_MAX:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, start, start + NAMES_MAX)]
        yield from names
        start += len(names)
