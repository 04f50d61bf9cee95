"""What a lock is asked for, its defaults, and the margin kept for clocks that run at different rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypedDict

from lockkit.backend import Mode
from lockkit.errors import ConfigurationError
from lockkit.units import Seconds
from lockkit.validation import nearest, shown

DEFAULT_TTL = 30.0
"""Seconds. Longer keeps a crashed holder's lock longer; shorter loses leases to shorter pauses and outages."""

DEFAULT_UNAVAILABLE_AFTER = 30.0
"""Seconds without one answer after which a wait without timeout gives up."""


LIMIT_MAX = 1000
"""Largest limit of a semaphore. With a larger one, a look at all holders takes too long."""


class Inherit:
    """Marks "not given" in signatures where None has a meaning: the lock's timeout, or for a lock the client's."""

    def __repr__(self) -> str:
        """Show what it stands for."""
        return "<inherited>"


INHERIT: Final = Inherit()

LostCallback = Callable[[Any, str], object]
"""Called as ``callback(lease, reason)``."""


class LockOptions(TypedDict, total=False):
    """The options of `Client.lock` in both APIs, for its overloads; what they mean stands there."""

    ttl: Seconds | timedelta | None
    timeout: Seconds | timedelta | Inherit | None
    renew: bool
    reentrant: bool
    max_hold: Seconds | timedelta | None
    metadata: str | Mapping[str, object] | None
    on_lost: LostCallback | None
    raise_on_lost: bool
    label: str | None


@dataclass(slots=True)
class LockSettings:
    """
    The validated arguments of `Client.lock`. Not changed afterwards (``frozen`` would cost a µs per lock).

    Except for `metadata` and `about` after a fork: the process is another one.
    Of a read/write lock (`nests`) the thread or task that holds it gets its lease again for reading.
    """

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    reentrant: bool
    max_hold: float | None
    metadata: str
    on_lost: LostCallback | None
    raise_on_lost: bool
    about: Mapping[str, object]
    """What `metadata` says of this process."""
    mode: Mode = "exclusive"
    nests: bool = False
    limit: int = 1
    """Of a permit: how many may be held at the same time."""
    grace: Seconds = 0.0
    """How long before the deadline the holder stops, seconds: renewals are retried so that some come before that."""
    given_up: Callable[[], bool] | None = None
    """Asked while the acquisition waits; True ends it with a `LockError`."""
    make_lease: Callable[[Any, Any], Any] | None = None
    """Makes the lease from the engine and the record, in place of the client's lease class."""
    label: str | None = None
    """Template of the name, for observers."""
    on_wait: Callable[[], None] | None = None
    """Called when the acquisition begins to wait, perhaps several times. Set if observers are told how it ends."""


def drift_margin(ttl: Seconds) -> float:
    """
    Time by which a deadline is set earlier, since client and server clocks may differ in rate.

    ``ttl * 0.01 + 0.002``, from the Redlock description: 1 % of the ttl, and 2 ms for the granularity of the server's
    expiry. Larger gives up leases earlier than needed; smaller trusts the two clocks more than Redlock does.
    """
    return ttl * 0.01 + 0.002


def skipping_timeout(
    on_busy: object, timeout: Seconds | timedelta | Inherit | None, *, name: object, backend: str
) -> Seconds | timedelta:
    """Check ``on_busy`` where it is not "raise", and decide how long a call waits before it is skipped."""
    name = name if isinstance(name, str) else None
    if on_busy != "skip":
        words = ["raise", "skip"]
        message = f"on_busy must be 'raise' or 'skip', not {shown(on_busy)}{nearest(on_busy, words)}"
        raise ConfigurationError(message, name=name, backend=backend)
    if timeout is None:
        message = (
            "on_busy='skip' needs a limit: with timeout=None a call waits until the lock is free and is never skipped. "
            "Leave timeout out to try once, or give seconds"
        )
        raise ConfigurationError(message, name=name, backend=backend)
    return 0 if isinstance(timeout, Inherit) else timeout
