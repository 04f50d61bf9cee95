"""When the renewer looks at which lease: compared with looking at all of them each time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from lockkit.backend import Gone, Grant, LossReason, Renewal, Renewed, Unknown
from lockkit.engine import renewal
from lockkit.engine.cleanup import PendingCleanups
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import HELD, RELEASED, LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.engine.renewal import Renewer
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, LockLost
from lockkit.runtime import BlockingRuntime, drive

TTLS = st.sampled_from([0.5, 3.0, 30.0, 30.0, 30.0, 600.0])
OUTCOMES = st.sampled_from([Renewed(), Renewed(), Renewed(), Unknown(TimeoutError()), Gone()])


class Clock(BlockingRuntime):
    """A runtime whose time a test sets, and which starts nothing."""

    def __init__(self, seed: int = 0) -> None:
        """Start at 1000 s."""
        super().__init__()
        self.time = 1000.0
        self.random.seed(seed)
        self.now = self._now  # in place of that of the operating system

    def spawn(self, *_: object) -> None:
        """Start nothing."""

    def _now(self) -> float:
        return self.time


class Scripted:
    """As much of a backend as renewals need."""

    url = "scripted://"
    capabilities: Any = None

    def __init__(self) -> None:
        """Renew all."""
        self.outcome: Renewal = Renewed()

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Answer all with the same."""
        return [self.outcome for _ in grants]

    async def release(self, *_: object) -> bool:
        """Release nothing."""
        return True


class Watched:
    """A renewer whose watch is called by hand."""

    def __init__(self, seed: int = 0) -> None:
        """Hold nothing."""
        self.runtime = Clock(seed)
        self.backend: Any = Scripted()
        self.client = ClientState(self.runtime, self.backend, Scripted)  # type: ignore[arg-type]
        self.leases = Leases(self.client, PendingCleanups(self.client))
        self.renewer = Renewer(self.client, self.leases, _nothing)
        self.count = 0

    def acquire(
        self, ttl: float, *, renew: bool = True, max_hold: float | None = None, stall: float | None = None
    ) -> LeaseRecord:
        """Add a lease, as `Engine.admit` does."""
        self.count += 1
        owner = f"{self.count:032x}"
        settings = LockSettings("x", ttl, None, renew, False, max_hold, "{}", None, True, {}, stall=stall)  # noqa: FBT003 - as Engine.settings
        record = LeaseRecord(
            self.client, Grant("x", owner, self.count, ttl), settings, self.runtime.time, self.leases.lose
        )
        self.leases.add(record, settings)
        self.renewer.reschedule(record)
        return record

    def release(self, record: LeaseRecord) -> None:
        """End a lease."""
        record.state = RELEASED
        self.leases.drop(record)

    def wake(self) -> tuple[list[LeaseRecord], list[LeaseRecord]]:
        """Let the watch run once, as far as it does not wait; return what has expired and what is due."""
        renewer = self.renewer
        expired, due, look_again = renewer._survey(self.runtime.time)
        renewer._due += due
        renewer._wake_at = look_again
        renewer._tell_of(expired)
        return expired, due

    def wake_until_due(self) -> list[LeaseRecord]:
        """Let the watch run until something is due; nothing must have expired."""
        while True:
            self.runtime.time = self.renewer._wake_at
            expired, due = self.wake()
            assert not expired
            if due:
                return due

    def renew(self, outcome: Renewal) -> list[LeaseRecord]:
        """Let the renewer run once; return what was due."""
        renewer = self.renewer
        due, renewer._due = renewer._due, []
        self.backend.outcome = outcome
        if due:
            drive(renewer._renew_due(self.backend, due, self.runtime.time))
        return due


async def _nothing() -> None:
    pass


def due_at(record: LeaseRecord) -> float:
    """When something is due for a lease: what the agenda is to know."""
    plan = record.renewal
    if stall_ends_renewal(record):
        return min(plan.stall_at, record.valid_until if plan.in_flight else plan.next_at)
    return record.valid_until if plan.in_flight else min(plan.next_at, record.valid_until)


def stall_ends_renewal(record: LeaseRecord) -> bool:
    """Whether the end of its holder's progress matters to a lease: it is being renewed."""
    plan = record.renewal
    return plan.stall < inf and not plan.stalled and (plan.next_at < inf or plan.in_flight)


