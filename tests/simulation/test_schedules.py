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

import pytest

from lockkit_tools.simulation import Outcome, describe, simulate
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
    """Whatever is done to clients, network, server and clocks, every promise is kept; unknown is a failure too."""
    failed = []
    for seed in apart(seeds):
        outcome = simulate(seed)
        if not outcome.verdict:
            failed.append(report(outcome, whole=len(seeds) == 1))
    if failed:
        pytest.fail("\n\n".join([f"{len(failed)} of {len(seeds)} schedules failed", *failed[:FAILURES_SHOWN]]))


def digest(seeds: range) -> str:
    """One number for everything that happened."""
    text = "\n".join(repr(simulate(seed).history) for seed in apart(seeds))
    return hashlib.sha256(text.encode()).hexdigest()


def test_other_seed_is_another_history() -> None:
    """No two of a hundred are alike."""
    assert len({repr(simulate(seed).history) for seed in apart(range(100))}) == 100


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_history_does_not_depend_on_the_interpreter(hash_seed: str) -> None:
    """Another process, with other hashes and addresses, gets the same: a seed from CI can be repeated on a desk."""
    script = (
        "import logging, warnings; logging.getLogger('lockkit').setLevel(100); warnings.simplefilter('ignore')\n"
        "from tests.simulation.test_schedules import digest; print(digest(range(40)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )

    assert done.stdout.strip() == digest(range(40))


def test_schedules_are_rich() -> None:
    """Everything that can happen does happen, and not once in a blue moon: else the verdicts would say little."""
    seen: Counter[str] = Counter()
    for seed in apart(range(800)):
        outcome = simulate(seed)
        for event in outcome.history:
            fields = event._asdict()
            detail = fields.get("how") or fields.get("why") or fields.get("error") or fields.get("outcome") or ""
            seen.update({type(event).__name__, f"{type(event).__name__} {detail}".strip()})
        seen.update({f"fault {fault.kind}" for fault in outcome.schedule.faults})
        seen.update(["calm"] if outcome.schedule.calm else [])

    rare = {
        name: seen[name]
        for name in (
            "Acquired", "Believed", "Closed", "Crashed", "DataLost", "Dropped", "Failed BackendUnavailable",
            "Failed Cancelled", "Failed LockTimeout", "Freed broken", "Freed expired", "Freed lost", "Freed released",
            "Freed undone", "Kept", "Looked", "Paused", "Released BackendUnavailable", "Released LockLost",
            "Released ok", "Resumed", "Told", "Unheld expired", "Unheld gone", "Unheld taken", "Wrote", "calm",
            "fault break", "fault clock jump", "fault close", "fault crash", "fault cut", "fault exit", "fault pause",
            "fault server pause", "fault server restart", "fault cut close", "fault no threads",
        )
        if seen[name] < 3
    }  # fmt: skip
    assert rare == {}
