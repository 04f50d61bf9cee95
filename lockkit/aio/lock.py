"""A named lock in the async API."""

from __future__ import annotations

import asyncio
import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast

from lockkit import validation
from lockkit.configuration.name_template import NameTemplate
from lockkit.errors import ConfigurationError
from lockkit.lease import INHERIT, BaseLease, Inherit, WithStack

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

    from lockkit.aio.lease import Lease
    from lockkit.engine.engine import Engine
    from lockkit.engine.settings import LockSettings, LostCallback

__all__ = ["Block", "Lock"]

P = ParamSpec("P")
R = TypeVar("R")


class Lock:
    """
    A named lock of a client. Holds nothing itself: every acquisition is a `Lease` of its own.

    May be used again, by many tasks at once, as an async context manager, and as a decorator of coroutine functions.
    """

    __slots__ = ("_blocks", "_cancel_on_lost", "_engine", "_settings")

    def __init__(self, engine: Engine[Lease], settings: LockSettings, *, cancel_on_lost: bool) -> None:
        """Made by `Client.lock`."""
        self._engine = engine
        self._settings = settings
        self._cancel_on_lost = cancel_on_lost
        self._blocks: WithStack[Block[Lease]] = WithStack()

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    async def acquire(self, timeout: float | timedelta | Inherit | None = INHERIT) -> Lease:
        """See `lockkit.Lock.acquire`. Cancelling it leaves nothing behind at the backend."""
        seconds = self._settings.timeout if isinstance(timeout, Inherit) else self._seconds(timeout)
        return await self._engine.acquire(self._settings, seconds)

    async def try_acquire(self, timeout: float | timedelta | None = 0) -> Lease | None:
        """See `lockkit.Lock.try_acquire`."""
        return await self._engine.try_acquire(self._settings, self._seconds(timeout))

    async def locked(self) -> bool:
        """See `lockkit.Lock.locked`."""
        return bool(await self._engine.holders(self._settings.name))

    async def __aenter__(self) -> Lease:
        """Acquire; the body never runs without the lock."""
        lease = await (await self._engine.acquire(self._settings, self._settings.timeout)).__aenter__()
        task = self._engine.runtime.current()
        cancelled = cast("asyncio.Task[Any]", task) if self._cancel_on_lost else None
        self._blocks.push(task, Block(lease, cancelled))
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release.

        Raises:
            LockLost: The body ended well, or was cancelled by ``cancel_on_lost``, after the lease was lost.
        """
        block = self._blocks.pop(self._engine.runtime.current())
        record = block.lease._record  # noqa: SLF001 - the lock and its lease are one unit
        if block.turns_into_loss(error):
            record.check()
        await self._engine.releases.leave(record, error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a coroutine function: each call holds the lock until its coroutine ends.

        The name is formatted with the call's arguments: ``@client.lock("stock:{product_id}")``.
        A plain wrapper (`functools.wraps`) around a coroutine function becomes a coroutine function.

        Raises:
            ConfigurationError: Not a coroutine function, or a field that is no parameter of the function.
                From a call: the coroutine returned another one, or a generator, which would run without the lock.
        """
        template = NameTemplate(self._settings.name, function, backend=self._engine.url)
        if not template.is_coroutine and not template.wraps_coroutine:
            message = (
                f"an asyncio lock cannot decorate {template.label!r}, which is not a coroutine function: it could "
                "not wait for the lock. Make it `async def`, or use a client of lockkit.connect()."
            )
            raise ConfigurationError(message, name=self._settings.name, backend=self._engine.url)

        @functools.wraps(function)
        async def hold(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
            async with self._named(template.name(arguments, keywords)):
                result = function(*arguments, **keywords)
                # A wrapper may have run its coroutine already.
                return template.finished(await result if inspect.isawaitable(result) else result, awaited=True)

        return cast("Callable[P, R]", hold)

    def _seconds(self, timeout: float | timedelta | None) -> float | None:
        return validation.timeout(timeout, name=self._settings.name, backend=self._engine.url)

    def _named(self, name: str) -> Lock:
        settings = replace(self._settings, name=validation.lock_name(name))
        return Lock(self._engine, settings, cancel_on_lost=self._cancel_on_lost)

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<lockkit.aio.Lock {self._settings.name!r} at {self._engine.url}>"


class _Losable(Protocol):
    def on_lost(self, callback: LostCallback) -> None: ...


B = TypeVar("B", bound=_Losable)


class Block(Generic[B]):
    """One ``async with``, and the task to cancel if its lease, or one of its leases, is lost."""

    __slots__ = ("_cancelled", "_cancelling", "_task", "lease")

    def __init__(self, lease: B, task: asyncio.Task[Any] | None) -> None:
        """Begin. None: nothing is cancelled."""
        self.lease = lease
        self._task = task
        self._cancelled = False
        self._cancelling = 0 if task is None else task.cancelling()
        if task is not None:
            lease.on_lost(self._cancel)

    def _cancel(self, lease: BaseLease, reason: str) -> None:
        del lease, reason
        if self._task is not None:
            self._cancelled = True
            self._task.cancel("the lockkit lease was lost")

    def turns_into_loss(self, error: BaseException | None) -> bool:
        """
        End the block; returns whether it ended by this block's own cancellation, which becomes `LockLost`.

        As `asyncio.timeout` does it: if other code has cancelled the task too, that cancellation goes on.
        """
        task, self._task = self._task, None
        if not self._cancelled or task is None:
            return False
        return task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)
