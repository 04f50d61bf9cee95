"""A named lock in the sync API, and its adapter with the signatures of ``threading.Lock``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast, overload

from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.engine import Engine
from lockkit.engine.settings import INHERIT, Inherit, NoOthers, unknown_parameter
from lockkit.errors import ConfigurationError
from lockkit.lease import BaseLock, OtherApi, SharedWithStack, WithStack, as_current
from lockkit.runtime import drive
from lockkit.sync.lease import Lease
from lockkit.units import Seconds

__all__ = ["Attempt", "Lock", "SkippingLock", "ThreadingLock"]

P = ParamSpec("P")
R = TypeVar("R")


class Lock(BaseLock):
    """
    A named lock of a client. Holds nothing itself: every acquisition is a `Lease` of its own.

    May be used again, by many threads at once, as a context manager, and as a decorator.
    """

    __slots__ = ()
    __aenter__ = OtherApi()
    _api = "lockkit"
    _engine: Engine[Lease]
    _blocks: WithStack[Lease]

    def acquire(self, timeout: Seconds | timedelta | Inherit | None = INHERIT, **unknown: Unpack[NoOthers]) -> Lease:
        """
        Wait for the lock. In a thread that runs an event loop the wait blocks that loop: prefer `lockkit.aio` there.

        Args:
            timeout: Seconds to wait: None without limit, 0 tries once. By default the lock's.

        Raises:
            LockError: The wait would never end: it would block the event loop of the task that holds the lock.
            LockTimeout: It was busy for the whole wait.
            BackendUnavailable: The backend did not answer to the end of the wait (without timeout: for
                ``unavailable_after`` seconds).
            ConfigurationError: The timeout is wrong, or the server refuses the credentials.
        """
        if unknown:
            raise unknown_parameter(Lock.acquire, unknown)
        seconds = self._settings.timeout if isinstance(timeout, Inherit) else self._seconds(timeout)
        return drive(self._engine.acquire(self._settings, seconds))

    def try_acquire(self, timeout: Seconds | timedelta | None = 0, **unknown: Unpack[NoOthers]) -> Lease | None:
        """
        Wait for the lock, and return None if it stayed busy.

        Keep the lease: ``if lease := lock.try_acquire():``. A bare ``if lock.try_acquire():`` drops it, which is logged
        at WARNING: it is not renewed, and nobody can release it. `attempt` is the same as a context manager.

        Args:
            timeout: Seconds to wait; 0 tries once.

        Raises:
            BackendUnavailable: The backend did not answer.
            ConfigurationError: The timeout is wrong, or the server refuses the credentials.
        """
        if unknown:
            raise unknown_parameter(Lock.try_acquire, unknown)
        return drive(self._engine.try_acquire(self._settings, self._seconds(timeout)))

    def attempt(self, timeout: Seconds | timedelta | None = 0, **unknown: Unpack[NoOthers]) -> Attempt:
        """
        Make a context manager that gives a lease, or None if the lock stayed busy. The body runs in both cases.

        ``with lock.attempt() as lease:`` and ``if lease:`` below it.
        Leaving it releases the lease, as leaving ``with lock`` does.

        Args:
            timeout: Seconds to wait; 0 tries once.

        Raises:
            ConfigurationError: The timeout is wrong. Entering raises what `try_acquire` does.
        """
        if unknown:
            raise unknown_parameter(Lock.attempt, unknown)
        return Attempt(self, self._seconds(timeout))

    def locked(self) -> bool:
        """
        Ask the backend whether any client holds the lock.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return bool(drive(self._engine.holders(self._settings.name)))

    def as_threading_lock(self) -> ThreadingLock:
        """Return an adapter with the signatures of ``threading.Lock``, for code that takes one."""
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        """Acquire; the body never runs without the lock."""
        lease = drive(self._engine.acquire(self._settings, self._settings.timeout))
        lease.__enter__()
        self._blocks.push(lease._record.acquired_by, lease)  # noqa: SLF001 - the lock and its lease are one unit
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release.

        Raises:
            LockLost: The body ended well, but the lease was lost before (unless ``raise_on_lost=False``).
        """
        lease = self._blocks.pop(self._engine.runtime.current)
        drive(self._engine.releases.leave(lease._record, error))  # noqa: SLF001 - as above

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a function: each call holds the lock.

        The name is formatted with the call's arguments: ``@client.lock("stock:{product_id}")``. With several fields,
        ``%`` and the character that begins the text between two of them are percent-encoded in the values.
        With ``on_busy="skip"`` a call returns None without running the function if the lock stays busy.
        A coroutine function holds the lock until its coroutine ends, but waits for it by blocking its event loop:
        prefer `lockkit.aio` there. A plain wrapper (`functools.wraps`) around a coroutine function acquires the lock
        when it is called, and holds it until the coroutine that it returns ends.

        Raises:
            ConfigurationError: A generator function, a field that is no parameter of the function, or two fields
                without text between them. From a call: the function returned an awaitable or a generator, which would
                run without the lock.
        """
        template = NameTemplate(self.name, function, backend=self._engine.url)
        if template.is_coroutine:

            @functools.wraps(function)
            async def hold_until_done(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
                lease = self._acquire_for(template.name(arguments, keywords))
                if lease is None:
                    return None
                with lease, as_current(lease):
                    result = await cast("Awaitable[object]", function(*arguments, **keywords))
                    return template.finished(result, awaited=True)

            return cast("Callable[P, R]", hold_until_done)

        if template.wraps_coroutine:
            if self._settings.skips:
                message = (
                    f"lock {self.name!r} with on_busy='skip' cannot decorate {template.label!r}, a plain wrapper of a "
                    "coroutine function (what would a skipped call return?): put the lock's decorator below the others"
                )
                raise ConfigurationError(message, name=self.name, backend=self._engine.url)

            @functools.wraps(function)
            def hold_until_result_is_done(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - as above
                with ExitStack() as block:
                    settings = self._engine.named(self._settings, template.name(arguments, keywords))
                    lease = block.enter_context(drive(self._engine.acquire(settings, settings.timeout)))
                    with as_current(lease):
                        result = function(*arguments, **keywords)
                    if not inspect.iscoroutine(result):
                        return template.finished(result)
                    return _finish(block.pop_all(), lease, result, template)

            return hold_until_result_is_done

        @functools.wraps(function)
        def hold(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - as above
            lease = self._acquire_for(template.name(arguments, keywords))
            if lease is None:
                return None
            with lease, as_current(lease):
                return template.finished(function(*arguments, **keywords))

        return cast("Callable[P, R]", hold)

    def _acquire_for(self, name: str) -> Lease | None:
        """Acquire for a call of a decorated function; None if ``on_busy`` skips it."""
        engine = self._engine
        settings = engine.named(self._settings, name)
        if settings.skips:
            return drive(engine.try_acquire(settings, settings.timeout))
        return drive(engine.acquire(settings, settings.timeout))

    def _check_in_set(self) -> None:
        """Raise `ConfigurationError` if it cannot be in a set, which releases the lease without asking the lock."""


class SkippingLock(Lock):
    """A `Lock` with ``on_busy="skip"``: for type checkers, since what it decorates may return None."""

    __slots__ = ()

    @overload  # type: ignore[override] # None is what the caller has asked for
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | None]]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]: ...

    def __call__(self, function: Callable[P, Any]) -> Callable[P, Any]:
        """See `Lock.__call__`."""
        return super().__call__(function)


