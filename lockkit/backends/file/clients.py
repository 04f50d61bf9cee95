"""
Client files: how the clients of a lock directory see that one of them has ended.

Each client keeps its file ``clients/ID`` open for writing and exclusively flocked for its life.
The kernel gives the lock back when the process ends, however it ends, so whoever gets a shared lock on the file of
somebody else knows that this one is dead. An id is random and never used again, so a file that is missing is a dead
client's too.

flock(2) belongs to the open file: a forked child has a copy of it, and must close that at once, or the parent would
seem to live as long as the child.

The file says (text, for people and for `live_ttl_max`) the client's process id and the largest ttl it ever asked for.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockkit.backends.file.directory import Directory

__all__ = ["Client", "is_dead", "live_ttl_max", "poke"]

_CONTENT = re.compile(rb"lockkit-client 1 pid ([0-9]+) ttl_max_us ([0-9]{16})\n")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

TOUCH_SECONDS = 3600.0
"""How often a client that renews marks its file as in use. Cleaners such as systemd-tmpfiles(8) remove from /tmp what
was not touched for ten days, and the client would seem to be dead."""


class Client:
    """
    This client's file.

    Attributes:
        id: Random, hexadecimal.
        path: Of its file.
        fd: Descriptor of its file, -1 when closed.
        ttl_max: Largest ttl that this client ever asked for, seconds.
    """

    def __init__(self, directory: Directory, client_id: str, now: float) -> None:
        """
        Make the file.

        Raises:
            OSError: It cannot be made; nothing is left of it.
        """
        self.id = client_id
        self.path = f"{directory.clients}/{client_id}"
        self.ttl_max = 0.0
        self._touched = now
        self._mutex = threading.Lock()  # threads that acquire different locks at once
        # Locked before it has its name: nobody may ever see it unlocked and take it for a dead client's.
        hidden = f"{directory.clients}/.{client_id}"
        self.fd = directory.create(hidden, self._content())
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, self.path)  # noqa: PTH104
        except BaseException:
            self.forget()
            os.unlink(hidden)  # noqa: PTH108
            raise

    def _content(self) -> bytes:
        return b"lockkit-client 1 pid %d ttl_max_us %016d\n" % (os.getpid(), -int(-self.ttl_max * 1e6 // 1))

    def allow(self, ttl: float) -> None:
        """Note a ttl before any record holds it: who finds a damaged record waits for the largest."""
        if ttl > self.ttl_max:
            with self._mutex:
                self.ttl_max = max(ttl, self.ttl_max)
                os.pwrite(self.fd, self._content(), 0)

    def touch(self, now: float) -> None:
        """Keep cleaners away. A write: a change of attributes would wake our own waiters."""
        if now >= self._touched + TOUCH_SECONDS:
            with self._mutex:
                self._touched = now
                os.pwrite(self.fd, self._content(), 0)

    def removed(self) -> bool:
        """Tell whether somebody removed or moved the file, so that the others take us for dead."""
        try:
            return os.stat(self.path).st_ino != os.fstat(self.fd).st_ino  # noqa: PTH116
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """End this client: whatever it held is free."""
        if self.fd >= 0:
            _unlink(self.path)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor only."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def is_dead(directory: Directory, client_id: str) -> bool:
    """
    Tell whether a client has ended; removes the file of one that has.

    Raises:
        OSError: The file cannot be opened although it is there.
    """
    path = f"{directory.clients}/{client_id}"
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    _unlink(path)
    return True


def poke(directory: Directory, client_id: str) -> None:
    """Wake the waiters of a client: one system call. No error if it has ended."""
    with suppress(FileNotFoundError):  # who waits behind it has been told by the kernel
        os.utime(f"{directory.clients}/{client_id}")


def live_ttl_max(directory: Directory, but: str) -> float:
    """
    Find the largest ttl that any living client ever asked for, seconds; 0 if there is none.

    Args:
        directory: Whose clients.
        but: Not this one.

    Raises:
        OSError: A client file cannot be read.
        ValueError: One does not say it.
    """
    largest = 0.0
    for client_id in os.listdir(directory.clients):  # noqa: PTH208
        # A name with a dot is a client's that has no lock yet.
        if client_id != but and not client_id.startswith(".") and not is_dead(directory, client_id):
            largest = max(largest, _ttl_max(f"{directory.clients}/{client_id}"))
    return largest


def _ttl_max(path: str) -> float:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return 0.0  # it has ended meanwhile
    try:
        content = _CONTENT.match(os.pread(fd, 100, 0))
    finally:
        os.close(fd)
    if content is None:
        message = f"{path} does not say the largest ttl of that client"
        raise ValueError(message)
    return int(content[2]) / 1e6


def _unlink(path: str) -> None:
    # Somebody else did; or it is not ours in a sticky directory, and its owner's clients will.
    with suppress(FileNotFoundError, PermissionError):
        os.unlink(path)  # noqa: PTH108
