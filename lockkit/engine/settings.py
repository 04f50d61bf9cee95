"""What a lock is asked for, its defaults, and the margin kept for clocks that run at different rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockkit.units import Seconds

__all__ = ["DEFAULT_TTL", "DEFAULT_UNAVAILABLE_AFTER", "LockSettings", "LostCallback", "drift_margin"]

DEFAULT_TTL = 30.0
"""Seconds. Longer keeps a crashed holder's lock longer; shorter loses leases to shorter pauses and outages."""

DEFAULT_UNAVAILABLE_AFTER = 30.0
"""Seconds without one answer after which a wait without timeout gives up."""

LostCallback = Callable[[Any, str], object]
"""Called as ``callback(lease, reason)``."""


@dataclass(slots=True)
class LockSettings:
    """The validated arguments of `Client.lock`. Not changed afterwards (``frozen`` would cost a µs per lock)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    reentrant: bool
    max_hold: float | None
    metadata: str
    on_lost: LostCallback | None
    raise_on_lost: bool
    grace: Seconds = 0.0
    """How long before the deadline the holder stops, seconds: renewals are retried so that some come before that."""
    given_up: Callable[[], bool] | None = None
    """Asked while the acquisition waits; True ends it with a `LockError`."""
    make_lease: Callable[[Any, Any], Any] | None = None
    """Makes the lease from the engine and the record, in place of the client's lease class."""


def drift_margin(ttl: float) -> float:
    """
    Time by which a deadline is set earlier, since client and server clocks may differ in rate.

    ``ttl * 0.01 + 0.002``, from the Redlock description: 1 % of the ttl, and 2 ms for the granularity of the server's
    expiry. Larger gives up leases earlier than needed; smaller trusts the two clocks more than Redlock does.

    Args:
        ttl: Lease time, seconds.

    Returns:
        Seconds.
    """
    return ttl * 0.01 + 0.002
