"""The engine's side of a backend that is opened without an engine: to be examined, migrated or erased."""

from __future__ import annotations

from lockkit.backend import LossReason
from lockkit.runtime import BlockingRuntime


class DetachedHost:
    """A `lockkit.backend.Host` for blocking calls to a backend that holds no lock."""

    def __init__(self) -> None:
        """Start without threads."""
        self.runtime = BlockingRuntime()

    def lost(self, owner: str, reason: LossReason) -> None:
        """Nothing is held."""

    def confirm_soon(self) -> None:
        """Nothing is held."""
