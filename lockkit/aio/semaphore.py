"""Semaphores in the async API."""

from __future__ import annotations

from lockkit.aio.lock import Lock
from lockkit.backend import Holder, split_space
from lockkit.primitives.semaphore_cap import read_cap, set_cap

__all__ = ["Semaphore"]


class Semaphore(Lock):
    """See `lockkit.Semaphore`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name of the semaphore."""
        return split_space(self._settings.name)[1]

    @property
    def limit(self) -> int:
        """See `lockkit.Semaphore.limit`."""
        return self._settings.limit

    async def available(self) -> int:
        """See `lockkit.Semaphore.available`."""
        return await self._engine.free_permits(self._settings)

    async def holders(self) -> list[Holder]:
        """See `lockkit.Semaphore.holders`."""
        return await self._engine.permits(self._settings)

    async def break_permit(self, slot: int) -> bool:
        """See `lockkit.Semaphore.break_permit`."""
        return await self._engine.break_permit(self._settings, slot)

    async def cap(self) -> int | None:
        """See `lockkit.Semaphore.cap`."""
        return await read_cap(self._engine, self._settings.name)

    async def set_cap(self, cap: int | None) -> None:
        """See `lockkit.Semaphore.set_cap`."""
        await set_cap(self._engine, self._settings.name, cap)

    async def locked(self) -> bool:
        """See `lockkit.Semaphore.locked`."""
        return await self.available() == 0

    def __repr__(self) -> str:
        """Show name, limit and backend."""
        return f"<lockkit.aio.Semaphore {self.name!r} limit={self.limit} at {self._engine.url}>"
