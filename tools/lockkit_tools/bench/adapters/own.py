"""lockkit itself, through its public API only."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import lockkit
import lockkit.aio
from lockkit.aio.once import Once as AsyncOnce
from lockkit.sync.once import Once
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter, several_names
from lockkit_tools.bench.subject import Kind

_KEEP_SECONDS = 600
"""How long the record of a key is kept: longer than any turn."""


class _Own:
    """What both APIs have in common: their names."""

    ttl: float
    _client: Any
    _office: Callable[[Any], Any]
    _done: Callable[[Any], Any]

    def lock(self, name: str, *, renew: bool = False) -> Any:  # noqa: ANN401 - a lock of either API
        """Renewed always: that is what users get."""
        del renew
        return self._client.lock(name, ttl=self.ttl)

    def primitive(self, kind: Kind, name: str, count: int = 1) -> Any:  # noqa: ANN401 - as above
        client, ttl = self._client, self.ttl
        kinds: dict[Kind, Callable[[], Any]] = {
            "lock": lambda: client.lock(name, ttl=ttl),
            "read": lambda: client.rwlock(name, ttl=ttl).read(),
            "write": lambda: client.rwlock(name, ttl=ttl).write(),
            "permit": lambda: client.semaphore(name, limit=count, ttl=ttl),
            "locks": lambda: client.locks(several_names(name, count), ttl=ttl),
            "election": lambda: self._office(client.election(name, ttl=ttl)),
            "once": lambda: self._done(client.once(name, keep=_KEEP_SECONDS, ttl=ttl)),
        }
        return kinds[kind]()

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.token)

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - see Adapter
        """By its own deadline."""
        del lock
        return bool(entered.held)


class _Office:
    """Each time a campaign, and a resignation."""

    def __init__(self, election: lockkit.sync.Election) -> None:
        self._election = election

    def __enter__(self) -> Any:  # noqa: ANN401 - a term
        self._campaign = self._election.campaign()
        return self._campaign.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._campaign.__exit__(kind, error, trace)


class _Done:
    """The first time the work is done, then its result is read."""

    def __init__(self, once: Once) -> None:
        self._once = once

    def __enter__(self) -> Any:  # noqa: ANN401 - an attempt
        attempt = self._once.__enter__()
        if attempt.first:
            attempt.done(1)
        return attempt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._once.__exit__(kind, error, trace)


class Blocking(_Own, BlockingAdapter):
    """``lockkit.connect``."""

    _office = _Office
    _done = _Done

    async def open(self) -> None:
        self._client = lockkit.connect(self.url)

    async def close(self) -> None:
        self._client.close()


class _AsyncOffice:
    """See `_Office`."""

    def __init__(self, election: lockkit.aio.Election) -> None:
        self._election = election

    async def __aenter__(self) -> Any:  # noqa: ANN401 - a term
        self._campaign = self._election.campaign()
        return await self._campaign.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._campaign.__aexit__(kind, error, trace)


class _AsyncDone:
    """See `_Done`."""

    def __init__(self, once: AsyncOnce) -> None:
        self._once = once

    async def __aenter__(self) -> Any:  # noqa: ANN401 - an attempt
        attempt = await self._once.__aenter__()
        if attempt.first:
            await attempt.done(1)
        return attempt

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._once.__aexit__(kind, error, trace)


class Asyncio(_Own, AsyncAdapter):
    """``lockkit.aio.connect``."""

    _office = _AsyncOffice
    _done = _AsyncDone

    async def open(self) -> None:
        self._client = await lockkit.aio.connect(self.url)

    async def close(self) -> None:
        await self._client.close()
