"""How long and how much is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

CONTENDERS = (1, 2, 4, 8, 16)
ROUND_TRIPS_MS = (1, 5, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run costs. All times are seconds."""

    rounds: int = 5  # how often every subject takes its turn in every workload
    rounds_max_long: int = 2  # as `rounds`, at the most, for workloads that take long each time
    seconds: float = 1.0  # how long pairs are repeated, and contenders contend, each time
    processes: int = 8
    handoffs: int = 20
    waiters: int = 100
    settle: float = 1.0  # until they all have begun to wait
    idle_seconds: float = 5.0  # how long they are watched
    leases: int = 1000
    lease_ttl: float = 9.0
    imports: int = 10  # how often each import is repeated, each time
    ttl: float = 30.0
    contenders: tuple[int, ...] = CONTENDERS  # how many contend, one after the other, where that is varied
    round_trips_ms: tuple[int, ...] = ROUND_TRIPS_MS  # what a round trip to the server is made to take, milliseconds
    far_pairs: int = 10  # pairs timed at each of these
    far_handoffs: int = 6  # hand-offs timed at each of these
    crash_ttl: float = 3.0  # lease time of holders that are killed or frozen
    # Pairs that are not timed: connections, scripts, inotify handles and the interpreter's caches are made by them.
    warm_up: int = 50
    hold_min: float = 0.01  # how long the lock is held before it is handed over: the waiter has begun to wait by then
    limit: float | None = None  # no turn begins when the run has taken so long; None: it takes what it takes
    patience: float = 45.0  # after this long, beyond what it should take, a subject that does not answer has failed

    def with_ttls_from(self, ttl_min: float) -> Self:
        """Give the same with leases of a subject that grants none shorter."""
        return replace(self, crash_ttl=max(self.crash_ttl, ttl_min), lease_ttl=max(self.lease_ttl, ttl_min))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what was written as JSON, which knows no tuples."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


QUICK = Settings(
    rounds=2,
    rounds_max_long=1,
    seconds=0.2,
    processes=3,
    handoffs=6,
    idle_seconds=2.0,
    leases=200,
    lease_ttl=3.0,
    imports=5,
    crash_ttl=2.0,
    limit=90.0,
    patience=15.0,
)
"""For a first look: noisy."""