class AgendaAgainstAll(RuleBasedStateMachine):
    """What the watch finds and when it wakes up, against a look at every lease."""

    records = Bundle("records")

    @initialize(seed=st.integers(0, 9))
    def begin(self, seed: int) -> None:
        """Hold nothing."""
        self.watched = Watched(seed)

    @property
    def now(self) -> float:
        """The time."""
        return self.watched.runtime.time

    @rule(
        target=records,
        ttl=TTLS,
        renew=st.sampled_from([True, True, False]),
        max_hold=st.sampled_from([inf, 50.0]),
        stall=st.sampled_from([None, None, 0.2, 4.0, 45.0]),
    )
    def acquire(self, ttl: float, renew: bool, max_hold: float, stall: float | None) -> LeaseRecord:  # noqa: FBT001 - a parameter
        """Hold one more."""
        return self.watched.acquire(ttl, renew=renew, max_hold=max_hold, stall=stall if renew else None)

    @rule(record=records)
    def beat(self, record: LeaseRecord) -> None:
        """Make progress, as the holder of a lease that is held."""
        stalled = record.renewal.stalled
        self.watched.renewer.beat(record)
        if record.state is HELD and stalled:
            assert not record.renewal.stalled
            assert due_at(record) <= self.now

    @rule(record=records)
    def release(self, record: LeaseRecord) -> None:
        """End it, if it is held."""
        if record.state is HELD:
            self.watched.release(record)

    @rule(record=records)
    def forget(self, record: LeaseRecord) -> None:
        """End it, as the garbage collector does."""
        if record.state is HELD:
            self.watched.leases.dropped(record)

    @rule(record=records, reason=st.sampled_from(["broken", "session"]))
    def lose(self, record: LeaseRecord, reason: LossReason) -> None:
        """Lose it before its time."""
        self.watched.leases.lose(record, reason)

    @rule(record=records, ttl=TTLS, outcome=OUTCOMES)
    def extend(self, record: LeaseRecord, ttl: float, outcome: Renewal) -> None:
        """Extend it, unless that would have to wait."""
        if record.renewal.in_flight:
            return
        self.watched.backend.outcome = outcome
        try:
            drive(self.watched.renewer.extend(record, self.watched.backend, ttl))
        except (LockLost, BackendUnavailable):
            assert not record.held

    @rule(seconds=st.sampled_from([0.001, 0.1, 1.0, 5.0, 9.5, 40.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass in which the watch does not run, though it should: a busy machine."""
        self.watched.runtime.time += seconds

    @rule()
    def sleep(self) -> None:
        """Let the time come to which the watch sleeps."""
        if self.watched.renewer._wake_at < inf:
            self.watched.runtime.time = max(self.now, self.watched.renewer._wake_at)

    @rule()
    def look(self) -> None:
        """Let the watch run."""
        now, held = self.now, self.watched.leases.all()
        over = {record for record in held if record.valid_until <= now}
        in_flight = {record for record in held if record.renewal.in_flight}
        stalls = {record for record in held if stall_ends_renewal(record) and record.renewal.stall_at <= now}
        must = {record for record in held if record not in over | stalls and due_at(record) <= now}

        expired, due = self.watched.wake()

        assert set(expired) == over
        assert len(due) == len(set(due))
        assert must <= set(due)
        assert in_flight.isdisjoint(due)
        assert all(record.renewal.next_at <= now + record.grant.ttl / 30 for record in due)
        assert self.watched.renewer._wake_at > now
        left = [record for record in held if record not in over]
        assert not any(record.renewal.stall_at <= now for record in left if stall_ends_renewal(record))
        assert all(record.renewal.stalled for record in stalls - over)
        assert not any(record.renewal.stalled for record in due)

    @rule(outcome=OUTCOMES)
    def renew(self, outcome: Renewal) -> None:
        """Let the renewer run."""
        stalled = {record for record in self.watched.renewer._due if record.renewal.stalled}
        deadlines = {record: record.valid_until for record in stalled}
        due = self.watched.renew(outcome)
        assert all(record.valid_until == deadlines[record] for record in stalled)
        assert not any(record.renewal.in_flight for record in due if record.state is HELD)

    @rule()
    def renew_soon(self) -> None:
        """Have all renewed now."""
        self.watched.renewer.renew_soon()

    @rule()
    def fail(self) -> None:
        """Let the watch fail, and be run again."""
        self.watched.renewer._start_agenda()

    @invariant()
    def wakes_up_in_time(self) -> None:
        """The watch never sleeps longer than until something is due."""
        if hasattr(self, "watched"):
            held = self.watched.leases.all()
            assert self.watched.renewer._wake_at <= min(map(due_at, held), default=inf)


AgendaAgainstAll.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgendaAgainstAll = AgendaAgainstAll.TestCase


def test_agenda_does_not_keep_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long leases without renewal, each released soon after the watch has seen it."""
    monkeypatch.setattr(renewal, "OUTDATED_MIN", 10)
    watched = Watched()
    kept = watched.acquire(86400.0)
    for _ in range(200):
        record = watched.acquire(86400.0, renew=False)
        watched.runtime.time += 0.01
        watched.wake()
        watched.release(record)

    assert len(watched.renewer._agenda) <= 30
    watched.release(watched.acquire(86400.0))  # before the watch has seen it
    assert not watched.leases.unplanned
    watched.runtime.time = kept.renewal.next_at
    assert watched.wake() == ([], [kept])


def test_leases_renewed_together_stay_together() -> None:
    """Many that were acquired one after the other go in one batch each time, also when a renewal failed."""
    watched = Watched()
    for _ in range(200):
        watched.runtime.time += 0.0025
        watched.acquire(30.0)
    for outcome in (Renewed(), Renewed(), Unknown(TimeoutError()), Renewed(), Renewed()):
        watched.wake_until_due()
        assert len(watched.renew(outcome)) == 200


def test_lease_that_was_lost_since_it_was_due_is_not_renewed() -> None:
    """It is being released: a renewal that overtakes that would keep the lock from others."""
    watched = Watched()
    lost, held = watched.acquire(30.0), watched.acquire(30.0)
    asked: list[Grant] = []

    async def renew(grants: Sequence[Grant]) -> list[Renewal]:
        asked.extend(grants)
        return [Renewed() for _ in grants]

    watched.backend.renew = renew
    assert watched.wake_until_due() == [lost, held]
    watched.leases.lose(lost, "session")
    watched.renew(Renewed())

    assert asked == [held.grant]
