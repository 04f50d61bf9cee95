"""Waits of tests, which are polls with much patience; single tries at a lock on a real server, and renewals there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, cast

import pytest

import lockkit
import lockkit.aio
from lockkit import observers
from lockkit.engine import acquisition
from lockkit.engine.acquisition import Acquisition
from lockkit.errors import BackendUnavailable
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import wait_until

T = TypeVar("T")
UNTIL_SECONDS = 3 * PATIENCE
"""How long what must happen may take: a process may have to start for it."""

LOOK_SECONDS = 0.005


def until(condition: Callable[[], T | Literal[False] | None], seconds: float = UNTIL_SECONDS) -> T:
    """Poll until something is true, and return it; fail after a generous bound."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline  # before the look: the machine may stand still between the two
        if found := condition():
            return found
        assert not late, f"did not come true within {seconds:g} s: {condition}"
        time.sleep(LOOK_SECONDS)


async def until_async(condition: Callable[[], T | Literal[False] | None], seconds: float = UNTIL_SECONDS) -> T:
    """As `until`, while the event loop runs."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline
        if found := condition():
            return found
        assert not late, f"did not come true within {seconds:g} s: {condition}"
        await asyncio.sleep(LOOK_SECONDS)


def beside(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call in another thread, which the end of the tests does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return future


def wait_for_observers(patch: pytest.MonkeyPatch) -> None:
    """Have calls wait until observers have seen their events, on a busy machine too."""
    patch.setattr(observers, "WAIT_SECONDS", PATIENCE)
    patch.setattr(observers, "LAST_SECONDS", PATIENCE)


def begin_to_wait(patch: pytest.MonkeyPatch) -> None:
    """
    Have each timed wait for a single lock begin, however late the first answer came.

    Without this a wait of 10 ms is over before it has begun where the machine runs other programs for so long.
    """
    out_of_time = cast("property", Acquisition._out_of_time).fget
    assert out_of_time is not None

    def over(call: Acquisition[object]) -> bool:
        return (call._waiting or not call._request.queue) and out_of_time(call)

    patch.setattr(Acquisition, "_out_of_time", property(over))


def have_time_to_answer(patch: pytest.MonkeyPatch) -> None:
    """
    Wait for the answer to a single try as long as for any other.

    Where `tried` cannot ask again: its first request was answered, or is what the test is about.
    """
    patch.setattr(acquisition, "ANSWER_GRACE", PATIENCE)


def tried(lock: lockkit.Lock | lockkit.Semaphore, timeout: float = 0) -> lockkit.Lease | None:
    """
    Give the outcome of a single try, or of a short wait.

    Such a try leaves the server half a second. One that stalls for longer has broken no promise, and is asked again.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return lock.try_acquire(timeout)
        except BackendUnavailable:
            if time.monotonic() > deadline:
                raise


def busy(lock: lockkit.Lock | lockkit.Semaphore, timeout: float = 0) -> bool:
    """Tell whether a single try, or a short wait, finds a lock held, or no free permit; see `tried`."""
    return tried(lock, timeout) is None


async def busy_async(lock: lockkit.aio.Lock) -> bool:
    """See `busy`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await lock.try_acquire() is None
        except BackendUnavailable:
            if time.monotonic() > deadline:
                raise


def until_renewed(*leases: lockkit.Lease, begin: Callable[[], object] = bool) -> None:
    """
    Return once the deadline of each lease has moved since this call; fail if one is lost.

    `begin` asks for the renewals: called before this, they could be over when this looks first.
    """
    before = [lease._record.valid_until for lease in leases]
    begin()

    def renewed() -> str | None:
        for lease in leases:
            lease.check()
        left = sum(lease._record.valid_until <= deadline for lease, deadline in zip(leases, before, strict=True))
        return f"{left} leases were not renewed" if left else None

    wait_until(renewed)


async def until_renewed_async(lease: lockkit.aio.Lease, *, begin: Callable[[], object] = bool) -> None:
    """See `until_renewed`."""
    before = lease._record.valid_until
    begin()

    def renewed() -> bool:
        lease.check()
        return lease._record.valid_until > before

    await until_async(renewed)
