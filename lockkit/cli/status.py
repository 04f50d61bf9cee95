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

RUN_STATUSES: Final = (
    ("COMMAND's own", "COMMAND ran to its end under the lock"),
    (f"{Status.OK:d}", "also: the lock was busy, with --on-busy=skip; COMMAND did not run"),
    (f"{Status.OK:d}", "also: done already, with --once-per or --once; COMMAND did not run"),
    (f"{Status.USAGE:d}", "wrong usage"),
    (f"{Status.UNAVAILABLE:d}", "the backend is unavailable"),
    (f"{Status.BUSY:d}", "the lock was busy until the timeout; COMMAND did not run"),
    (f"{Status.DONE:d}", "done already, with --on-done=fail, or all --attempts used up; COMMAND did not run"),
    (f"{Status.CONFIGURATION:d}", "wrong configuration: name, ttl, timeout, URL, option, profile, credentials"),
    (f"{Status.LOST:d}", "the lease was lost: lockkit ended COMMAND's process group before the deadline"),
    (f"{Status.NOT_EXECUTABLE:d}", "COMMAND is not executable"),
    (f"{Status.NOT_FOUND:d}", "COMMAND was not found"),
    (f"{SIGNALLED} + n", "signal n ended COMMAND, or the wait for the lock"),
)
"""What ``lockkit run`` ends with, for its help."""

ELECT_STATUSES: Final = (
    ("COMMAND's own", "COMMAND ended by itself while leading"),
    (f"{Status.USAGE:d}", "wrong usage"),
    (f"{Status.UNAVAILABLE:d}", "the backend is unavailable"),
    (f"{Status.CONFIGURATION:d}", "wrong configuration: name, ttl, grace, URL, option, profile, credentials"),
    (f"{Status.NOT_EXECUTABLE:d}", "COMMAND is not executable"),
    (f"{Status.NOT_FOUND:d}", "COMMAND was not found"),
    (f"{SIGNALLED} + n", "signal n ended COMMAND, or the campaign"),
)
"""What ``lockkit elect`` ends with, for its help."""

HOLD_STATUSES: Final = (
    (f"{Status.OK:d}", "the lock was held, and released because stdin ended or said so"),
    (f"{Status.USAGE:d}", "wrong usage"),
    (f"{Status.UNAVAILABLE:d}", "the backend is unavailable; at the release: the lock ends by its ttl"),
    (f"{Status.BUSY:d}", "the lock was not granted until the timeout, or until stdin ended"),
    (f"{Status.CONFIGURATION:d}", "wrong configuration: name, ttl, timeout, URL, option, profile, credentials"),
    (f"{Status.LOST:d}", "the lease was lost"),
    (f"{SIGNALLED} + n", "signal n came; the lock was released"),
)
"""What ``lockkit hold`` ends with, for its help."""

_STATUSES: Final[tuple[tuple[type[LockError], Status], ...]] = (
    (BackendUnavailable, Status.UNAVAILABLE),
    (ConfigurationError, Status.CONFIGURATION),
    # Another backend, or more rights, would help: that is a matter of configuration.
    (Unsupported, Status.CONFIGURATION),
    (LockTimeout, Status.BUSY),
    (LockLost, Status.LOST),
    (StaleToken, Status.LOST),
)


def status_of(error: LockError) -> Status:
    """Give the exit status for an error of the library."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), Status.FAILED)
