"""Several locks at once, in the async API."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from lockkit.aio.lease import Cancellations, Lease
from lockkit.aio.lock import Lock
from lockkit.engine.settings import INHERIT, Inherit, LostCallback
from lockkit.errors import LockTimeout
from lockkit.lease import BaseLockSet, OtherApi, SharedWithStack
from lockkit.primitives.lock_set import BaseLeaseSet, LockSetCore, SetMember, members_of, name_templates
from lockkit.units import Seconds

__all__ = ["LeaseSet", "LockSet", "locks"]

P = ParamSpec("P")
R = TypeVar("R")


def locks(
    locks: Iterable[Lock],
    *,
    timeout: Seconds | timedelta | None = None,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    stall: Seconds | timedelta | None = None,
) -> LockSet:
    """
    Describe several locks, also of several clients and backends, that are held together or not at all.

    Args:
        locks: See `lockkit.locks`; locks of asyncio clients.
        timeout: See there.
        on_lost: As there, and may be a coroutine function.
        cancel_on_lost: ``async with`` cancels its body when one of the leases is lost, and raises `LockLost`. The
            setting of the locks themselves does not count.
        stall: See there.

    Raises:
        ConfigurationError: One of them is wrong.
    """
    members = [SetMember(lock._engine, lock._settings) for lock in members_of(locks, Lock, "lockkit.aio")]  # noqa: SLF001 - of the same API
    return LockSet(LockSetCore(members, timeout, on_lost, cancel_on_lost=cancel_on_lost, stall=stall))


class LeaseSet(BaseLeaseSet[Lease]):
    """The leases of several locks, which were acquired together. See `lockkit.LeaseSet`."""

    __slots__ = ("_cancellations",)
    __enter__ = OtherApi()
    _api = "lockkit.aio"

    def __init__(self, locks: LockSetCore[Lease]) -> None:
        """Made by ``LockSet.acquire``."""
        super().__init__(locks)
        self._cancellations = Cancellations()

    async def confirm(self) -> bool:
        """See `lockkit.LeaseSet.confirm`."""
        return await self._confirm()

    async def extend(self, ttl: Seconds | timedelta | None = None) -> None:
        """See `lockkit.LeaseSet.extend`."""
        await self._extend(ttl)

    async def release(self) -> None:
        """See `lockkit.LeaseSet.release`."""
        await self._release()

    async def __aenter__(self) -> Self:
        """Return itself: all are held already."""
        self._enter()
        if self._locks.cancel_on_lost:
            self._cancellations.enter(self, self._locks.runtime.current())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all, as leaving ``async with locks`` does."""
        if self._cancellations.leave(self._locks.runtime.current(), error):
            await self._leave_cancelled()
        await self._leave(error)


class LockSet(BaseLockSet):
    """
    Several locks that are held together or not at all. See `lockkit.LockSet`.

    May be used again, by many tasks at once, as an async context manager, and as a decorator of coroutine functions.
    """

    __slots__ = ()
    _lease_from = "leases = await locks.acquire()"
    __enter__ = OtherApi()
    _api = "lockkit.aio"
    _core: LockSetCore[Lease]
    _blocks: SharedWithStack[LeaseSet]

    async def acquire(self, timeout: Seconds | timedelta | Inherit | None = INHERIT) -> LeaseSet:
        """See `lockkit.LockSet.acquire`. Cancelling it leaves nothing behind at the backends."""
        return await self._core.acquire(timeout, LeaseSet)

    async def try_acquire(self, timeout: Seconds | timedelta | None = 0) -> LeaseSet | None:
        """See `lockkit.LockSet.try_acquire`. Keep the leases: ``if leases := await locks.try_acquire():``."""
        try:
            return await self.acquire(timeout)
        except LockTimeout:
            return None

    async def __aenter__(self) -> LeaseSet:
        """Acquire all; the body never runs without one of them."""
        leases = await (await self._core.acquire(INHERIT, LeaseSet)).__aenter__()
        self._blocks.push(self._core.runtime.current(), leases)
        return leases

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release all, the last first; each is tried.

        Raises:
            LockLost: The body ended well, or was cancelled by ``cancel_on_lost``, after a lease was lost.
        """
        leases = self._blocks.pop(self._core.runtime.current)
        await leases.__aexit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a coroutine function: each call holds all locks until its coroutine ends.

        Each name is formatted with the call's arguments, as by `Lock`.

        Raises:
            ConfigurationError: Not a coroutine function, or a field that is no parameter of the function.
                From a call: the coroutine returned another one, or a generator, which would run without the locks.
        """
        templates = name_templates(self._core, function, coroutine=True)
        template = templates[0]

        @functools.wraps(function)
        async def hold(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
            core = self._core.named([template.name(arguments, keywords) for template in templates])
            async with LockSet(core):
                return template.finished(
                    await cast("Awaitable[object]", function(*arguments, **keywords)), awaited=True
                )

        return cast("Callable[P, R]", hold)
