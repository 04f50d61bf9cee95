"""
Thousands of random schedules of the real engine, each judged by the checker: `nox -s simulate` runs ten thousand.

A failure names its seed; ``LOCKKIT_SIM_SEED=<seed> pytest tests/simulation`` runs that one alone and shows all of its
history, and so does ``nox -s simulate -- --seed=<seed>``. ``--seed=10000-59999`` runs that many others.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from lockkit_tools.simulation import Outcome, describe, simulate
from tests.simulation.conftest import PART
from tests.simulation.support import apart

FAILURES_SHOWN = 3

# A schedule may drop a lease: that is one of the things that users do.
pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def report(outcome: Outcome, *, whole: bool) -> str:
    """What went wrong, and how to see it again."""
    seed = outcome.schedule.seed
    lines = [
        f"seed {seed}: {outcome.verdict}",
        f"to repeat it: LOCKKIT_SIM_SEED={seed} pytest tests/simulation, or: nox -s simulate -- --seed={seed}",
    ]
    if whole:
        lines += [str(outcome.schedule), describe(outcome.history)]
    return "\n".join(lines)


def test_random_schedules_are_valid(seeds: range) -> None:
    """
    Whatever is done to clients, network and server, every promise is kept; unknown is a failure too.

    And in the first of them everything that can happen does happen, not once in a blue moon: else the verdicts would
    say little.
    """
    failed = []
    seen: Counter[str] = Counter()
    for seed in apart(seeds):
        outcome = simulate(seed)
        seen.update(kinds(outcome))
        if not outcome.verdict:
            failed.append(report(outcome, whole=len(seeds) == 1))
    if failed:
        pytest.fail("\n\n".join([f"{len(failed)} of {len(seeds)} schedules failed", *failed[:FAILURES_SHOWN]]))
    if seeds.start == 0 and len(seeds) == PART:
        assert {kind: seen[kind] for kind in KINDS if seen[kind] < 3} == {}


KINDS = (
    "Acquired", "Believed", "Closed", "Crashed", "DataLost", "Dropped", "Failed BackendUnavailable",
    "Failed Cancelled", "Failed LockTimeout", "Freed broken", "Freed expired", "Freed lost", "Freed released",
    "Freed undone", "Kept", "Looked", "Paused", "Released BackendUnavailable", "Released LockLost",
    "Released ok", "Resumed", "Told", "Unheld expired", "Unheld gone", "Unheld taken", "Wrote", "calm",
    "fault break", "fault clock jump", "fault close", "fault crash", "fault cut", "fault exit", "fault pause",
    "fault server pause", "fault server restart", "fault cut close", "fault no threads",
)  # fmt: skip


def kinds(outcome: Outcome) -> Iterator[str]:
    """Say what happened: kinds of events, with how or why, and of faults."""
    for event in outcome.history:
        fields = event._asdict()
        detail = fields.get("how") or fields.get("why") or fields.get("error") or fields.get("outcome") or ""
        yield from {type(event).__name__, f"{type(event).__name__} {detail}".strip()}
    yield from {f"fault {fault.kind}" for fault in outcome.schedule.faults}
    if outcome.schedule.calm:
        yield "calm"


def digest(seeds: range) -> str:
    """One number for everything that happened."""
    text = "\n".join(repr(simulate(seed).history) for seed in apart(seeds))
    return hashlib.sha256(text.encode()).hexdigest()


def test_other_seed_is_another_history() -> None:
    """No two of a hundred are alike."""
    assert len({repr(simulate(seed).history) for seed in apart(range(100))}) == 100


def test_history_depends_on_the_seed_alone() -> None:
    """Another process, with other hashes and addresses, gets the same: a seed from CI can be repeated on a desk."""
    script = (
        "import logging, warnings; logging.getLogger('lockkit').setLevel(100); warnings.simplefilter('ignore')\n"
        "from tests.simulation.test_schedules import digest; print(digest(range(40)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )

    assert done.stdout.strip() == digest(range(40))
