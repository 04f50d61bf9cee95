"""Clocks that run wrong: each machine of a simulation has its own, and none shows the true time."""

from __future__ import annotations

from lockkit.units import Instant


class Clock:
    """A clock with an offset and a rate of its own: ``offset + rate * true time``."""

    __slots__ = ("_offset", "rate")

    def __init__(self, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self.rate = rate  # seconds that it shows per true second
        self._offset = offset

    def read(self, true_time: Instant) -> float:
        """What it shows at a true time, seconds."""
        return self._offset + self.rate * true_time

    def true_time(self, reading: Instant) -> float:
        """When it shows `reading`; the inverse of `read`."""
        return (reading - self._offset) / self.rate

    def jump(self, seconds: float) -> None:
        """Set it forward, or back if negative. For wall clocks; a monotonic clock never jumps."""
        self._offset += seconds
