"""The client of a lock service in the async API."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Generator, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from lockkit import validation
from lockkit.aio.election import Election, Term
from lockkit.aio.lease import Lease
from lockkit.aio.lock import Lock, SkippingLock
from lockkit.aio.lock_set import LockSet
from lockkit.aio.once import Once
from lockkit.aio.sharing import RWLock, Semaphore
from lockkit.backend import Capabilities, Holder
from lockkit.configuration import profiles, registry
from lockkit.engine.engine import Engine, Origin
from lockkit.engine.lookup import Kind, Listing
from lockkit.engine.settings import INHERIT, LockOptions, skipping_timeout
from lockkit.lease import OtherApi
from lockkit.primitives import note
from lockkit.primitives import once as core
from lockkit.primitives.election import Candidate
from lockkit.primitives.lock_set import LockSetCore
from lockkit.primitives.note import Note
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
    client = Client(Engine(open_backend, AsyncioRuntime(), Lease))
    client._engine.origin = Origin(connect, url, profile, options, settings.shows_secret(url, options))  # noqa: SLF001 - as `Client`
    return client


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
        on_busy: Literal["raise", "skip"] = "raise",
        cancel_on_lost: bool = False,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """
        Describe a lock. Nothing is sent yet.

        Args:
            name: See `lockkit.Client.lock`.
            on_busy: See there.
            cancel_on_lost: ``async with`` cancels its body when the lease is lost, and raises `LockLost` in place of
                the cancellation, as `asyncio.timeout` does with `TimeoutError`.
            **options: See `lockkit.LockOptions`.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if on_busy != "raise":
            options["timeout"] = skipping_timeout(on_busy, options.get("timeout", INHERIT), name, self._engine.url)
        settings = self._engine.settings(name, Client.lock, **options)
        settings.cancel_on_lost = validation.flag(cancel_on_lost, "cancel_on_lost")
        settings.skips = on_busy != "raise"
        return (SkippingLock if settings.skips else Lock)(self._engine, settings)

    def rwlock(self, name: str, *, cancel_on_lost: bool = False, **options: Unpack[LockOptions]) -> RWLock:
        """See `lockkit.Client.rwlock`; ``cancel_on_lost`` as for `lock`."""
        settings = self._engine.settings(name, Client.rwlock, True, **options)  # noqa: FBT003 - nests
        settings.cancel_on_lost = validation.flag(cancel_on_lost, "cancel_on_lost")
        return RWLock(self._engine, settings)

    def semaphore(
        self, name: str, limit: int, *, cancel_on_lost: bool = False, **options: Unpack[LockOptions]
    ) -> Semaphore:
        """See `lockkit.Client.semaphore`; ``cancel_on_lost`` as for `lock`."""
        settings = self._engine.settings(name, Client.semaphore, **options)
        settings.cancel_on_lost = validation.flag(cancel_on_lost, "cancel_on_lost")
        return Semaphore(self._engine, self._engine.permit_settings(settings, limit))

    def locks(self, names: Iterable[str], *, cancel_on_lost: bool = False, **options: Unpack[LockOptions]) -> LockSet:
        """See `lockkit.Client.locks`; with ``cancel_on_lost``, the loss of any of them cancels the body."""
        return LockSet(LockSetCore.of_names(self._engine, names, Client.locks, options, cancel_on_lost=cancel_on_lost))

    def election(
        self,
        name: str,
        *,
        ttl: Seconds | timedelta | None = None,
        grace: Seconds | timedelta | None = None,
        stall: Seconds | timedelta | None = None,
        value: object = None,
        label: str | None = None,
    ) -> Election:
        """See `lockkit.Client.election`."""
        return Election(
            Candidate(self._engine, name, Term, ttl=ttl, grace=grace, stall=stall, value=value, label=label)
        )

    def once(
        self,
        key: str,
        *,
        keep: float | timedelta,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | None = None,
        stall: Seconds | timedelta | None = None,
        match: str | None = None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException] = (),
        label: str | None = None,
    ) -> Once:
        """See `lockkit.Client.once`."""
        described = core.Once.described(
            self._engine,
            key,
            keep=keep,
            ttl=ttl,
            timeout=timeout,
            stall=stall,
            match=match,
            store_errors=store_errors,
            label=label,
        )
        return Once(described)

    async def take(self, ticket: str, **options: Unpack[LockOptions]) -> Lease:
        """See `lockkit.Client.take`."""
        return await self._engine.take(ticket, Client.take, options)

    async def holders(self, name: str) -> list[Holder]:
        """See `lockkit.Client.holders`."""
        return await self._engine.holders(name)

    def names(self, prefix: str = "", kind: Kind = "lock") -> AsyncIterator[str]:
        """See `lockkit.Client.names`; read it with ``async for``."""
        return _read(self._engine.names(prefix, kind))

    async def read_note(self, name: str) -> Note | None:
        """See `lockkit.Client.read_note`."""
        return await note.read(self._engine, name)

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
