"""
Runs very many random schedules of all kinds on all cores: ``nox -s simulate-night``.

``python -m tests.simulation.night --count=10000`` runs so many, and reports violations;
``--kind=once --seed=17`` runs one again, and shows what happened.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TextIO

from lockkit_tools.history import write
from lockkit_tools.simulation import describe, simulate
from lockkit_tools.simulation.stays import stays
from tests.simulation import test_hand_over, test_lock_set, test_object_store, test_once, test_rolling_restart
from tests.simulation.election import hold_elections, overlaps
from tests.simulation.redlock import RedlockSimulation, schedule_of
from tests.simulation.sharing import Parts, use_permits, use_rwlock, use_slots

COUNT = 10_000_000
BATCH = 100
"""Schedules that a worker runs at a time. More make the end wait for one worker; fewer are work for the parent."""
PROGRESS_SECONDS = 30.0
VIOLATIONS_SHOWN = 20


class Kind(NamedTuple):
    """Schedules of one kind: `play` returns what is wrong with that of a seed, empty if nothing is."""

    name: str
    share: float
    play: Callable[[int], str]
    about: str


def _lock(seed: int) -> str:
    verdict = simulate(seed).verdict
    return "" if verdict else str(verdict)


def _redlock(seed: int) -> str:
    verdict = RedlockSimulation(schedule_of(seed)).judge()
    return "" if verdict else str(verdict)


def _rolling(seed: int) -> str:
    return test_rolling_restart.play(seed)[1]


def _objects(seed: int) -> str:
    verdict = test_object_store.ObjectsSimulation(seed).judge()
    return "" if verdict else str(verdict)


def _rwlock(seed: int) -> str:
    return "; ".join(map(str, use_rwlock(seed, Parts(), calm=seed % 2 == 1)[1]))


def _permits(seed: int) -> str:
    return "; ".join(map(str, use_permits(seed, Parts(), calm=seed % 2 == 1)[1]))


def _slots(seed: int) -> str:
    return "; ".join(map(str, use_slots(seed, Parts(), calm=False)[1]))


def _election(seed: int) -> str:
    return "; ".join(f"{one} and {other} overlap" for one, other in overlaps(hold_elections(seed)))


def _hand_over(seed: int) -> str:
    return test_hand_over.play(seed).problem()


def _once(seed: int) -> str:
    return test_once.play(seed).problem()


def _lock_set(seed: int) -> str:
    test_lock_set.play(seed, failing=seed % 2 == 1)
    return ""


# A schedule of locks takes 3 ms, one of slots 90: with these shares all take 7 ms on average.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("lock", 0.52, _lock, "clients of one server, all that users do to a lock, and all faults"),
        Kind("redlock", 0.06, _redlock, "the same on five Redis nodes, by majority"),
        Kind("rolling", 0.01, _rolling, "rolling restarts of Redlock nodes that lose their data, under long leases"),
        Kind("objects", 0.02, _objects, "an object store with conditional writes, and waiters that observe expiry"),
        Kind("set", 0.10, _lock_set, "several locks at once, in any order, given up and cancelled"),
        Kind("rwlock", 0.03, _rwlock, "readers and writers, with a storage that compares tokens"),
        Kind("permits", 0.02, _permits, "a semaphore with native permits, limits equal and mixed"),
        Kind("slots", 0.01, _slots, "a semaphore of one Redlock per slot"),
        Kind("election", 0.08, _election, "candidates, terms, grace, and leaders that are cut off"),
        Kind("hand-over", 0.05, _hand_over, "tickets taken twice or too late, holders without progress, notes"),
        Kind("once", 0.10, _once, "work once per key, with runs that fail and are overtaken"),
    )
}


@dataclass(slots=True)
class Result:
    """
    What came of some schedules.

    Attributes:
        counts: How many of each kind were run.
        violations: Kind, seed and problem of those that broke a promise.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, int, str]] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add what came of others."""
        self.counts += other.counts
        self.violations += other.violations


def run(
    count: int, *, first: int = 0, workers: int | None = None, kinds: Sequence[Kind] = tuple(KINDS.values())
) -> Result:
    """Run schedules in several processes. Ctrl-C ends it early: then what was run until then is the result."""
    result, said = Result(), 0.0
    with ProcessPoolExecutor(workers, get_context("fork"), _become_worker) as pool:
        pending: set[Future[Result]] = set()
        try:
            for kind, seeds in _batches(kinds, count, first):
                pending.add(pool.submit(play, kind, seeds))
                while len(pending) >= 2 * (workers or os.cpu_count() or 1):
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        result.add(future.result())
                    if time.monotonic() >= said + PROGRESS_SECONDS:
                        said = time.monotonic()
                        so_far = f"{result.counts.total():,} of {count:,} schedules"
                        say(f"{so_far}, {len(result.violations)} violations", sys.stderr)
            for future in pending:
                result.add(future.result())
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    return result


def _batches(kinds: Sequence[Kind], count: int, first: int) -> Iterator[tuple[Kind, range]]:
    """Take the kind next that lags most behind its share, so that a run that ends early has run its share of each."""
    shares = sum(kind.share for kind in kinds)
    left = {kind: max(1, round(count * kind.share / shares)) for kind in kinds}
    wanted = dict(left)
    while any(left.values()):
        kind = max(left, key=lambda kind: left[kind] / wanted[kind])
        start = first + wanted[kind] - left[kind]
        size = min(BATCH, left[kind])
        left[kind] -= size
        yield kind, range(start, start + size)


def _become_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    be_quiet()


def be_quiet() -> None:
    """Do not log what clients lose, nor warn of what schedules drop on purpose."""
    logging.getLogger("lockkit").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", ResourceWarning)


def play(kind: Kind, seeds: range) -> Result:
    """Run the schedules of some seeds."""
    result = Result()
    gc.disable()  # see `play_one`
    try:
        for seed in seeds:
            result.counts[kind.name] += 1
            if problem := play_one(kind, seed):
                result.violations.append((kind.name, seed, problem))
    finally:
        gc.enable()
    return result


def play_one(kind: Kind, seed: int) -> str:
    """
    Run one schedule; return what is wrong, empty if nothing is.

    The garbage collector runs after it, never within, where it would drop leases at moments that do not depend on the
    seed: keep it disabled around the call.
    """
    try:
        return kind.play(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, the schedule found it
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect(0)


def report(result: Result, wanted: int, seconds: float) -> Iterator[str]:
    """Write what came of a run, line by line."""
    count = result.counts.total()
    yield f"{count:,} schedules in {seconds:,.0f} s on Python {sys.version.partition(' ')[0]}"
    if count < wanted:
        yield f"Ended early: {wanted:,} were to be run."
    for name, times in result.counts.items():
        violated = sum(kind == name for kind, *_ in result.violations)
        yield f"  {times:>11,} {name}, {violated} violated: {KINDS[name].about}"
    if not result.violations:
        yield "Every schedule kept every promise."
    for kind, seed, problem in sorted(result.violations)[:VIOLATIONS_SHOWN]:
        yield f"{kind}, seed {seed}: {problem}\n    nox -s simulate-night -- --kind={kind} --seed={seed}"


def repeat(kind: Kind, seed: int, history: Path | None = None) -> int:
    """Run one schedule again, show what happened, and write the calls to a file."""
    gc.disable()
    problem = play_one(kind, seed)
    if kind.name == "lock":
        outcome = simulate(seed)
        say(f"{outcome.schedule}\n{describe(outcome.history)}")
        if history is not None:
            write(history, stays(outcome.history))
    elif kind.name == "redlock":
        simulation = RedlockSimulation(schedule_of(seed))
        simulation.judge()
        say(f"{simulation.schedule}\n{describe(simulation.history)}")
    say(f"{kind.name}, seed {seed}: {problem or 'every promise was kept'}")
    return 1 if problem else 0


def say(text: str, file: TextIO | None = None) -> None:
    """Print for the person who started it."""
    print(text, file=file, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="nox -s simulate-night --", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many schedules; default: ten million")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind; default: 0")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only these")
    parser.add_argument("--seed", type=int, help="run this one schedule of --kind again, and show it")
    parser.add_argument("--history", type=Path, help="with --kind=lock --seed: write its calls to this .edn or .json")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    given = parser.parse_args(arguments)
    kinds = [KINDS[name] for name in given.kind or KINDS]
    if given.count < 1 or (given.workers is not None and given.workers < 1):
        parser.error("--count and --workers must be 1 or more")
    if given.history is not None and (given.seed is None or given.kind != ["lock"]):
        parser.error("--history needs --kind=lock and --seed")
    if given.seed is not None:
        if len(kinds) != 1:
            parser.error("--seed needs one --kind")
        be_quiet()
        return repeat(kinds[0], given.seed, given.history)
    began = time.monotonic()
    result = run(given.count, first=given.first, workers=given.workers, kinds=kinds)
    for line in report(result, given.count, time.monotonic() - began):
        say(line)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
