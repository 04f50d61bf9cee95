"""Semaphores in the sync API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockkit import validation
from lockkit.backend import apart, split_space
from lockkit.runtime import drive
from lockkit.sync.lock import Lock

if TYPE_CHECKING:
    from lockkit.engine.settings import LockSettings

__all__ = ["Semaphore"]


class Semaphore(Lock):
    """
    Permits of a name: at most `limit` are held at the same time. A permit is a lease with a ``slot``.

    Used as a `Lock`: acquired, as a context manager, and as a decorator. The lock of the same name is another one.

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

    def locked(self) -> bool:
        """
        Ask the backend whether all permits are held.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return self.available() == 0

    def _named_settings(self, name: str) -> LockSettings:
        settings = self._settings
        named = apart("sem", validation.lock_name(split_space(name)[1]))
        return replace(settings, name=named, label=settings.label or self.name)

    def __repr__(self) -> str:
        """Show name, limit and backend."""
        return f"<lockkit.Semaphore {self.name!r} limit={self.limit} at {self._engine.url}>"
