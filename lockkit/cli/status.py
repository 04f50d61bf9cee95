"""What exit statuses mean. The numbers are a contract, and follow sysexits.h where it has one."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from lockkit.errors import (
    BackendUnavailable,
    ConfigurationError,
    LockError,
    LockLost,
    LockTimeout,
    StaleToken,
    Unsupported,
)


class Status(IntEnum):
    """lockkit's own exit statuses."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 69  # EX_UNAVAILABLE
    BUSY = 75  # EX_TEMPFAIL
    DONE = 76  # EX_PROTOCOL, whose meaning no shell relies on
    CONFIGURATION = 78  # EX_CONFIG
    LOST = 79  # the first number after those of sysexits.h
    NOT_EXECUTABLE = 126  # as shells have it, like the next two
    NOT_FOUND = 127


SIGNALLED: Final = 128
"""Plus the number of the signal that ended a process."""

_STATUSES: Final[dict[type[LockError], Status]] = {
    BackendUnavailable: Status.UNAVAILABLE,
    ConfigurationError: Status.CONFIGURATION,
    Unsupported: Status.CONFIGURATION,  # another backend, or more rights, would help
    LockTimeout: Status.BUSY,
    LockLost: Status.LOST,
    StaleToken: Status.LOST,
}


def status_of(error: LockError) -> Status:
    """Give the exit status for an error of the library."""
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), Status.FAILED)
