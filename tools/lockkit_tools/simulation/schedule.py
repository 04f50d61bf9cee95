"""Draws a schedule from a seed: who does what, and what is done to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.checker import Limits
from lockkit_tools.simulation.network import CALM, Conditions
from lockkit_tools.simulation.server import Wakeup

FaultKind = Literal[
    "pause", "crash", "exit", "close", "cut", "server pause", "server restart", "clock jump", "break", "cut close",
    "no threads",
]  # fmt: skip

DRIFT = 0.004
"""Clocks run wrong by at most this share. Two such clocks stay within the engine's allowance of 1 % of the ttl."""


WAKEUPS: tuple[Wakeup, ...] = ("fair", "fair", "all", "none")

EXTENDED_MAX = 2.5
"""Longest ttl that `Lease.extend` is asked for, as a multiple of the schedule's."""


class Fault(NamedTuple):
    """Something that is done to a client or the server."""

    at: float
    kind: FaultKind
    client: int  # to which one, by number, where it is done to one
    seconds: float  # how long it lasts, or by how much the clock jumps
    variant: float  # 0 to 1: which of its forms, where it has several


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One random schedule."""

    seed: int
    ttl: float  # of most leases, seconds
    names: tuple[str, ...]
    workers: tuple[int, ...]  # for each client, how many tasks use it
    rounds: int  # how many acquisitions each of them tries
    wakeup: Wakeup  # what the server does for waiters
    conditions: Conditions  # of the network, until `healed_at`
    call_timeout: float  # seconds that a client waits for an answer
    lateness: float  # timers of clients are late by up to this, seconds
    client_rates: tuple[float, ...]
    server_rate: float
    faults: tuple[Fault, ...]
    healed_at: float  # when network and server become well again, true time
    session_age: float = 0.0  # a grant's ttl counts from so long before it (a session's last heartbeat), seconds
    ttl_max: float = inf  # the server keeps no lease for longer, seconds
    singly: bool = False  # renewals are sent one by one: some of a batch may have an answer, others none
    tells: bool = False  # the server tells the holder of a loss, and now and then asks it to confirm what it holds

    @property
    def calm(self) -> bool:
        """Nothing is done to anybody: what must be prompt can be required to be."""
        return not self.faults and self.conditions is CALM

    def limits(self) -> Limits:
        """How late is too late in this schedule."""
        latency = self.conditions.latency[1]
        # A wake-up and the request that follows it, for a few waiters that give up in the same instant.
        prompt = 12 * latency + 10 * self.lateness + 0.03 + 0.02 * self.ttl + (0.3 if self.wakeup == "none" else 0.0)
        # A wake-up was lost, so the waiter looks when the former holder's ttl is over; then perhaps a stopped head has
        # its turn (at most 1 s), an answer is lost, and a back-off (at most 1 s) goes before the next try.
        patient = prompt + self.ttl * EXTENDED_MAX * 1.1 + 2.0 + 3 * self.call_timeout
        return Limits(
            # The last try, its undoing, and asking who holds it for the warning of a long wait.
            acquire_late=3 * self.call_timeout + 20 * self.lateness + 0.01,
            clock_rates=DRIFT * 1.01,
            told_late=5 * self.lateness + 0.002,
            # One answer, twice the engine's allowance of 1 % and 2 ms, and the difference of the clocks.
            kept_longer=self.call_timeout + self.ttl * EXTENDED_MAX * 0.03 + 0.01,
            free_after_release=prompt if self.calm else patient,
            # Waiters look when the ttl that they were told of is over. The holder may have shortened it since.
            free_after_expiry=patient,
        )


def draw(seed: int) -> Schedule:
    """Draw the schedule of a seed."""
    chance = random.Random(f"{seed} schedule")
    wakeup = chance.choice(WAKEUPS)
    # Long ones too: what is forgotten at the server is then still there when everything is over. Not with polling,
    # which would fill most of the time with asking.
    ttl = chance.uniform(5.0, 30.0) if wakeup != "none" and chance.random() < 0.4 else chance.uniform(0.3, 2.0)
    workers = tuple(chance.choice((1, 1, 2)) for _ in range(chance.choice((2, 2, 3, 3, 4))))
    healed_at = chance.uniform(1.5, 6.0) * ttl
    backend = random.Random(f"{seed} backend")
    return Schedule(
        seed=seed,
        ttl=ttl,
        names=("a",) if chance.random() < 0.7 else ("a", "b"),
        workers=workers,
        rounds=chance.choice((2, 3)),
        wakeup=wakeup,
        conditions=_conditions(chance, ttl),
        # Longer than the ttl, too: only then can a grant arrive when it is worth nothing any more.
        call_timeout=chance.choice((0.03, 0.15, 0.5, 1.5)) * ttl,
        lateness=chance.choice((0.0, 0.0005, 0.01)),
        client_rates=tuple(1 + chance.uniform(-DRIFT, DRIFT) for _ in workers),
        server_rate=1 + chance.uniform(-DRIFT, DRIFT),
        faults=_faults(chance, ttl, len(workers), healed_at),
        healed_at=healed_at,
        session_age=backend.choice((0.0, 0.0, 0.1, 0.2)) * 0.3 * ttl,
        ttl_max=ttl * 0.7 if backend.random() < 0.2 else inf,
        singly=backend.random() < 0.3,
        tells=backend.random() < 0.3,
    )


def _conditions(chance: random.Random, ttl: Seconds) -> Conditions:
    if chance.random() < 0.4:
        return CALM
    fastest = chance.uniform(0.0001, 0.005)
    return Conditions(
        latency=(fastest, fastest * chance.uniform(1.5, 6.0)),
        requests_lost=chance.choice((0.0, 0.05, 0.15)),
        answers_lost=chance.choice((0.0, 0.05, 0.15)),
        slow=chance.choice((0.0, 0.05, 0.25)),
        slow_max=chance.uniform(0.2, 3.0) * ttl,
    )


_KINDS: tuple[tuple[FaultKind, float], ...] = (
    ("pause", 4),
    ("crash", 1),
    ("exit", 0.5),
    ("close", 0.5),
    ("cut", 2),
    ("server pause", 1.5),
    ("server restart", 1.5),
    ("clock jump", 1),
    ("break", 0.5),
    ("cut close", 0.5),
    ("no threads", 0.7),
)


def _faults(chance: random.Random, ttl: Seconds, clients: int, healed_at: Instant) -> tuple[Fault, ...]:
    faults = []
    kinds, weights = zip(*_KINDS, strict=True)
    # Tokens survive lost data unless the clock was set back by more than the outage, which is a documented limit. So a
    # schedule has the one or the other.
    loses_data = chance.random() < 0.5
    for kind in chance.choices(kinds, weights, k=chance.choice((0, 1, 2, 4))):
        seconds = chance.uniform(0.1, 2.0) * ttl
        variant = chance.random()
        if kind == "clock jump":
            seconds = chance.uniform(0.0 if loses_data else -100.0, 100.0)
        elif kind == "server restart" and not loses_data:
            variant = 1.0
        faults.append(Fault(chance.uniform(0.0, healed_at), kind, chance.randrange(clients), seconds, variant))
    return tuple(sorted(faults))