async def _finish(
    block: ExitStack, lease: Lease, coroutine: Coroutine[Any, Any, object], template: NameTemplate
) -> object:
    """Run a coroutine in a block that was entered when the coroutine was made."""
    with block, as_current(lease):
        return template.finished(await coroutine, awaited=True)


class Attempt:
    """A context manager made by `Lock.attempt`: its target is a `Lease`, or None if the lock stayed busy."""

    __slots__ = ("_blocks", "_lock", "_timeout")
    __aenter__ = OtherApi()

    def __init__(self, lock: Lock, timeout: Seconds | None) -> None:
        """Made by `Lock.attempt`."""
        self._lock = lock
        self._timeout = timeout
        self._blocks: WithStack[Lease | None] = SharedWithStack()

    def __enter__(self) -> Lease | None:
        """Try to acquire."""
        lease = self._lock.try_acquire(self._timeout)
        if lease is not None:
            lease.__enter__()
        self._blocks.push(self._lock._engine.runtime.current(), lease)  # noqa: SLF001 - another form of the lock
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release what was acquired.

        Raises:
            LockLost: As leaving ``with lock`` does.
        """
        lease = self._blocks.pop(self._lock._engine.runtime.current)  # noqa: SLF001 - as above
        if lease is not None:
            lease.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        """Show the lock."""
        return f"<lockkit.Attempt at {self._lock!r}>"


class ThreadingLock:
    """
    A lock with the signatures and rules of ``threading.Lock``, for libraries that take one.

    As there, any thread may release, and there is one holder at a time per object. Unlike a
    ``threading.Lock`` it can be lost: while A is inside, its lease may end and B enter through the same object. So each
    acquisition is kept with its thread (where that runs an event loop, with its task), and a release ends the
    acquisition that it belongs to:

    - leaving ``with`` ends that of its ``with``; if it has been released, the last one of its own thread or task;
    - ``release()`` ends the last one of its own thread or task; in one that has none, the oldest of all.
    """

    __slots__ = ("__weakref__", "_acquired", "_blocks", "_current", "_lock")

    def __init__(self, lock: Lock) -> None:
        """Made by `Lock.as_threading_lock`."""
        self._lock = lock
        self._current = lock._engine.runtime.current  # noqa: SLF001 - another form of the lock
        # Its methods are atomic. A mutex might stay taken when Ctrl-C strikes.
        self._acquired: list[tuple[object, Lease]] = []
        self._blocks: WithStack[tuple[object, Lease]] = WithStack()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - threading.Lock's
        """
        Acquire as ``threading.Lock.acquire`` does.

        Args:
            blocking: Wait. False tries once.
            timeout: Seconds to wait; -1 without limit.

        Raises:
            ValueError: A timeout without blocking, or a negative one other than -1.
            OverflowError: A timeout above ``threading.TIMEOUT_MAX``.
            BackendUnavailable: The backend did not answer.
        """
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        seconds = 0.0 if not blocking else None if timeout == -1 else timeout
        lease = self._lock.try_acquire(seconds)
        if lease is None:
            return False
        self._acquired.append((self._current(), lease))
        return True

    def release(self) -> None:
        """
        Release, from any thread.

        Raises:
            RuntimeError: This object does not hold the lock.
            LockLost: It was lost before.
        """
        me = self._current()
        while acquired := self._acquired.copy():
            mine = [entry for entry in acquired if entry[0] == me]
            entry = mine[-1] if mine else acquired[0]
            if self._forget(entry):
                entry[1].release()
                return
        raise RuntimeError("release unlocked lock")

    def _forget(self, entry: tuple[object, Lease]) -> bool:
        """End an acquisition; False if another thread has just done it."""
        try:
            self._acquired.remove(entry)
        except ValueError:
            return False
        return True

    def locked(self) -> bool:
        """Ask the backend whether any client holds the lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        """Acquire without limit."""
        entry = (self._current(), self._lock.acquire(None).__enter__())
        self._acquired.append(entry)
        self._blocks.push(entry[0], entry)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release; an exception of the body is not hidden."""
        entry = self._blocks.pop(self._current)
        if not self._forget(entry):  # it was released in the block, and perhaps acquired again: `threading.Condition`
            me = self._current()
            entry = next((one for one in reversed(self._acquired) if one[0] == me), entry)
            self._forget(entry)
        entry[1].__exit__(kind, error, trace)  # no error if it was released

    def __repr__(self) -> str:
        """Show name and backend, and whether this object holds the lock (it does not ask for other holders)."""
        state = "locked" if self._acquired else "unlocked"
        return f"<{state} lockkit.ThreadingLock object {self._lock.name!r} at {self._lock._engine.url}>"  # noqa: SLF001 - of the same API
