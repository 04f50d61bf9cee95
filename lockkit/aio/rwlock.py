"""Read/write locks in the async API."""

from __future__ import annotations

from dataclasses import replace

from lockkit import validation
from lockkit.aio.lease import Lease
from lockkit.aio.lock import Lock
from lockkit.engine.engine import Engine
from lockkit.engine.settings import LockSettings
from lockkit.lease import MakesLeases, OtherApi

__all__ = ["RWLock"]


class RWLock(MakesLeases):
    """See `lockkit.RWLock`. The task that reads or writes gets its lease again for reading."""

    __slots__ = ("_cancel_on_lost", "_engine", "_settings")
    _lease_from = "lease = await rwlock.write().acquire()"
    __enter__ = OtherApi("rwlock.read()")

    def __init__(self, engine: Engine[Lease], settings: LockSettings, *, cancel_on_lost: bool) -> None:
        """Made by `Client.rwlock`."""
        self._engine = engine
        self._settings = settings
        self._cancel_on_lost = validation.flag(cancel_on_lost, "cancel_on_lost")

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    def read(self) -> Lock:
        """See `lockkit.RWLock.read`."""
        self._engine.check_readers(self.name)
        return Lock(self._engine, replace(self._settings, mode="shared"), cancel_on_lost=self._cancel_on_lost)

    def write(self) -> Lock:
        """See `lockkit.RWLock.write`."""
        return Lock(self._engine, self._settings, cancel_on_lost=self._cancel_on_lost)

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<lockkit.aio.RWLock {self.name!r} at {self._engine.url}>"
