"""When this client first saw the present version of a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

NAMES_MAX = 10_000
"""Most names that are remembered. The one that was seen first goes first: its lock is observed anew."""


class Observations:
    """
    Versions of locks with the time at which each was seen first, on this client's monotonic clock.

    The time is that after the answer, so the write that made the version was earlier, and the client that wrote it
    counts its ttl from an earlier time still.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Remember nothing yet."""
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._seen: dict[str, tuple[int, float]] = {}

    def see(self, name: str, version: int) -> None:
        """Note a version, unless it is the one that was noted last."""
        with self._mutex:
            if self._seen.get(name, (0, 0.0))[0] == version:
                return
            self._seen.pop(name, None)
            while len(self._seen) >= NAMES_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[name] = version, self._runtime.now()

    def age(self, name: str, version: int) -> float:
        """Seconds since this version was seen first; 0 if it was not."""
        with self._mutex:
            seen, at = self._seen.get(name, (0, 0.0))
        return self._runtime.now() - at if seen == version else 0.0

    def forget(self, name: str) -> None:
        """Forget a lock that is free."""
        with self._mutex:
            self._seen.pop(name, None)
