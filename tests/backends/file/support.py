"""Helpers for the tests of the file backend."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from lockkit.backend import Grant, Request
from lockkit.backends.file.backend import FileBackend
from lockkit.runtime import drive
from tests.backends.support import StubHost, granted

LONG = 600.0
"""A ttl longer than any test: nothing in a test happens because of expiry."""

Connect = Callable[..., FileBackend]
"""The fixture ``connect``: ``connect(host, query="", path=the test's directory)``."""


def acquire(backend: FileBackend, request: Request) -> Grant:
    """Wait for the lock as the engine does."""

    async def contend() -> Grant:
        while not isinstance(outcome := await backend.try_acquire(request), Grant):
            await backend.wait(request, outcome, request._runtime.now() + (outcome.retry_after or 1.0))
        return outcome

    return drive(contend())


def leave_record(backend: FileBackend, host: StubHost, name: str = "x") -> Grant:
    """Acquire and release a lock twice: its record stays, which it does not at the first use of a name."""
    assert drive(backend.release(granted(drive(backend.try_acquire(host.request(name))))))
    grant = granted(drive(backend.try_acquire(host.request(name))))
    assert drive(backend.release(grant))
    return grant


def waiter_count(backend: FileBackend) -> int:
    """How many wait for the lock x."""
    holders = drive(backend.holders("x"))
    return (holders[0].waiters or 0) if holders else 0


def mode(path: Path) -> int:
    """The permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - names only
