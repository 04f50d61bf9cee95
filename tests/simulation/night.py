"""
The kinds of schedules that ``nox -s simulate-night`` runs, and its command line.

``python -m tests.simulation.night --count=10000`` runs so many and prints the report; ``--kind=once --seed=17`` runs
one again, and shows what happened.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from lockkit_tools.simulation import describe, simulate
from lockkit_tools.simulation.night import Kind, Night, be_quiet, play_one, run
from lockkit_tools.simulation.report import as_json, as_text
from tests.simulation import test_lock_set, test_once
from tests.simulation.election import hold_elections, overlaps
from tests.simulation.redlock import RedlockSimulation, schedule_of
from tests.simulation.sharing import Parts, use_permits, use_rwlock, use_slots

MODULE = "tests.simulation.night"
COUNT = 10_000_000
PROGRESS_SECONDS = 30.0


def _lock(seed: int) -> str:
    verdict = simulate(seed).verdict
    return "" if verdict else str(verdict)


def _redlock(seed: int) -> str:
    verdict = RedlockSimulation(schedule_of(seed)).judge()
    return "" if verdict else str(verdict)


def _rwlock(seed: int) -> str:
    return "; ".join(map(str, use_rwlock(seed, Parts(), calm=seed % 2 == 1)[1]))


def _permits(seed: int) -> str:
    return "; ".join(map(str, use_permits(seed, Parts(), calm=seed % 2 == 1)[1]))


def _slots(seed: int) -> str:
    return "; ".join(map(str, use_slots(seed, Parts(), calm=False)[1]))


def _election(seed: int) -> str:
    return "; ".join(f"{one} and {other} overlap" for one, other in overlaps(hold_elections(seed)))


def _once(seed: int) -> str:
    return test_once.play(seed).problem()


def _lock_set(seed: int) -> str:
    test_lock_set.play(seed, failing=seed % 2 == 1)
    return ""


# A schedule of locks takes 3 ms, one of slots 90: with these shares all take 7 ms on average.
KINDS = (
    Kind("lock", 0.60, _lock, "clients of one server, all that users do to a lock, and all faults"),
    Kind("redlock", 0.06, _redlock, "the same on five Redis nodes, by majority"),
    Kind("set", 0.10, _lock_set, "several locks at once, in any order, given up and cancelled"),
    Kind("rwlock", 0.03, _rwlock, "readers and writers, with a storage that compares tokens"),
    Kind("permits", 0.02, _permits, "a semaphore with native permits, limits equal and mixed"),
    Kind("slots", 0.01, _slots, "a semaphore of one Redlock per slot"),
    Kind("election", 0.08, _election, "candidates, terms, grace, and leaders that are cut off"),
    Kind("once", 0.10, _once, "work once per key, with runs that fail and are overtaken"),
)


def repeat(kind: Kind, seed: int) -> int:
    """Run one schedule again, and show what happened."""
    gc.disable()
    problem = play_one(kind, seed)
    if kind.name == "lock":
        outcome = simulate(seed)
        say(f"{outcome.schedule}\n{describe(outcome.history)}")
    elif kind.name == "redlock":
        simulation = RedlockSimulation(schedule_of(seed))
        simulation.judge()
        say(f"{simulation.schedule}\n{describe(simulation.history)}")
    say(f"{kind.name}, seed {seed}: {problem or 'every promise was kept'}")
    return 1 if problem else 0


def say(text: str, file: TextIO | None = None) -> None:
    """Print for the person who started it."""
    print(text, file=file, flush=True)


class Progress:
    """Says now and then how far the run is."""

    def __init__(self) -> None:
        """Start now."""
        self._began = time.monotonic()
        self._said = self._began - PROGRESS_SECONDS  # the first batch says that it has begun

    def __call__(self, night: Night) -> None:
        """Print a line if it is time to."""
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            left = (now - self._began) * (night.wanted / night.count - 1)
            done = f"{night.count:,} of {night.wanted:,} schedules, {night.violated} violations"
            say(f"{done}, about {left:,.0f} s left", sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="nox -s simulate-night --", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many schedules; default: ten million")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind; default: 0")
    parser.add_argument("--kind", action="append", default=[], choices=[kind.name for kind in KINDS], help="only these")
    parser.add_argument("--seed", type=int, help="run this one schedule of --kind again, and show it")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    parser.add_argument(
        "--measured", type=float, default=0.05, help="share of schedules whose branches are measured; default: 0.05"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, for programs")
    given = parser.parse_args(arguments)
    if given.count < 1 or not 0 <= given.measured <= 1 or (given.workers is not None and given.workers < 1):
        parser.error("--count and --workers must be 1 or more, --measured 0 to 1")
    if given.seed is not None:
        if len(given.kind) != 1:
            parser.error("--seed needs one --kind")
        be_quiet()
        return repeat(next(kind for kind in KINDS if kind.name in given.kind), given.seed)
    night = run(
        MODULE,
        given.count,
        first=given.first,
        workers=given.workers,
        measured=given.measured,
        only=given.kind,
        progress=Progress(),
    )
    report = as_json(night, KINDS)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    say(as_text(report))
    return 1 if night.violated else 0


if __name__ == "__main__":
    sys.exit(main())
