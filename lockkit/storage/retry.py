"""
What stores share: keys, and of optimistic updates how often to try, how long to pause, and what `fn` may return.

See `lockkit.optimistic`, which is the public module.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Final

from lockkit import validation
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockTimeout
from lockkit.runtime import Runtime
from lockkit.units import Instant

ATTEMPTS = 100
"""Default number of tries. More keep a caller busy for longer when it has no chance; fewer give up during bursts."""

TIMEOUT = 10.0
"""Default time after which no new try begins, seconds."""

PAUSE_MAX = 0.25
"""Longest pause between two tries, seconds. Longer wastes time after a burst, shorter lets the losers collide again."""

_PAUSE_MIN = 0.0005
"""Least upper bound of the first pause, seconds: about what a try takes on a fast network."""


class Delete(Enum):
    """The type of `DELETE`."""

    DELETE = "DELETE"

    def __repr__(self) -> str:
        return "lockkit.optimistic.DELETE"


DELETE: Final = Delete.DELETE
"""What a function returns to delete the key, row or node."""


class Conflict(LockError):
    """Another writer was faster; nothing was changed. Never leaves lockkit."""


class OptimisticUpdate(ABC):
    """
    One call of an update function: it tries until no other writer interferes. Written once for the sync and async APIs.

    Attributes:
        name: What is changed, for errors.
        label: The server, for errors; without a password.
        values: The types that `fn` may return, besides `DELETE` and None.
        values_named: The same in words.
        missed: What did not happen to `name` when all tries are used up.
    """

    values: ClassVar[tuple[type, ...]] = (str, bytes)
    values_named: ClassVar[str] = "bytes or a str"
    missed: ClassVar[str] = "changed"

    def __init__(self, runtime: Runtime, fn: object, name: str, label: str) -> None:
        """Check the function. No I/O."""
        if not callable(fn):
            raise ConfigurationError(f"fn must be a function, not {validation.shown(fn)}", name=name)
        self.runtime = runtime
        self.name = name
        self.label = label
        self._fn: Callable[..., Any] = fn

    @abstractmethod
    async def _attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """Read, call `fn`, and write unless another writer was faster; return what `fn` returned."""

    async def run(self, attempts: object, timeout: object) -> Any:  # noqa: ANN401 - what `fn` returns
        """Try until a try succeeds, or `attempts` or `timeout` is reached: LockTimeout. None sets no bound."""
        if attempts is not None and (isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1):
            message = f"attempts must be a whole number, 1 or more, or None; not {validation.shown(attempts)}"
            raise ConfigurationError(message, name=self.name)
        if attempts is None and timeout is None:
            message = "give attempts or timeout: without a bound the call might never return"
            raise ConfigurationError(message, name=self.name)
        seconds = validation.timeout(timeout, name=self.name)
        runtime = self.runtime
        began = runtime.now()
        until = None if seconds is None else began + seconds
        tried = 0
        while True:
            started = runtime.now()
            try:
                return await self._attempt()
            except Conflict as conflict:
                tried += 1
                reason = conflict.__cause__
            now = runtime.now()
            if tried == attempts or (until is not None and now >= until):
                message = (
                    f"{self.name!r} at {self.label} was not {self.missed}: other writers were faster in all of {tried} "
                    f"tries within {now - began:.3g} s. Try again later, use a shorter fn, or take a lock"
                )
                raise LockTimeout(message, name=self.name) from reason
            pause_max = min(PAUSE_MAX, max(_PAUSE_MIN, now - started) * 2 ** min(tried, 20))
            await pause_until(runtime, runtime.random.uniform(0, pause_max), until)

    async def call(self, *arguments: object) -> Any:  # noqa: ANN401 - what `fn` returns
        """Call `fn`, and await its result in the async API."""
        result = self._fn(*arguments)
        if self.runtime.kind == "blocking" and inspect.iscoroutine(result):
            result.close()
            raise ConfigurationError("fn is a coroutine function: use the function that ends in _async", name=self.name)
        return await self.runtime.io(result)

    async def new_value(self, current: object) -> Any:  # noqa: ANN401 - one of `values`, `DELETE` or None
        """Call `fn` with the current value and check what it returns."""
        new = await self.call(current)
        # A bool is an int, but a counter that becomes True is a mistake in every store.
        if isinstance(new, bool) or not isinstance(new, (*self.values, Delete, type(None))):
            message = (
                f"fn returned {validation.shown(new)}: it must return {self.values_named}, lockkit.optimistic.DELETE, "
                "or None to change nothing"
            )
            raise ConfigurationError(message, name=self.name)
        return new


def unknown_outcome(name: str, label: str, reason: object) -> BackendUnavailable:
    """Make the error for a change whose answer was lost: it is not sent again, which could make it twice."""
    message = (
        f"the answer to a change of {name!r} at {label} was lost ({reason}), so the change may have been made or not. "
        "Read the value before you try again"
    )
    return BackendUnavailable(message, name=name, backend=label)


def as_bytes(value: object, what: str, *, empty: bool = False) -> bytes:
    """Check a key or a value, and return it as bytes."""
    if not isinstance(value, (str, bytes)) or not (value or empty):
        message = f"{what} must be a {'' if empty else 'non-empty '}str or bytes, not {validation.shown(value)}"
        raise ConfigurationError(message)
    return value.encode() if isinstance(value, str) else value


def text_of(key: str | bytes) -> str:
    """Return a key as text, for people."""
    return key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")


async def pause_until(runtime: Runtime, seconds: float, until: Instant | None) -> None:
    """Sleep, but not beyond `until` (client monotonic clock; None: no limit)."""
    await runtime.sleep(seconds if until is None else min(seconds, max(0.0, until - runtime.now())))
