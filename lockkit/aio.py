"""
The async API: the same names as `lockkit`; what does I/O is awaited, what is local stays plain.

Thin: every decision is made by the engine. A client belongs to the event loop in which it was first used.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from lockkit import validation
from lockkit.configuration import profiles, registry
from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.engine import Engine
from lockkit.errors import ConfigurationError
from lockkit.lease import INHERIT, BaseLease, Inherit, WithStack
from lockkit.runtime import AsyncioRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from lockkit.backend import Capabilities, Holder
    from lockkit.engine.settings import LockSettings, LostCallback

__all__ = ["Client", "Lease", "Lock", "connect", "from_client"]

P = ParamSpec("P")
R = TypeVar("R")


def connect(url: str | None = None, *, profile: str | None = None, **options: Any) -> Client:
    """
    Make an asyncio client of a lock service, by ``await`` or as an async context manager.

    No I/O, and no event loop needed yet. Arguments and errors as `lockkit.connect`.

    Raises:
        ConfigurationError: The URL, the profile or an option is wrong.
    """
    settings = profiles.resolve(url, profile, options)
    return Client(
        Engine(functools.partial(registry.open_backend, settings.url, settings.options), AsyncioRuntime(), Lease)
    )


def from_client(client: object, **options: Any) -> Client:
    """
    Make an asyncio client on a connection of the application, which ``close()`` leaves open.

    Args:
        client: For example a ``redis.asyncio.Redis``; the message of the error lists what is accepted.
        **options: As for `connect`.

    Raises:
        ConfigurationError: No backend knows this kind of object, or an option is wrong.
    """
    return Client(Engine(functools.partial(registry.adopt, client, options), AsyncioRuntime(), Lease))


class Lease(BaseLease):
    """One grant of a lock to one holder, for a limited time. May be handed to another task and released there."""

    __slots__ = ()

    async def confirm(self) -> bool:
        """See `lockkit.Lease.confirm`."""
        return await self._engine.confirm(self._record)

    async def extend(self, ttl: float | timedelta | None = None) -> None:
        """See `lockkit.Lease.extend`."""
        await self._engine.extend(self._record, ttl)

    async def release(self) -> None:
        """See `lockkit.Lease.release`."""
        await self._engine.releases.release(self._record)

    async def wait_lost(self, timeout: float | timedelta | None = None) -> bool:
        """See `lockkit.Lease.wait_lost`."""
        return await self._engine.leases.wait_lost(self._record, timeout)

    async def __aenter__(self) -> Self:
        """Return itself: it is held already."""
        self._record.body = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as leaving ``async with lock`` does."""
        await self._engine.releases.leave(self._record, error)


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
        self._blocks: WithStack[_Block] = WithStack()

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
        self._blocks.push(task, _Block(lease, cancelled))
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


class _Block:
    """One ``async with``, and the task to cancel if its lease is lost."""

    __slots__ = ("_cancelled", "_cancelling", "_task", "lease")

    def __init__(self, lease: Lease, task: asyncio.Task[Any] | None) -> None:
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


class Client:
    """
    A connection to a lock service on asyncio, made by `connect` or `from_client`.

    Used as an async context manager it is closed at the end.
    """

    __slots__ = ("__weakref__", "_engine")

    def __init__(self, engine: Engine[Lease]) -> None:
        """Made by `connect` and `from_client`."""
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:
        """What the backend promises."""
        return self._engine.capabilities

    @property
    def url(self) -> str:
        """Where the backend is, without its password."""
        return self._engine.url

    def lock(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: float | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        cancel_on_lost: bool = False,
    ) -> Lock:
        """
        Describe a lock. Nothing is sent yet. See `lockkit.Client.lock`.

        Args:
            name: See there.
            ttl: See there.
            timeout: See there.
            renew: See there.
            reentrant: The task that holds the lock gets the same lease again, counted.
            max_hold: See there.
            metadata: See there.
            on_lost: As there, and may be a coroutine function.
            raise_on_lost: See there.
            cancel_on_lost: ``async with`` cancels its body when the lease is lost, and raises `LockLost` in place of
                the cancellation, as `asyncio.timeout` does with `TimeoutError`.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        settings = self._engine.settings(
            name,
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            reentrant=reentrant,
            max_hold=max_hold,
            metadata=metadata,
            on_lost=on_lost,
            raise_on_lost=raise_on_lost,
        )
        return Lock(self._engine, settings, cancel_on_lost=cancel_on_lost)

    async def holders(self, name: str) -> list[Holder]:
        """See `lockkit.Client.holders`."""
        return await self._engine.holders(name)

    async def break_lock(self, name: str) -> bool:
        """See `lockkit.Client.break_lock`."""
        return await self._engine.break_lock(name)

    async def ping(self) -> None:
        """See `lockkit.Client.ping`."""
        await self._engine.ping()

    async def close(self) -> None:
        """See `lockkit.Client.close`."""
        await self._engine.close()

    def __await__(self) -> Generator[Any, None, Self]:
        """Return itself, so that ``client = await lockkit.aio.connect(…)`` reads as usual."""
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    def __repr__(self) -> str:
        """Show the backend."""
        return f"<lockkit.aio.Client {self._engine.url}>"
