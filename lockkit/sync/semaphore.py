"""Semaphores in the sync API."""

from __future__ import annotations

from lockkit.backend import Holder, split_space
from lockkit.primitives.semaphore_cap import read_cap, set_cap
from lockkit.runtime import drive
from lockkit.sync.lock import Lock

__all__ = ["Semaphore"]


class Semaphore(Lock):
    """
    Permits of a name: at most `limit` are held at the same time. A permit is a lease with a ``slot``.

    Used as a `Lock`: acquired, as a context manager, and as a decorator. A lock of the same name is independent of it.

    Clients with different limits share the permits: each is granted one while fewer than its own limit are held (where
    the backend has a lock for each slot: while one of the first `limit` slots is free).
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name of the semaphore."""
        return split_space(self._settings.name)[1]

    @property
    def limit(self) -> int:
        """How many permits may be held at the same time."""
        return self._settings.limit

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
        return drive(read_cap(self._engine, self._settings.name))

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
        drive(set_cap(self._engine, self._settings.name, cap))

    def locked(self) -> bool:
        """
        Ask the backend whether all permits are held.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return self.available() == 0

    def __repr__(self) -> str:
        """Show name, limit and backend."""
        return f"<lockkit.Semaphore {self.name!r} limit={self.limit} at {self._engine.url}>"
