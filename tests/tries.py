"""Single tries at a lock on a real server, and renewals there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lockkit.errors import BackendUnavailable
from lockkit.testing.servers import wait_until
from lockkit.testing.timing import PATIENCE

if TYPE_CHECKING:
    import lockkit
    import lockkit.aio

__all__ = ["busy", "busy_async", "until_renewed"]


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


def until_renewed(*leases: lockkit.Lease) -> None:
    """Return once the deadline of each lease has moved since this call; fail if one is lost."""
    before = [lease._record.valid_until for lease in leases]

    def renewed() -> str | None:
        for lease in leases:
            lease.check()
        left = sum(lease._record.valid_until <= deadline for lease, deadline in zip(leases, before, strict=True))
        return f"{left} leases were not renewed" if left else None

    wait_until(renewed)
