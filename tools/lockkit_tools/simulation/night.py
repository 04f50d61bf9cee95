"""
Runs very many schedules on all cores, and keeps what there is to say about them, not the histories.

`run` takes `Kind` after `Kind` in batches, so that a run that is ended early has run its share of each. What comes of
it is a `Night`, which `lockkit_tools.simulation.report` prints.
"""

from __future__ import annotations

import gc
import heapq
import importlib
import logging
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing import get_context
from typing import Any, NamedTuple, Self

from lockkit.units import Seconds
from lockkit_tools.simulation.branches import Arcs, BranchMeter
from lockkit_tools.simulation.clock import Clock
from lockkit_tools.simulation.member import Member
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.schedule import Fault
from lockkit_tools.simulation.world import Process, Task, World

BATCH_MAX = 100
"""Schedules that a worker runs at a time. More make the end of a run wait for one worker; fewer are work for the parent
process."""

SLOWEST_KEPT = 10
VIOLATIONS_KEPT = 20
"""Of each kind. A defect is found by many schedules, and each is as good as the next."""

SLOW_MESSAGE_SECONDS = 0.1
"""A message that takes longer counts as slow."""


class Kind(NamedTuple):
    """
    Schedules that are drawn and judged in one way.

    Attributes:
        name: For the report.
        share: How many of all schedules are of this kind, 0 to 1.
        play: Runs the schedule of a seed; returns what is wrong with it, empty if nothing is. An exception is wrong.
        about: What the schedules do, for the report.
    """

    name: str
    share: float
    play: Callable[[int], str]
    about: str


class Slow(NamedTuple):
    """
    One of the schedules that took longest.

    Attributes:
        seconds: CPU time.
        kind: Its kind.
        seed: Its seed.
    """

    seconds: Seconds
    kind: str
    seed: int


class Violation(NamedTuple):
    """
    A schedule in which a promise was broken.

    Attributes:
        kind: Its kind.
        seed: Its seed.
        problem: What is wrong.
    """

    kind: str
    seed: int
    problem: str


@dataclass(slots=True)
class KindResult:
    """
    What came of the schedules of one kind.

    Attributes:
        count: How many were run.
        seconds: CPU time of all together, without those whose branches were measured.
        timed: How many those seconds are of.
        violated: How many broke a promise.
        measured: Of how many the branches were measured.
    """

    count: int = 0
    seconds: Seconds = 0.0
    timed: int = 0
    violated: int = 0
    measured: int = 0

    def add(self, other: KindResult) -> None:
        """Add a batch."""
        self.count += other.count
        self.seconds += other.seconds
        self.timed += other.timed
        self.violated += other.violated
        self.measured += other.measured


@dataclass(slots=True)
class Night:
    """
    What came of a run.

    Attributes:
        wanted: How many schedules were to be run.
        first: The first seed of each kind.
        workers: How many processes ran them.
        kinds: What came of each kind, by name.
        faults: What was done to clients, network and server: how often.
        suffered: In how many schedules each of them was done.
        slowest: Those that took longest, the slowest first.
        violations: Some of those that broke a promise.
        arcs: The branches that were taken; None if they were not measured.
        seconds: How long the run took.
        cpu_seconds: CPU time of its processes, of all schedules and of measuring branches; 0 where it cannot be told.
        load: Load average of the machine before and after; None if it cannot be told.
    """

    wanted: int
    first: int
    workers: int
    kinds: dict[str, KindResult]
    faults: Counter[str] = field(default_factory=Counter)
    suffered: Counter[str] = field(default_factory=Counter)
    slowest: list[Slow] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    arcs: Arcs | None = None
    seconds: Seconds = 0.0
    cpu_seconds: Seconds = 0.0
    load: tuple[float, float] | None = None

    @property
    def count(self) -> int:
        """How many schedules were run."""
        return sum(kind.count for kind in self.kinds.values())

    @property
    def violated(self) -> int:
        """How many of them broke a promise."""
        return sum(kind.violated for kind in self.kinds.values())

    def add(self, batch: _Result) -> None:
        """Add what came of a batch."""
        self.kinds[batch.kind].add(batch.totals)
        self.faults.update(batch.faults)
        self.suffered.update(batch.suffered)
        self.slowest = heapq.nlargest(SLOWEST_KEPT, [*self.slowest, *batch.slowest])
        kept = sum(violation.kind == batch.kind for violation in self.violations)
        self.violations += batch.violations[: VIOLATIONS_KEPT - kept]
        if batch.arcs is not None:
            self.arcs = batch.arcs if self.arcs is None else self.arcs.joined(batch.arcs)


class _Batch(NamedTuple):
    module: str
    kind: str
    seeds: range
    measured: bool


@dataclass(slots=True)
class _Result:
    kind: str
    totals: KindResult
    faults: Counter[str]
    suffered: Counter[str]
    slowest: list[Slow]
    violations: list[Violation]
    arcs: Arcs | None


# -- the run -----------------------------------------------------------------------------------------------------------


