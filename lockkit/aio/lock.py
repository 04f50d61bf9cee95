"""A named lock in the async API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from lockkit.aio.lease import Cancellations, Lease
from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.engine import Engine
from lockkit.engine.settings import INHERIT, Inherit, NoOthers, unknown_parameter
from lockkit.errors import ConfigurationError
from lockkit.lease import BaseLock, OtherApi, SharedWithStack, WithStack, as_current
from lockkit.units import Seconds

__all__ = ["Attempt", "Lock", "SkippingLock"]

P = ParamSpec("P")
R = TypeVar("R")


class Lock(BaseLock):
    """
    A named lock of a client. Holds nothing itself: every acquisition is a `Lease` of its own.

    May be used again, by many tasks at once, as an async context manager, and as a decorator of coroutine functions.
    """

    __slots__ = ()
    _lease_from = "lease = await lock.acquire()"
    __enter__ = OtherApi()
    _api = "lockkit.aio"
    _engine: Engine[Lease]
    _blocks: WithStack[Lease]

    async def acquire(
        self, timeout: Seconds | timedelta | Inherit | None = INHERIT, **unknown: Unpack[NoOthers]
    ) -> Lease:
        """See `lockkit.Lock.acquire`. Cancelling it leaves nothing behind at the backend."""
        if unknown:
            raise unknown_parameter(Lock.acquire, unknown)
        seconds = self._settings.timeout if isinstance(timeout, Inherit) else self._seconds(timeout)
        return self._cancelling(await self._engine.acquire(self._settings, seconds))

    async def try_acquire(self, timeout: Seconds | timedelta | None = 0, **unknown: Unpack[NoOthers]) -> Lease | None:
        """
        See `lockkit.Lock.try_acquire`.

        Keep the lease: ``if lease := await lock.try_acquire():``. A bare ``if await lock.try_acquire():`` drops it.
        """
        if unknown:
            raise unknown_parameter(Lock.try_acquire, unknown)
        lease = await self._engine.try_acquire(self._settings, self._seconds(timeout))
        return None if lease is None else self._cancelling(lease)

    def _cancelling(self, lease: Lease) -> Lease:
        """Return a lease whose loss cancels the bodies of the blocks to come, if that is asked for."""
        if self._settings.cancel_on_lost and lease._cancellations is None:  # noqa: SLF001 - the lock and its lease are one unit, here and below
            lease._cancellations = Cancellations()  # noqa: SLF001
        return lease

    def attempt(self, timeout: Seconds | timedelta | None = 0, **unknown: Unpack[NoOthers]) -> Attempt:
        """See `lockkit.Lock.attempt`: ``async with lock.attempt() as lease:`` and ``if lease:`` below it."""
        if unknown:
            raise unknown_parameter(Lock.attempt, unknown)
        return Attempt(self, self._seconds(timeout))

    async def locked(self) -> bool:
        """See `lockkit.Lock.locked`."""
        return bool(await self._engine.holders(self._settings.name))

    async def __aenter__(self) -> Lease:
        """Acquire; the body never runs without the lock."""
        lease = self._cancelling(await self._engine.acquire(self._settings, self._settings.timeout))
        lease._enter()  # noqa: SLF001
        self._blocks.push(lease._record.acquired_by, lease)  # noqa: SLF001
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release.

        Raises:
            LockLost: The body ended well, or was cancelled by ``cancel_on_lost``, after the lease was lost.
        """
        lease = self._blocks.pop(self._engine.runtime.current)  # kept: a lease that nothing refers to is not released
        await lease._leave(error)  # noqa: SLF001

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a coroutine function: each call holds the lock until its coroutine ends.

        The name is formatted with the call's arguments, as by `lockkit.Lock.__call__`.
        ``on_busy="skip"`` as in `lockkit.Lock.__call__`.
        A plain wrapper (`functools.wraps`) around a coroutine function becomes a coroutine function.

        Raises:
            ConfigurationError: Not a coroutine function, or a field that is no parameter of the function.
                From a call: the coroutine returned another one, or a generator, which would run without the lock.
        """
        template = NameTemplate(self.name, function, backend=self._engine.url)
        if not template.is_coroutine and not template.wraps_coroutine:
            message = (
                f"an asyncio lock cannot decorate {template.label!r}, which is not a coroutine function: it could "
                "not wait for the lock. Make it `async def`, or use a client of lockkit.connect()."
            )
            raise ConfigurationError(message, name=self._settings.name, backend=self._engine.url)

        @functools.wraps(function)
        async def hold(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
            lock = Lock(self._engine, self._engine.named(self._settings, template.name(arguments, keywords)))
            async with lock.attempt(self._settings.timeout) if self._settings.skips else lock as lease:
                if lease is None:
                    return None
                with as_current(lease):
                    result = function(*arguments, **keywords)
                    # A wrapper may have run its coroutine already.
                    return template.finished(await result if inspect.isawaitable(result) else result, awaited=True)

        return cast("Callable[P, R]", hold)


class SkippingLock(Lock):
    """A `Lock` with ``on_busy="skip"``: for type checkers, since what it decorates may return None."""

    __slots__ = ()

    def __call__(  # type: ignore[override] # of a function that returns a coroutine, which may give None
        self, function: Callable[P, Awaitable[R]]
    ) -> Callable[P, Coroutine[Any, Any, R | None]]:
        """See `Lock.__call__`."""
        return cast("Callable[P, Coroutine[Any, Any, R | None]]", super().__call__(function))


class Attempt:
    """A context manager made by `Lock.attempt`: its target is a `Lease`, or None if the lock stayed busy."""

    __slots__ = ("_blocks", "_lock", "_timeout")
    __enter__ = OtherApi()

    def __init__(self, lock: Lock, timeout: Seconds | None) -> None:
        """Made by `Lock.attempt`."""
        self._lock = lock
        self._timeout = timeout
        self._blocks: WithStack[Lease | None] = SharedWithStack()

    async def __aenter__(self) -> Lease | None:
        """Try to acquire."""
        lease = await self._lock.try_acquire(self._timeout)
        if lease is not None:
            lease._enter()  # noqa: SLF001
        self._blocks.push(self._lock._engine.runtime.current(), lease)  # noqa: SLF001 - another form of the lock, here and below
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release what was acquired.

        Raises:
            LockLost: As leaving ``async with lock`` does.
        """
        lease = self._blocks.pop(self._lock._engine.runtime.current)  # noqa: SLF001
        if lease is not None:
            await lease._leave(error)  # noqa: SLF001

    def __repr__(self) -> str:
        """Show the lock."""
        return f"<lockkit.aio.Attempt at {self._lock!r}>"
