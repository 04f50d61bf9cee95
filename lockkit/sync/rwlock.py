"""Read/write locks in the sync API."""

from __future__ import annotations

from dataclasses import replace

from lockkit.engine.engine import Engine
from lockkit.engine.settings import LockSettings
from lockkit.lease import MakesLeases, OtherApi
from lockkit.sync.lease import Lease
from lockkit.sync.lock import Lock

__all__ = ["RWLock"]


class RWLock(MakesLeases):
    """
    A named lock with two sides: many readers at the same time, or one writer. Holds nothing itself.

    First come, first served where the backend is fair (``capabilities.fair_shared``): a waiting writer stops new
    readers. The write side is the same lock as ``client.lock(name)``.

    The thread that reads or writes gets its lease again for reading, counted: otherwise it would wait for a writer that
    waits for it. Writing inside reading raises `LockError` at once.
    """

    __slots__ = ("_engine", "_settings")
    _lease_from = "lease = rwlock.write().acquire()"
    __aenter__ = OtherApi("rwlock.read()")

    def __init__(self, engine: Engine[Lease], settings: LockSettings) -> None:
        """Made by `Client.rwlock`."""
        self._engine = engine
        self._settings = settings

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    def read(self) -> Lock:
        """
        Return the read side.

        Raises:
            Unsupported: The backend has no read locks.
        """
        self._engine.check_readers(self.name)
        return Lock(self._engine, replace(self._settings, mode="shared"))

    def write(self) -> Lock:
        """Return the write side."""
        return Lock(self._engine, self._settings)

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<lockkit.RWLock {self.name!r} at {self._engine.url}>"
