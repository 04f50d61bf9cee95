"""Tries, bounds and pauses of optimistic updates: the same for every store. See `lockkit.optimistic`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from lockkit import validation
from lockkit.errors import ConfigurationError, LockError, LockTimeout
from lockkit.optimistic import PAUSE_MAX

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["Conflict", "check_bounds", "retry"]

T = TypeVar("T")

_PAUSE_MIN = 0.0005
"""Least upper bound of the first pause, seconds: about what a try takes on a fast network."""


class Conflict(LockError):
    """Somebody else was quicker; nothing was changed. Never leaves lockkit."""


def check_bounds(attempts: object, timeout: object, name: str) -> tuple[int | None, float | None]:
    """
    Check how often and for how long to try.

    Returns:
        Attempts and seconds, each None if there is no bound.

    Raises:
        ConfigurationError: One of them is wrong, or there is none at all.
    """
    if attempts is not None and (isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1):
        message = f"attempts={validation.shown(attempts)} must be a whole number from 1 on, or None"
        raise ConfigurationError(message, name=name)
    if attempts is None and timeout is None:
        message = "give attempts or timeout: without any bound a caller could be kept for ever"
        raise ConfigurationError(message, name=name)
    return attempts, validation.timeout(timeout, name=name)


async def retry(
    runtime: Runtime,
    attempt: Callable[[], Awaitable[T]],
    bounds: tuple[int | None, float | None],
    *,
    name: str,
    label: Callable[[], str],
    missed: str = "changed",
) -> T:
    """
    Try until it succeeds or a bound is reached.

    Args:
        runtime: Of the face.
        attempt: One try. Raises `Conflict` if it may be tried again; all else ends it.
        bounds: From `check_bounds`.
        name: What is changed, for the error.
        label: Gives where that is, without a password.
        missed: What was to be done with it.

    Raises:
        LockTimeout: A bound is reached.
    """
    attempts, limit = bounds
    began = runtime.now()
    until = None if limit is None else began + limit
    tried = 0
    while True:
        started = runtime.now()
        try:
            return await attempt()
        except Conflict as conflict:
            tried += 1
            reason = conflict.__cause__
        now = runtime.now()
        if tried == attempts or (until is not None and now >= until):
            message = (
                f"{name!r} at {label()} was not {missed}: others were quicker in "
                f"all of {tried} tries within {now - began:.3g} s. Try later, with a shorter fn, or take a lock"
            )
            raise LockTimeout(message, name=name) from reason
        pause_max = min(PAUSE_MAX, max(_PAUSE_MIN, now - started) * 2 ** min(tried, 20))
        pause = runtime.random.uniform(0, pause_max)
        await runtime.sleep(pause if until is None else min(pause, until - now))
