"""The client of a lock service in the async API."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lockkit.aio.lease import Lease
from lockkit.aio.lock import Lock
from lockkit.aio.once import Once
from lockkit.configuration import profiles, registry
from lockkit.engine.engine import Engine
from lockkit.primitives import once as core
from lockkit.runtime import AsyncioRuntime

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from lockkit.backend import Capabilities, Holder
    from lockkit.engine.settings import LostCallback

__all__ = ["Client", "connect", "from_client"]


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

    def once(
        self,
        key: str,
        *,
        keep: float | timedelta,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
        match: str | None = None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException] = (),
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

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend keeps no notes on locks.
            LockError: The client is closed.
        """
        described = core.Once.described(
            self._engine, key, keep=keep, ttl=ttl, timeout=timeout, match=match, store_errors=store_errors
        )
        return Once(described)

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
