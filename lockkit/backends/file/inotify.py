"""
The part of inotify(7) that the file backend needs, through the C library. Linux only.

Imported when a client waits for the first time, because ctypes takes some milliseconds to import.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

# <sys/inotify.h>
ATTRIB = 0x00000004
CLOSE_WRITE = 0x00000008
IGNORED = 0x00008000
_CLOEXEC = os.O_CLOEXEC
_NONBLOCK = os.O_NONBLOCK

_EVENT = struct.Struct("iIII")
_READ_SIZE = 64 * 1024


class Inotify:
    """
    One inotify instance.

    Attributes:
        fd: Readable when there are events; -1 when closed.
    """

    def __init__(self) -> None:
        """Open it."""
        self.fd = -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self.fd = self._libc.inotify_init1(_CLOEXEC | _NONBLOCK)
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no inotify") from None
        if self.fd < 0:
            raise _error("inotify")

    def add(self, path: str, mask: int) -> int:
        """Watch a file for the events in `mask`; return the number that its events have."""
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(mask))
        if number < 0:
            raise _error(path)
        return number

    def remove(self, number: int) -> None:
        """End a watch. No error if it has ended by itself, as it does when its file is removed."""
        self._libc.inotify_rm_watch(self.fd, number)

    def read(self) -> Iterator[tuple[int, int]]:
        """Yield the events that have arrived: watch number (-1: some were lost) and mask."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, offset)
            yield number, mask
            offset += _EVENT.size + length

    def close(self) -> None:
        """Close it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close it: a user has 128 of them, and a client may be dropped without being closed."""
        if hasattr(self, "fd"):
            self.close()


def _error(path: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path)
