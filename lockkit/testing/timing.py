"""How long a case waits, and lease times that suit a backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil
from typing import Self

from lockkit.backend import Capabilities
from lockkit.units import Seconds

PATIENCE = float(os.environ.get("LOCKKIT_TEST_PATIENCE", "20"))
"""Seconds until what must happen counts as not happening. Far below `Timing.long`, so that "woken" differs from "the
ttl ran out"; far above what a busy machine needs. A test of the suite itself, where things do not happen, sets it low.
Who only wants a free lock asks with it too, not with 0: a server that stalls for seconds has broken no promise.
"""

CONTENTION_SECONDS = float(os.environ.get("LOCKKIT_TEST_SECONDS", "0"))
"""How long the processes of an exclusion case contend at the least. ``nox -s exclusion`` has 8 do it for 30 seconds."""

LONG = 120.0
SHORT = 0.3
KEPT = 1.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Lease times for a backend, seconds, scaled to what it can do."""

    short: float  # of a lease that is to run out: the shortest practical one
    kept: float  # of a lease that is to be renewed: two thirds of it are room for a busy machine
    long: float = LONG  # of a lease that ends in no case by itself

    @classmethod
    def of(cls, capabilities: Capabilities) -> Self:
        """Scale to the shortest ttl and its granularity."""
        return cls(_round_up(SHORT, capabilities), _round_up(KEPT, capabilities))

    def beyond(self, ttl: Seconds) -> float:
        """Give a time by which a lease that nobody renewed has ended at the client and at the backend."""
        return ttl + PATIENCE


def _round_up(ttl: Seconds, capabilities: Capabilities) -> float:
    ttl = max(ttl, capabilities.min_ttl)
    step = capabilities.ttl_granularity
    return ceil(ttl / step) * step if step else ttl
