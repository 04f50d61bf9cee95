"""
Client files: how the clients of a lock directory see that one of them has ended.

Each client keeps its file ``clients/ID`` open for writing and exclusively flocked as long as it lives.
The kernel drops the flock when the process ends, however it ends. So a client that gets a shared flock on another
client's file knows that the other has ended. An id is random and never reused, so a missing file also means that its
client has ended.

A flock (flock(2)) belongs to the open file: a forked child has a copy, and must close it at once. Otherwise the parent
would seem to live as long as the child.

The file holds, as text, the client's process id (for people) and the largest ttl that it ever asked for (for
`live_ttl_max`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress

from lockkit.backends.file.directory import Directory, is_at, unlink
from lockkit.backends.file.record import FileClaim
from lockkit.errors import BackendUnavailable
from lockkit.runtime import Runtime
from lockkit.units import Seconds

log = logging.getLogger("lockkit")

NAME = re.compile("[0-9a-f]{1,16}")
CONTENT = re.compile(rb"lockkit-client 1 pid ([0-9]+) ttl_max_us ([0-9]{16})\n")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

CHECK_SECONDS = 1.0
"""How often a client that holds or waits checks that its file is still there. Without it, the other clients assume that
this one has ended, take its locks, and pass over its waiters until the next check."""

TOUCH_SECONDS = 3600.0
"""How often a client that renews marks its file as in use. Cleaners such as systemd-tmpfiles(8) remove from /tmp what
was not touched for ten days, and then the other clients would assume that this one has ended."""


class ClientFile:
    """
    The file of this client: made by the first `check`, and again after another program removed it.

    Attributes:
        id: Random, hexadecimal; another one each time that the file is made. Empty without a file.
        path: Of the file.
        fd: Its descriptor, -1 without a file.
        check_at: When the next `check` is due, on the runtime's clock.
    """

    def __init__(self, runtime: Runtime, directory: Directory, on_removed: Callable[[], None]) -> None:
        """Make nothing yet."""
        self._runtime = runtime
        self._directory = directory
        self._on_removed = on_removed
        self._closed = False
        self._ttl_max = 0.0
        self.fd = -1
        self.forget()

    def check(self, now: float) -> None:
        """Make the file if it is missing."""
        removed = ""
        with self._mutex:
            if self._closed:
                message = "this client is closed: connect again"
                raise BackendUnavailable(message)
            if self.fd < 0 or not is_at(os.fstat(self.fd), self.path):
                # What it holds is free for others from the removal on, unless it renews first.
                removed = self.path
                self._make(now)
            self.check_at = now + CHECK_SECONDS
        if removed:
            log.warning("%s was removed; locks that were held may be lost", removed)

    def check_soon(self) -> None:
        """Have the next operation call `check`."""
        self.check_at = 0.0

    def _make(self, now: float) -> None:
        self._directory.prepare()
        client_id = self._runtime.owner()[:16]
        path = f"{self._directory.clients}/{client_id}"
        # Flocked before it gets its name: a client that sees it without its flock would remove it.
        hidden = f"{self._directory.clients}/.{client_id}"
        fd = self._directory.create(hidden, self._content())
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, path)  # noqa: PTH104
        except BaseException:
            os.close(fd)
            unlink(hidden)  # Ctrl-C may come when it has its name
            raise
        if self.fd >= 0:
            self._on_removed()
        with self._content_mutex:
            former, self.fd = self.fd, fd
            self.id, self.path = client_id, path
            # Again: `allow_ttl` may have written to the former file meanwhile.
            self._write(now)
        if former >= 0:
            os.close(former)

    def _content(self) -> bytes:
        return b"lockkit-client 1 pid %d ttl_max_us %016d\n" % (os.getpid(), -int(-self._ttl_max * 1e6 // 1))

    def _write(self, now: float) -> None:
        os.pwrite(self.fd, self._content(), 0)
        self._written_at = now

    def allow_ttl(self, ttl: Seconds, now: float) -> None:
        """
        Write a ttl down before any record holds it: a client that finds a damaged record waits for the largest.

        This also keeps cleaners away from the file (a change of its attributes would wake this client's own waiters).
        """
        if ttl > self._ttl_max or now >= self._written_at + TOUCH_SECONDS:
            with self._content_mutex:
                self._ttl_max = max(ttl, self._ttl_max)
                self._write(now)

    def dead(self, claim: FileClaim) -> bool:
        """Tell whether the client of a claim has ended."""
        return claim.client not in {"", self.id} and has_ended(self._directory, claim.client)

    def refuse(self) -> None:
        """Have operations that begin from now on fail. Those that are under way still need the file, until `close`."""
        self._closed = True
        self.check_soon()

    def close(self) -> None:
        """End this client for good: the locks that it holds are free."""
        self.refuse()
        if self.fd >= 0:
            unlink(self.path)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor but leave the file; the next `check` makes another one. For a forked child."""
        # Real mutexes, also under asyncio: they are never held across an await.
        self._mutex = threading.Lock()
        # Another one for the content: `check` closes records under `_mutex`, which take their own mutex, and a record's
        # operation calls `allow_ttl` under that.
        self._content_mutex = threading.Lock()
        fd, self.fd = self.fd, -1
        self.id = self.path = ""
        self.check_at = 0.0
        self._ttl_max = 0.0
        self._written_at = 0.0
        if fd >= 0:
            os.close(fd)


def has_ended(directory: Directory, client_id: str) -> bool:
    """Tell whether a client has ended; removes its file if so."""
    return _content_if_alive(directory, client_id) is None


def _content_if_alive(directory: Directory, client_id: str) -> bytes | None:
    path = f"{directory.clients}/{client_id}"
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return None
    content = b""
    try:
        content = os.pread(fd, 100, 0)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        ours = CONTENT.match(content) and is_at(os.fstat(fd), path)
    except BlockingIOError:
        return content
    finally:
        os.close(fd)
    if ours:
        unlink(path)  # another client may be faster
    return None


def notify(directory: Directory, client_id: str) -> None:
    """Wake the waiters of a client: one system call. No error if it has ended."""
    with suppress(FileNotFoundError):  # the kernel has notified the clients that watch it
        os.utime(f"{directory.clients}/{client_id}")


def live_ttl_max(directory: Directory) -> float:
    """Find the largest ttl that any live client ever asked for, seconds; 0 if none did."""
    largest = 0.0
    for client_id in os.listdir(directory.clients):  # noqa: PTH208
        # A client whose file has a dot before that name is just connecting and has no lock yet.
        content = _content_if_alive(directory, client_id) if NAME.fullmatch(client_id) else None
        if content is None:
            continue
        found = CONTENT.match(content)
        if found is None:
            message = f"{directory.clients}/{client_id} does not say the largest ttl of that client"
            raise ValueError(message)
        largest = max(largest, int(found[2]) / 1e6)
    return largest
