"""One grant of a lock, in the async API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from lockkit.lease import BaseLease, OtherApi, find_current
from lockkit.primitives import note
from lockkit.units import Seconds

__all__ = ["Lease", "current_lease"]


class Lease(BaseLease):
    """One grant of a lock to one holder, for a limited time. May be handed to another task and released there."""

    __slots__ = ()
    __enter__ = OtherApi()
    _api = "lockkit.aio"

    async def confirm(self) -> bool:
        """See `lockkit.Lease.confirm`."""
        return await self._engine.confirm(self._record)

    async def extend(self, ttl: Seconds | timedelta | None = None) -> None:
        """See `lockkit.Lease.extend`."""
        await self._engine.extend(self._record, ttl)

    async def update(self, metadata: str | Mapping[str, object] | None) -> None:
        """See `lockkit.Lease.update`."""
        await self._engine.update(self._record, metadata)

    async def ticket(self, ttl: Seconds | timedelta | None = None) -> str:
        """See `lockkit.Lease.ticket`."""
        return await self._engine.ticket(self._record, ttl)

    async def write_note(self, value: Any, keep: float | timedelta = note.KEEP) -> None:  # noqa: ANN401 - any JSON
        """See `lockkit.Lease.write_note`."""
        await note.write(self._engine, self._record, value, keep)

    async def downgrade(self) -> None:
        """See `lockkit.Lease.downgrade`."""
        await self._engine.downgrade(self._record)

    async def release(self) -> None:
        """See `lockkit.Lease.release`."""
        await self._engine.releases.release(self._record)

    async def wait_lost(self, timeout: Seconds | timedelta | None = None) -> bool:
        """See `lockkit.Lease.wait_lost`."""
        return await self._engine.leases.wait_lost(self._record, timeout)

    async def __aenter__(self) -> Self:
        """Return itself: it is held already. Another task that enters it has been handed it over."""
        self._engine.leases.enter(self._record)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as leaving ``async with lock`` does."""
        await self._engine.releases.leave(self._record, error)


def current_lease() -> Lease:
    """Return the lease of the decorated function that runs in this task. See `lockkit.current_lease`."""
    return find_current(Lease)