def run(
    module: str,
    count: int,
    *,
    first: int = 0,
    workers: int | None = None,
    measured: float = 0.05,
    only: Sequence[str] = (),
    progress: Callable[[Night], None] | None = None,
) -> Night:
    """Run schedules on all cores. Ctrl-C ends it early: then what was run until then is the result."""
    kinds = [kind for kind in kinds_of(module) if not only or kind.name in only]
    if len(kinds) < len(set(only)) or not kinds:
        message = f"there is no such kind: {', '.join(only)}"
        raise ValueError(message)
    workers = workers or _cores()
    night = Night(count, first, workers, {kind.name: KindResult() for kind in kinds})
    began, load, cpu_began = time.monotonic(), _load(), _children_seconds()
    size = max(1, min(BATCH_MAX, count // (10 * workers * len(kinds))))
    with _Interrupt() as interrupt, ProcessPoolExecutor(workers, get_context("spawn"), _become_worker) as pool:
        pending: set[Future[_Result]] = set()
        for name, seeds, is_measured in _plan(kinds, count, size, measured):
            if interrupt.came:
                break
            shifted = range(first + seeds.start, first + seeds.stop)
            pending.add(pool.submit(_run_batch, _Batch(module, name, shifted, is_measured)))
            while len(pending) >= 2 * workers:
                pending = _collect(pending, night, progress)
        while pending:
            if interrupt.came:
                pending = {future for future in pending if not future.cancel()}  # what runs already is waited for
            if pending:
                pending = _collect(pending, night, progress)
    night.violations.sort()
    night.seconds = time.monotonic() - began
    night.cpu_seconds = _children_seconds() - cpu_began
    night.load = None if load is None else (load, _load() or 0.0)
    return night


def kinds_of(module: str) -> Sequence[Kind]:
    """Load the kinds of a module."""
    kinds: Sequence[Kind] = importlib.import_module(module).KINDS
    return kinds


def _collect(
    pending: set[Future[_Result]], night: Night, progress: Callable[[Night], None] | None
) -> set[Future[_Result]]:
    done, left = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        night.add(future.result())
        if progress is not None:
            progress(night)
    return left


def _plan(kinds: Sequence[Kind], count: int, size: int, measured: float) -> Iterator[tuple[str, range, bool]]:
    """Take the kind next that lags most behind its share; of each, the first batch is measured, and then every n-th."""
    shares = sum(kind.share for kind in kinds)
    wanted = {kind.name: max(1, round(count * kind.share / shares)) for kind in kinds}
    done = dict.fromkeys(wanted, 0)
    every = round(1 / measured) if measured > 0 else 0
    while any(done[name] < wanted[name] for name in wanted):
        name = min(wanted, key=lambda name: done[name] / wanted[name])
        end = min(done[name] + size, wanted[name])
        yield name, range(done[name], end), every > 0 and done[name] // size % every == 0
        done[name] = end


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _children_seconds() -> Seconds:
    """Sum the CPU time of the child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class _Interrupt:
    """
    Notes the first Ctrl-C instead of raising it, which could strike within the pool; the second one raises.

    Attributes:
        came: It was pressed.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, *_: object) -> None:
        self.came = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


# -- in a worker -------------------------------------------------------------------------------------------------------


def _become_worker() -> None:
    """Leave Ctrl-C to the parent, and be quiet: thousands of schedules lose many leases, each with a warning."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_quiet()


def be_quiet() -> None:
    """Do not log what clients lose, nor warn of what schedules drop on purpose."""
    logging.getLogger("lockkit").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", ResourceWarning)


def _run_batch(batch: _Batch) -> _Result:
    (kind,) = (kind for kind in kinds_of(batch.module) if kind.name == batch.kind)
    totals, slowest, violations = KindResult(), [], []
    suffered: Counter[str] = Counter()
    everything: Counter[str] = Counter()
    meter = BranchMeter() if batch.measured else None
    gc.disable()  # see `play_one`
    try:
        with ExitStack() as stack:
            faults = stack.enter_context(Faults())
            if meter is not None:
                stack.enter_context(meter)
            for seed in batch.seeds:
                began = time.process_time()
                problem = play_one(kind, seed)
                seconds = time.process_time() - began
                totals.count += 1
                if meter is None:
                    totals.timed += 1
                    totals.seconds += seconds
                    slowest.append(Slow(seconds, kind.name, seed))
                if problem:
                    totals.violated += 1
                    violations.append(Violation(kind.name, seed, problem))
                counted = faults.take()
                everything.update(counted)
                suffered.update(dict.fromkeys(counted, 1))
    finally:
        gc.enable()
        # What `Faults` still saw when its own schedule was collected would stay: 65 kB for each schedule.
        gc.collect(1)
    if meter is not None:
        totals.measured = totals.count
    slowest = heapq.nlargest(SLOWEST_KEPT, slowest)
    arcs = None if meter is None else meter.arcs
    return _Result(kind.name, totals, everything, suffered, slowest, violations[:VIOLATIONS_KEPT], arcs)


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
        """What is left is killed now: that is no fault."""
        self._ended = True
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
