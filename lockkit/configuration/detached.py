"""The engine's side of a backend that is opened without an engine: to be examined, migrated or erased."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.runtime import BlockingRuntime

if TYPE_CHECKING:
    from lockkit.backend import LossReason

__all__ = ["DetachedHost"]


class DetachedHost:
    """A `lockkit.backend.Host` for blocking calls to a backend that holds no lock."""

    def __init__(self) -> None:
        """Start without threads."""
        self.runtime = BlockingRuntime()

    def lost(self, owner: str, reason: LossReason) -> None:
        """Nothing is held."""

    def confirm_soon(self) -> None:
        """Nothing is held."""
