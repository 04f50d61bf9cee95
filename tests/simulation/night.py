"""
Runs very many random schedules of all kinds on all cores: ``nox -s simulate-night``.

``python -m tests.simulation.night --count=10000`` runs so many, and reports faults by kind and violations;
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing import get_context
from typing import Any, NamedTuple, Self, TextIO

from lockkit_tools.simulation import describe, simulate
from lockkit_tools.simulation.clock import Clock
from lockkit_tools.simulation.member import Member
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.schedule import Fault
from lockkit_tools.simulation.world import Process, Task, World
from tests.simulation import test_lock_set, test_once
from tests.simulation.election import hold_elections, overlaps
from tests.simulation.redlock import RedlockSimulation, schedule_of
from tests.simulation.sharing import Parts, use_permits, use_rwlock, use_slots

COUNT = 10_000_000
BATCH = 100
"""Schedules that a worker runs at a time. More make the end wait for one worker; fewer are work for the parent."""
PROGRESS_SECONDS = 30.0
VIOLATIONS_SHOWN = 20
SLOW_MESSAGE_SECONDS = 0.1


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
KINDS = {
    kind.name: kind
    for kind in (
        Kind("lock", 0.60, _lock, "clients of one server, all that users do to a lock, and all faults"),
        Kind("redlock", 0.06, _redlock, "the same on five Redis nodes, by majority"),
        Kind("set", 0.10, _lock_set, "several locks at once, in any order, given up and cancelled"),
        Kind("rwlock", 0.03, _rwlock, "readers and writers, with a storage that compares tokens"),
        Kind("permits", 0.02, _permits, "a semaphore with native permits, limits equal and mixed"),
        Kind("slots", 0.01, _slots, "a semaphore of one Redlock per slot"),
        Kind("election", 0.08, _election, "candidates, terms, grace, and leaders that are cut off"),
        Kind("once", 0.10, _once, "work once per key, with runs that fail and are overtaken"),
    )
}


@dataclass(slots=True)
class Result:
    """
    What came of some schedules.

    Attributes:
        counts: How many of each kind were run.
        faults: What was done to clients, network and server: how often.
        suffered: In how many schedules each of them was done.
        violations: Kind, seed and problem of those that broke a promise.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    suffered: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, int, str]] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add what came of others."""
        self.counts += other.counts
        self.faults += other.faults
        self.suffered += other.suffered
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
        with Faults() as faults:
            for seed in seeds:
                problem = play_one(kind, seed)
                counted = faults.take()
                result.counts[kind.name] += 1
                result.faults += counted
                result.suffered.update(dict.fromkeys(counted, 1))
                if problem:
                    result.violations.append((kind.name, seed, problem))
    finally:
        gc.enable()
        # What `Faults` still saw when its own schedule was collected would stay: 65 kB for each schedule.
        gc.collect(1)
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


class Faults:
    """Counts what is done to clients, network and server, of whatever kind the schedule is: at the simulated things."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._counted: Counter[str] = Counter()
        self._networks: list[Network] = []
        self._ended = False
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Count from now on."""
        self._watch(Process, "pause", lambda process: "" if process.paused or process.dead else "client paused")
        self._watch(Process, "crash", lambda process: "" if process.dead or self._ended else "client killed")
        self._watch(Task, "cancel", lambda _: "call cancelled")
        self._watch(Network, "cut", _direction)
        self._watch(NoAnswer, "__init__", lambda *_: "request without an answer")
        self._watch(Node, "pause", lambda _: "server paused")
        self._watch(Node, "stop", lambda _, *, lose_data=False: f"server stopped{', data lost' if lose_data else ''}")
        self._watch(Clock, "jump", lambda *_: "time of day set")
        self._watch(Member, "suffer", _member_fault)
        self._watch(Network, "__init__", self._begin)
        self._watch(World, "end", self._end)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        self._undo.close()

    def take(self) -> Counter[str]:
        """Give what was counted since the last call."""
        slow = sum(network.slowest > SLOW_MESSAGE_SECONDS for network in self._networks)
        self._networks.clear()
        counted, self._counted = self._counted, Counter()
        return counted + Counter({"network with slow messages": slow})

    def _begin(self, network: Network, *_: object) -> str:
        self._networks.append(network)
        self._ended = False
        return ""

    def _end(self, _: World) -> str:
        self._ended = True  # what is left is killed now: that is no fault
        return ""

    def _watch(self, owner: type, name: str, describe: Callable[..., str]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def counting(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever it takes
            what = describe(*args, **options)
            if what:
                self._counted[what] += 1
            return original(*args, **options)

        setattr(owner, name, counting)
        self._undo.callback(setattr, owner, name, original)


def _direction(_: Network, process: Process, node: Node, *, requests: bool = True, answers: bool = True) -> str:
    del process, node
    if requests and answers:
        return "network cut"
    return f"network cut for {'requests' if requests else 'answers'}"


def _member_fault(_: Member, fault: Fault) -> str:
    names = {
        "exit": "event loop ended",
        "close": "client closed",
        "cut close": "close cancelled",
        "break": "lock broken by force",
        "no threads": "no task can be started",
    }
    return names.get(fault.kind, "")  # the others are counted where they happen


def report(result: Result, wanted: int, seconds: float) -> Iterator[str]:
    """Write what came of a run, line by line."""
    count = result.counts.total()
    yield f"{count:,} schedules in {seconds:,.0f} s on Python {sys.version.partition(' ')[0]}"
    if count < wanted:
        yield f"Ended early: {wanted:,} were to be run."
    for name, times in result.counts.items():
        violated = sum(kind == name for kind, *_ in result.violations)
        yield f"  {times:>11,} {name}, {violated} violated: {KINDS[name].about}"
    for fault, times in result.faults.most_common():
        yield f"  {times:>11,} {fault}, in {result.suffered[fault] / count:.1%} of the schedules"
    if not result.violations:
        yield "Every schedule kept every promise."
    for kind, seed, problem in sorted(result.violations)[:VIOLATIONS_SHOWN]:
        yield f"{kind}, seed {seed}: {problem}\n    nox -s simulate-night -- --kind={kind} --seed={seed}"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="nox -s simulate-night --", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many schedules; default: ten million")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind; default: 0")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only these")
    parser.add_argument("--seed", type=int, help="run this one schedule of --kind again, and show it")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    given = parser.parse_args(arguments)
    kinds = [KINDS[name] for name in given.kind or KINDS]
    if given.count < 1 or (given.workers is not None and given.workers < 1):
        parser.error("--count and --workers must be 1 or more")
    if given.seed is not None:
        if len(kinds) != 1:
            parser.error("--seed needs one --kind")
        be_quiet()
        return repeat(kinds[0], given.seed)
    began = time.monotonic()
    result = run(given.count, first=given.first, workers=given.workers, kinds=kinds)
    for line in report(result, given.count, time.monotonic() - began):
        say(line)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
