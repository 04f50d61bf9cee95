"""The client of a lock service in the async API."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from lockkit.aio.election import Election
from lockkit.aio.lease import Lease
from lockkit.aio.lock import Lock, SkippingLock
from lockkit.aio.lock_set import LockSet
from lockkit.aio.once import Once
from lockkit.aio.rwlock import RWLock
from lockkit.aio.semaphore import Semaphore
from lockkit.backend import Capabilities, Holder
from lockkit.configuration import profiles, registry
from lockkit.configuration.peer_parameters import NoOthers, unknown_parameter
from lockkit.engine.engine import Engine
from lockkit.engine.listing import Kind, Listing
from lockkit.engine.settings import INHERIT, Inherit, LockOptions, LostCallback, skipping_timeout
from lockkit.lease import OtherApi
from lockkit.primitives import once as core
from lockkit.primitives.lock_set import LockSetCore, SetMember, names_of
from lockkit.runtime import AsyncioRuntime
from lockkit.units import Seconds

__all__ = ["Client", "connect", "from_client"]


def connect(url: str | None = None, *, profile: str | None = None, **options: Any) -> Client:
    """
    Make an asyncio client of a lock service, by ``await`` or as an async context manager.

    No I/O, and no event loop needed yet. Arguments and errors as `lockkit.connect`.

    Raises:
        ConfigurationError: The URL, the profile or an option is wrong; or the program runs on trio.
    """
    settings = profiles.resolve(url, profile, options)
    open_backend = functools.partial(registry.open_backend, settings.url, settings.options, source=settings.elsewhere)
    return Client(Engine(open_backend, AsyncioRuntime(), Lease))


def from_client(client: object, **options: Any) -> Client:
    """
    Make an asyncio client on a connection of the application, which ``close()`` leaves open.

    Args:
        client: For example a ``redis.asyncio.Redis``; the message of the error lists what is accepted.
        **options: As for `connect`, but none of the driver, which has made the object.

    Raises:
        ConfigurationError: No backend knows this kind of object, or an option is wrong.
    """
    return Client(Engine(functools.partial(registry.adopt, client, options), AsyncioRuntime(), Lease))


class Client:
    """
    A connection to a lock service on asyncio, made by `connect` or `from_client`.

    Used as an async context manager it is closed at the end.
    """

    __slots__ = ("__weakref__", "_engine")
    __enter__ = OtherApi()

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

    @overload
    def lock(
        self, name: str, *, on_busy: Literal["skip"], cancel_on_lost: bool = False, **options: Unpack[LockOptions]
    ) -> SkippingLock: ...

    @overload
    def lock(
        self,
        name: str,
        *,
        on_busy: Literal["raise"] = "raise",
        cancel_on_lost: bool = False,
        **options: Unpack[LockOptions],
    ) -> Lock: ...

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | Inherit | None = INHERIT,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: Seconds | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        cancel_on_lost: bool = False,
        on_busy: Literal["raise", "skip"] = "raise",
        label: str | None = None,
        **unknown: Unpack[NoOthers],
    ) -> Lock:
        """
        Describe a lock. Nothing is sent yet. See `lockkit.Client.lock`.

        Args:
            name: See there.
            ttl: See there.
            timeout: See there.
            renew: See there.
            reentrant: The task that holds the lock gets the same lease again, counted. On Python 3.11
                ``asyncio.wait_for`` runs what it is given in another task, which waits for this one: use
                ``asyncio.timeout``.
            max_hold: See there.
            metadata: See there.
            on_lost: As there, and may be a coroutine function.
            raise_on_lost: See there.
            cancel_on_lost: ``async with`` cancels its body when the lease is lost, and raises `LockLost` in place of
                the cancellation, as `asyncio.timeout` does with `TimeoutError`.
            on_busy: See there.
            label: See there.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if unknown:
            raise unknown_parameter(Client.lock, unknown)
        if on_busy != "raise":
            timeout = skipping_timeout(on_busy, timeout, name=name, backend=self._engine.url)
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
            label=label,
        )
        kind = Lock if on_busy == "raise" else SkippingLock
        return kind(self._engine, settings, cancel_on_lost=cancel_on_lost, on_busy=on_busy)

    def rwlock(
        self,
        name: str,
        *,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | Inherit | None = INHERIT,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: Seconds | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        cancel_on_lost: bool = False,
        label: str | None = None,
        **unknown: Unpack[NoOthers],
    ) -> RWLock:
        """
        Describe a read/write lock. Nothing is sent yet. See `lockkit.Client.rwlock`.

        Args:
            name: See there.
            ttl: See there.
            timeout: See there.
            renew: See there.
            reentrant: The task that holds the write side gets its lease again for writing too.
            max_hold: See there.
            metadata: See there.
            on_lost: As there, and may be a coroutine function.
            raise_on_lost: See there.
            cancel_on_lost: As for `lock`.
            label: As for `lock`.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if unknown:
            raise unknown_parameter(Client.rwlock, unknown)
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
            label=label,
            nests=True,
        )
        return RWLock(self._engine, settings, cancel_on_lost=cancel_on_lost)

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | Inherit | None = INHERIT,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: Seconds | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        cancel_on_lost: bool = False,
        label: str | None = None,
        **unknown: Unpack[NoOthers],
    ) -> Semaphore:
        """
        Describe a semaphore. Nothing is sent yet. See `lockkit.Client.semaphore`.

        Args:
            name: See there.
            limit: See there.
            ttl: See there.
            timeout: See there.
            renew: See there.
            reentrant: The task that holds a permit gets it again, counted.
            max_hold: See there.
            metadata: See there.
            on_lost: As there, and may be a coroutine function.
            raise_on_lost: See there.
            cancel_on_lost: As for `lock`.
            label: As for `lock`.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend has no semaphores.
            LockError: The client is closed.
        """
        if unknown:
            raise unknown_parameter(Client.semaphore, unknown)
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
            label=label,
        )
        permits = self._engine.permit_settings(settings, limit)
        return Semaphore(self._engine, permits, cancel_on_lost=cancel_on_lost)

    def locks(
        self,
        names: Iterable[str],
        *,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | Inherit | None = INHERIT,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: Seconds | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        cancel_on_lost: bool = False,
        label: str | None = None,
        **unknown: Unpack[NoOthers],
    ) -> LockSet:
        """
        Describe several locks that are held together or not at all. Nothing is sent yet. See `lockkit.Client.locks`.

        Args:
            names: See there.
            ttl: See there.
            timeout: See there.
            renew: See there.
            reentrant: See `lock`.
            max_hold: See there.
            metadata: See there.
            on_lost: As there, and may be a coroutine function.
            raise_on_lost: See there.
            cancel_on_lost: See `lock`; the loss of any of them cancels the body.
            label: See `lock`; of each.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if unknown:
            raise unknown_parameter(Client.locks, unknown)
        within = self._engine.default_timeout if isinstance(timeout, Inherit) else timeout
        members = [
            SetMember(
                self._engine,
                self._engine.settings(
                    name,
                    ttl=ttl,
                    timeout=timeout,
                    renew=renew,
                    reentrant=reentrant,
                    max_hold=max_hold,
                    metadata=metadata,
                    on_lost=None,
                    raise_on_lost=raise_on_lost,
                    label=label,
                ),
            )
            for name in names_of(names)
        ]
        return LockSet(LockSetCore(members, within, on_lost), cancel_on_lost=cancel_on_lost)

    def election(
        self,
        name: str,
        *,
        ttl: Seconds | timedelta | None = None,
        grace: Seconds | timedelta | None = None,
        value: object = None,
        label: str | None = None,
    ) -> Election:
        """See `lockkit.Client.election`."""
        return Election(self._engine, name, ttl=ttl, grace=grace, value=value, label=label)

    def once(
        self,
        key: str,
        *,
        keep: float | timedelta,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | None = None,
        match: str | None = None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException] = (),
        label: str | None = None,
    ) -> Once:
        """
        Describe work that is done once per key. Nothing is sent yet. See `lockkit.Client.once`.

        Args:
            key: See there.
            keep: See there.
            ttl: See there.
            timeout: See there.
            match: See there.
            store_errors: See there.
            label: See there.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend keeps no notes on locks.
            LockError: The client is closed.
        """
        described = core.Once.described(
            self._engine,
            key,
            keep=keep,
            ttl=ttl,
            timeout=timeout,
            match=match,
            store_errors=store_errors,
            label=label,
        )
        return Once(described)

    async def holders(self, name: str) -> list[Holder]:
        """See `lockkit.Client.holders`."""
        return await self._engine.holders(name)

    def names(self, prefix: str = "", kind: Kind = "lock") -> AsyncIterator[str]:
        """See `lockkit.Client.names`; read it with ``async for``."""
        return _read(self._engine.names(prefix, kind))

    async def break_lock(self, name: str, *, force: bool = False) -> bool:
        """See `lockkit.Client.break_lock`."""
        return await self._engine.break_lock(name, force=force)

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


async def _read(listing: Listing) -> AsyncIterator[str]:
    while (page := await listing.page()) is not None:
        for name in page:
            yield name
