"""Single tries at a lock on a real server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lockkit.errors import BackendUnavailable
from lockkit.testing.timing import PATIENCE

if TYPE_CHECKING:
    import lockkit
    import lockkit.aio

__all__ = ["busy", "busy_async"]


def busy(lock: lockkit.Lock) -> bool:
    """
    Tell whether a single try finds a lock held.

    Such a try leaves the server half a second. One that stalls for longer has broken no promise, and is asked again.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return lock.try_acquire() is None
        except BackendUnavailable:
            if time.monotonic() > deadline:
                raise


async def busy_async(lock: lockkit.aio.Lock) -> bool:
    """See `busy`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await lock.try_acquire() is None
        except BackendUnavailable:
            if time.monotonic() > deadline:
                raise
