"""A lease is extended: Ctrl-C, and answers that do not come."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

import lockkit
import lockkit.aio
from lockkit.engine.lease_record import LATE_SECONDS, LeaseRecord, RenewalPlan
from lockkit.engine.renewal import Renewer
from tests.interrupts import CallStrike
from tests.tries import until, until_renewed

if TYPE_CHECKING:
    from lockkit.units import Instant

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
            client._engine.confirm_soon()
            until_renewed(lease)
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
    plan = RenewalPlan()
    plan.note_unanswered(10.0, 200.0)
    plan.note_unanswered(20.0, 100.0)

    assert (plan.unanswered_ttl, plan.unanswered_until) == (10.0, 200.0 + LATE_SECONDS)


def test_watch_wakes_up_once_for_leases_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under asyncio each has been released when the watch runs, which cost a twelfth of a pair on ZooKeeper."""
    looks: list[Instant] = []
    survey = Renewer._survey

    def note_and_survey(renewer: Renewer, now: Instant) -> object:
        looks.append(now)
        return survey(renewer, now)

    async def scenario() -> None:
        async with lockkit.aio.connect("memory://come-and-go") as client:
            for _ in range(10):
                await (await client.lock("x", ttl=15).acquire()).release()
                for _ in range(3):
                    await asyncio.sleep(0)  # the watch runs, if it was woken
            assert len(looks) == 1

    monkeypatch.setattr(Renewer, "_survey", note_and_survey)
    asyncio.run(scenario())
