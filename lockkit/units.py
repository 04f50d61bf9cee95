"""Units of time for signatures: which `float` is a span of time, and which is a point in time."""

from __future__ import annotations

__all__ = ["Instant", "Seconds"]

Seconds = float
"""A span of time, seconds."""

Instant = float
"""A point in time on the client's monotonic clock (`lockkit.runtime.Runtime.now`), seconds. ``inf`` is never."""
