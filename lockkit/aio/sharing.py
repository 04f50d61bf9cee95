"""What several holders share, in the async API: read/write locks and semaphores."""

from __future__ import annotations

from lockkit.aio.lock import Lock
from lockkit.backend import Holder
from lockkit.lease import BaseRWLock, OtherApi, PermitFacts

__all__ = ["RWLock", "Semaphore"]


class RWLock(BaseRWLock[Lock]):
    """See `lockkit.RWLock`. The task that reads or writes gets its lease again for reading."""

    __slots__ = ()
    _lease_from = "lease = await rwlock.write().acquire()"
    __enter__ = OtherApi("rwlock.read()")
    _api = "lockkit.aio"
    _side = Lock


class Semaphore(PermitFacts, Lock):
    """See `lockkit.Semaphore`."""

    __slots__ = ()

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
        return await self._engine.cap(self._settings)

    async def set_cap(self, cap: int | None) -> None:
        """See `lockkit.Semaphore.set_cap`."""
        await self._engine.set_cap(self._settings, cap)

    async def locked(self) -> bool:
        """See `lockkit.Semaphore.locked`."""
        return await self.available() == 0
