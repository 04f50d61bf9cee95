"""How long and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUICK", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    What a run costs. All times are seconds.

    Attributes:
        rounds: How often every subject takes its turn in every workload.
        rounds_max_long: As `rounds`, at the most, for workloads that take long each time.
        seconds: How long pairs are repeated, and contenders contend, each time.
        processes: Contenders.
        handoffs: Hand-offs each time.
        waiters: Idle waiters.
        settle: Until they all have begun to wait.
        idle_seconds: How long they are watched.
        leases: Held leases.
        lease_ttl: Their ttl.
        imports: How often each import is repeated, each time.
        ttl: Lease time everywhere else.
        patience: After this long, beyond what it should take, a subject that does not answer has failed.
    """

    rounds: int = 5
    rounds_max_long: int = 2
    seconds: float = 1.0
    processes: int = 8
    handoffs: int = 20
    waiters: int = 100
    settle: float = 1.0
    idle_seconds: float = 5.0
    leases: int = 1000
    lease_ttl: float = 9.0
    imports: int = 10
    ttl: float = 30.0
    patience: float = 45.0


QUICK = Settings(
    rounds=3,
    rounds_max_long=1,
    seconds=0.3,
    handoffs=10,
    idle_seconds=2.0,
    leases=200,
    lease_ttl=3.0,
    imports=5,
    patience=20.0,
)
"""For a first look: noisy."""
