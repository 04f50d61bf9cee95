"""A lease is extended: Ctrl-C, and answers that do not come."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import lockkit
import lockkit.aio
from lockkit.engine.lease_record import LATE_SECONDS, LeaseRecord, RenewalPlan
from lockkit.engine.renewal import Renewer
from lockkit.engine.settings import LockSettings
from lockkit.units import Instant
from tests.interrupts import CallStrike
from tests.tries import until, until_renewed

FUNCTIONS = [
    Renewer.extend,
    Renewer._wait_for_turn,
    Renewer._apply_extension,
    LeaseRecord.shorten_deadline,
    LeaseRecord.renewed,
    RenewalPlan.finish,
    RenewalPlan.wake_waiters,
]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_interrupted_extend_leaves_the_lease_renewed() -> None:
    """At each instant: a program that goes on after Ctrl-C would lose the lease at its deadline."""
    number = 0
    while True:
        with lockkit.connect(f"memory://extend-{number}") as client:
            lease = client.lock("x", ttl=3600).acquire()
            strike = CallStrike(number, *(function.__code__ for function in FUNCTIONS))
            strike.during(lease.extend)

            until(partial(nothing_in_flight, lease))
            until_renewed(lease, begin=client._engine.confirm_soon)
            lease.release()
        if not strike.struck:
            break
        number += 1
    assert number > 1


def nothing_in_flight(lease: lockkit.Lease) -> bool:
    """Look at the plan."""
    return lease._record.renewal.in_flight is None


def test_older_renewal_without_answer_does_not_shorten_what_a_newer_one_needs() -> None:
    """A call that is interrupted before its turn has looked at the clock before the renewal that it waited for."""
    settings = LockSettings("x", 30.0, None, True, False, None, "{}", None, True, {})  # noqa: FBT003 - as Engine.settings
    plan = RenewalPlan(settings, 0.0)
    plan.note_unanswered(10.0, 200.0)
    plan.note_unanswered(20.0, 100.0)

    assert (plan.unanswered_ttl, plan.unanswered_until) == (10.0, 200.0 + LATE_SECONDS)


def test_row_of_short_leases_wakes_the_watch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with asyncio, where the watch runs only when the lease that woke it has been released already."""
    surveys: list[Instant] = []
    survey = Renewer._survey

    def note(renewer: Renewer, now: Instant) -> tuple[list[LeaseRecord], list[LeaseRecord], float]:
        surveys.append(now)
        return survey(renewer, now)

    monkeypatch.setattr(Renewer, "_survey", note)

    async def run() -> None:
        async with lockkit.aio.connect("memory://short-leases") as client:
            for _ in range(100):
                async with client.lock("x", ttl=20):
                    pass
                await asyncio.sleep(0)

    asyncio.run(run())
    assert 1 <= len(surveys) <= 3
