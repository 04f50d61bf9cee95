"""Several locks at once, in the sync API."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from lockkit.engine.settings import INHERIT, Inherit, LostCallback
from lockkit.errors import LockTimeout
from lockkit.lease import BaseLockSet, OtherApi, SharedWithStack
from lockkit.primitives.lock_set import BaseLeaseSet, LockSetCore, SetMember, members_of, name_templates
from lockkit.runtime import drive
from lockkit.sync.lease import Lease
from lockkit.sync.lock import Lock
from lockkit.units import Seconds

__all__ = ["LeaseSet", "LockSet", "locks"]

P = ParamSpec("P")
R = TypeVar("R")


def locks(
    locks: Iterable[Lock],
    *,
    timeout: Seconds | timedelta | None = None,
    on_lost: LostCallback | None = None,
    stall: Seconds | timedelta | None = None,
) -> LockSet:
    """
    Describe several locks, also of several clients and backends, that are held together or not at all.

    Args:
        locks: At least 1, at most 100 locks of sync clients; a lock that is there twice counts once. Each keeps its own
            ttl and other settings, except for its timeout.
        timeout: Seconds that the caller waits for all of them together; None without limit, 0 tries each once.
        on_lost: Called once with ``(lease, reason)``, with the first lease that is lost.
        stall: Seconds without ``leases.beat()`` after which none of them is renewed until the next beat; by default the
            shortest of the locks' own.

    Raises:
        ConfigurationError: One of them is wrong.
    """
    given = members_of(locks, Lock, "lockkit")
    for lock in given:
        lock._check_in_set()  # noqa: SLF001 - of the same API
    members = [SetMember(lock._engine, lock._settings) for lock in given]  # noqa: SLF001 - as above
    return LockSet(LockSetCore(members, timeout, on_lost, stall=stall))


class LeaseSet(BaseLeaseSet[Lease]):
    """
    The leases of several locks, which were acquired together.

    ``leases["name"]`` is a `Lease` like any other: renewed, fenced and watched. Iterating yields the leases. Leaving
    the set as a context manager releases all.
    """

    __slots__ = ()
    __aenter__ = OtherApi()
    _api = "lockkit"

    def confirm(self) -> bool:
        """
        Ask each backend whether the lease still holds the lock; True if all do. A "no" marks that lease as lost.

        Raises:
            BackendUnavailable: One cannot be asked.
        """
        return drive(self._confirm())

    def extend(self, ttl: Seconds | timedelta | None = None) -> None:
        """
        Set the time left of each to `ttl`; never adds to it. Stops at the first error.

        Args:
            ttl: Seconds; None means each lease's ttl. Later renewals use it, too.

        Raises:
            LockLost: One is not held.
            BackendUnavailable: No answer for one; it may still be held, see ``remaining()``.
            ConfigurationError: The ttl is wrong.
        """
        drive(self._extend(ttl))

    def release(self) -> None:
        """
        Release all locks, the last one first. Tries each; raises the first error, with the others as notes.

        Releasing twice is no error.

        Raises:
            LockLost: One was lost before: the work since then was not protected.
            BackendUnavailable: No answer for one. Its renewal has stopped; call again, or leave it to the ttl.
        """
        drive(self._release())

    def __enter__(self) -> Self:
        """Return itself: all are held already."""
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all, as leaving ``with locks`` does."""
        drive(self._leave(error))


class LockSet(BaseLockSet):
    """
    Several locks that are held together or not at all. Made by `Client.locks` and `locks`.

    Holds nothing itself, and may be used again, by many threads at once, as a context manager, and as a decorator.

    All clients acquire in the same order, by the bytes of the name and then by URL, so sets never deadlock with each
    other.
    """

    __slots__ = ()
    _lease_from = "leases = locks.acquire()"
    __aenter__ = OtherApi()
    _api = "lockkit"
    _core: LockSetCore[Lease]
    _blocks: SharedWithStack[LeaseSet]

    def acquire(self, timeout: Seconds | timedelta | Inherit | None = INHERIT) -> LeaseSet:
        """
        Wait for all locks. If this raises, none is held.

        Args:
            timeout: Seconds to wait for all together: None without limit, 0 tries each once. By default the set's.

        Raises:
            LockTimeout: One was busy to the end of the wait; the message names it.
            LockLost: One was lost while lockkit waited for the others.
            BackendUnavailable: A backend did not answer to the end of the wait (without timeout: for
                ``unavailable_after`` seconds).
            LockError: The wait would never end, as for `Lock.acquire`.
            ConfigurationError: The timeout is wrong, or a server refuses the credentials.
        """
        return drive(self._core.acquire(timeout, LeaseSet))

    def try_acquire(self, timeout: Seconds | timedelta | None = 0) -> LeaseSet | None:
        """
        Wait for all locks, and return None if one stayed busy; then none is held.

        Keep the leases: ``if leases := locks.try_acquire():``. Dropped, they are not renewed, which is logged.

        Args:
            timeout: Seconds to wait for all together; 0 tries each once.

        Raises:
            LockLost: One was lost while lockkit waited for the others.
            BackendUnavailable: A backend did not answer.
            ConfigurationError: The timeout is wrong, or a server refuses the credentials.
        """
        try:
            return self.acquire(timeout)
        except LockTimeout:
            return None

    def __enter__(self) -> LeaseSet:
        """Acquire all; the body never runs without one of them."""
        leases = drive(self._core.acquire(INHERIT, LeaseSet)).__enter__()
        self._blocks.push(self._core.runtime.current(), leases)
        return leases

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release all, the last first; each is tried.

        Raises:
            LockLost: The body ended well, but a lease was lost before (unless ``raise_on_lost=False``).
        """
        self._blocks.pop(self._core.runtime.current).__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a function: each call holds all locks.

        Each name is formatted with the call's arguments, as by `Lock`: ``@client.locks(["acct:{source}",
        "acct:{target}"])``. A coroutine function holds the locks until its coroutine ends, but waits for them by
        blocking its event loop: prefer `lockkit.aio` there.

        Raises:
            ConfigurationError: A generator function, a plain wrapper of a coroutine function, or a field that is no
                parameter of the function. From a call: the function returned an awaitable or a generator, which would
                run without the locks.
        """
        templates = name_templates(self._core, function)
        template = templates[0]

        def locks_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> LockSet:
            return LockSet(self._core.named([template.name(arguments, keywords) for template in templates]))

        if template.is_coroutine:

            @functools.wraps(function)
            async def hold_until_done(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
                with locks_of(arguments, keywords).acquire():
                    result = await cast("Awaitable[object]", function(*arguments, **keywords))
                    return template.finished(result, awaited=True)

            return cast("Callable[P, R]", hold_until_done)

        @functools.wraps(function)
        def hold(*arguments: P.args, **keywords: P.kwargs) -> R:
            with locks_of(arguments, keywords):
                return template.finished(function(*arguments, **keywords))

        return hold
