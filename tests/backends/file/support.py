"""Helpers for the tests of the file backend."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from lockkit.backend import Grant
from lockkit.backends.file.backend import FileBackend
from lockkit.runtime import drive
from tests.backends.support import FakeClock, StubHost

if TYPE_CHECKING:
    from pathlib import Path

    from lockkit.backend import Request

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


def waiter_count(backend: FileBackend) -> int:
    """How many wait for the lock x."""
    holders = drive(backend.holders("x"))
    return (holders[0].waiters or 0) if holders else 0


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, up to half a minute."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("the condition did not become true")


def tick(host: StubHost, seconds: float) -> None:
    """Let time pass for a host with a `FakeClock`."""
    assert isinstance(host.runtime, FakeClock)
    host.runtime.time += seconds


def mode(path: Path) -> int:
    """The permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - names only
