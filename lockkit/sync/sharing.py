"""What several holders share, in the sync API: read/write locks and semaphores."""

from __future__ import annotations

from lockkit.backend import Holder
from lockkit.lease import BaseRWLock, OtherApi, PermitFacts
from lockkit.runtime import drive
from lockkit.sync.lock import Lock

__all__ = ["RWLock", "Semaphore"]


class RWLock(BaseRWLock[Lock]):
    """
    A named lock with two sides: many readers at the same time, or one writer. Holds nothing itself.

    First come, first served where the backend is fair (``capabilities.fair_shared``): a waiting writer stops new
    readers. The write side is the same lock as ``client.lock(name)``.

    The thread that reads or writes gets its lease again for reading, counted: otherwise it would wait for a writer that
    waits for it. Writing inside reading raises `LockError` at once.
    """

    __slots__ = ()
    _lease_from = "lease = rwlock.write().acquire()"
    __aenter__ = OtherApi("rwlock.read()")
    _api = "lockkit"
    _side = Lock


class Semaphore(PermitFacts, Lock):
    """
    Permits of a name: at most `limit` are held at the same time. A permit is a lease with a ``slot``.

    Used as a `Lock`: acquired, as a context manager, and as a decorator. A lock of the same name is independent of it.

    Clients with different limits share the permits: each is granted one while fewer than its own limit are held (where
    the backend has a lock for each slot: while one of the first `limit` slots is free).
    """

    __slots__ = ()

    def available(self) -> int:
        """
        Ask the backend how many permits are free; another client may take them at once.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.free_permits(self._settings))

    def holders(self) -> list[Holder]:
        """
        Ask the backend who holds permits now, in the order of their slots; `Holder.slot` is the number of the permit.

        Where each slot is a lock (``capabilities.permits`` is ``"slots"``) one request for each of the first `limit`
        slots, and for those of clients with a higher limit that hold one of them.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.permits(self._settings))

    def break_permit(self, slot: int) -> bool:
        """
        Free one permit by force. Its holder notices at its next renewal.

        Args:
            slot: Number of the permit, as in `Holder.slot`.

        Returns:
            False if nobody held it.

        Raises:
            ConfigurationError: The slot is no number of a permit.
            Unsupported: A third-party backend cannot free one permit.
            BackendUnavailable: No answer.
        """
        return drive(self._engine.break_permit(self._settings, slot))

    def cap(self) -> int | None:
        """
        Ask for the cap: how many permits all clients together may hold, whatever their limits. None without a cap.

        Raises:
            Unsupported: The backend cannot cap semaphores.
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.cap(self._settings))

    def set_cap(self, cap: int | None) -> None:
        """
        Cap the semaphore for all clients, as ``lockkit limit`` does: for this one at once, for others within 5 seconds.

        Permits that are held stay held: after a lower cap, new ones are granted when enough have been released.

        Args:
            cap: 0 to 1,000 permits; 0 pauses new grants. None removes the cap.

        Raises:
            Unsupported: The backend cannot cap semaphores.
            ConfigurationError: The cap is wrong.
            LockTimeout: Others changed caps for the client's whole default timeout.
            LockLost: The lease under which caps are changed ended first.
            BackendUnavailable: It cannot be asked.
        """
        drive(self._engine.set_cap(self._settings, cap))

    def locked(self) -> bool:
        """
        Ask the backend whether all permits are held.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return self.available() == 0
