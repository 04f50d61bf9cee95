"""Leaders never act at the same time, and the checker finds mistakes that would let them."""

from __future__ import annotations

import pytest

from lockkit.engine.lease_record import LeaseRecord
from lockkit.primitives.election import Tenure
from tests.simulation.election import hold_elections, overlaps, stale_acts
from tests.simulation.support import known_first
from tests.simulation.test_mutants import believe_from_the_answer

SEEDS = range(150)

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def test_leaders_never_act_at_the_same_time() -> None:
    """In random schedules with cut networks, pauses, crashes and clocks that differ."""
    terms = stale = 0
    for seed in SEEDS:
        acts = hold_elections(seed)
        assert overlaps(acts) == [], f"seed {seed}"
        terms += len(acts.terms)
        stale += len(stale_acts(acts))

    assert terms > 5 * len(SEEDS), "the elections went on"
    assert stale > 0, "no leader was paused in its act: the term number had nothing to do"


def no_grace(self: Tenure) -> float:
    """Stop at the deadline only."""
    return self._record.valid_until


async def sleeps_through(self: Tenure, seconds: float) -> bool:
    """Look, and then sleep."""
    seen = self._look()
    await self._runtime.sleep(seconds)
    return seen


# What is broken, how, and in which schedule that was found.
MUTANTS: dict[str, tuple[type, str, object, int]] = {
    "stops at the deadline": (Tenure, "stop_at", property(no_grace), 0),
    "sleeps through the end": (Tenure, "must_stop", sleeps_through, 1),
    "deadline counted from the answer": (LeaseRecord, "set_deadline", believe_from_the_answer, 720),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_found(mutant: tuple[type, str, object, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By an overlap, in one of the schedules."""
    where, name, what, known = mutant
    monkeypatch.setattr(where, name, what)

    assert any(overlaps(hold_elections(seed)) for seed in known_first(known, range(2000)))
