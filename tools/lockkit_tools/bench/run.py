"""A run: rounds, in which all subjects take turns in random order, whatever some of them do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockkit.units import Instant
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerFailed
from lockkit_tools.bench.workloads.base import Measured, Workload

Status = Literal["ok", "broken", "failed", "skipped", "pending"]


@dataclass(slots=True)
class Cell:
    """
    One subject in one workload.

    Attributes:
        rounds: What each round gave, by its number from 0 on; a round that failed is left out.
        skipped: Why it is not measured at all; empty if it is.
        failed: How it failed; empty if it did not.
        turns: The numbers of the rounds in which its turn has come.
    """

    subject: Subject
    workload: Workload
    rounds: dict[int, Measured] = field(default_factory=dict)
    skipped: str = ""
    failed: str = ""
    turns: set[int] = field(default_factory=set)

    @property
    def broken(self) -> str:
        """How exclusion was broken here; empty if it was not."""
        return next((measured.broken for measured in self.rounds.values() if measured.broken), "")

    @property
    def status(self) -> Status:
        """What came of it; ``pending`` if its turn never came."""
        if self.skipped:
            return "skipped"
        if self.broken:
            return "broken"
        if self.failed:
            return "failed"
        return "ok" if self.rounds else "pending"


@dataclass(slots=True)
class Outcome:
    """
    What there is after a run.

    Attributes:
        cells: Workload by workload, subjects in the order given.
        interrupted: It was ended before its end.
        out_of_time: It reached its limit before its end.
    """

    cells: list[Cell]
    settings: Settings
    seed: int
    interrupted: bool = False
    out_of_time: bool = False

    def broken(self, subject: Subject) -> str:
        """How the subject broke exclusion in any workload; empty if it did not."""
        return next((cell.broken for cell in self.cells if cell.subject == subject and cell.broken), "")


class Run:
    """
    Measures.

    Args:
        workloads: What, in this order in every round.
        seed: Decides the order of the subjects.
    """

    def __init__(
        self, subjects: Sequence[Subject], workloads: Sequence[Workload], settings: Settings, *, seed: int
    ) -> None:
        self._random = random.Random(seed)
        cells = [Cell(subject, workload) for workload in workloads for subject in subjects]
        for cell in cells:
            cell.skipped = cell.workload.inapplicable(cell.subject) or cell.subject.missing
        self.outcome = Outcome(cells, settings, seed)
        self.over = {workload.name: 0 for workload in workloads}
        self._workloads = workloads

    @property
    def turns(self) -> int:
        """How many turns there are at the most."""
        return sum(self.turns_by_workload.values())

    @property
    def turns_by_workload(self) -> dict[str, int]:
        """How many turns each workload has at the most; how many of them are over says `over`."""
        turns = dict.fromkeys(self.over, 0)
        for cell in self.outcome.cells:
            turns[cell.workload.name] += 0 if cell.skipped else self._rounds(cell.workload)
        return turns

    def go(self, progress: Callable[[Cell, int], None]) -> Outcome:
        """
        Measure everything; after Ctrl-C, what there was time for.

        The processes that workers are forked from stay for the next run of this process, and end with it.
        """
        began, limit = time.monotonic(), self.outcome.settings.limit
        try:
            for number in range(self.outcome.settings.rounds):
                for position, workload in enumerate(self._workloads, 1):
                    # In the first round each workload has its share of the time, or a slow machine would spend all of
                    # it on the first one.
                    share = position / len(self._workloads) if number == 0 else 1.0
                    until = float("inf") if limit is None else began + share * limit
                    self._round(workload, number, until, progress)
                if number == 0 and limit is not None:
                    # Those that the shares left out: each is measured once before any is measured twice.
                    for workload in self._workloads:
                        self._round(workload, number, began + limit, progress)
            self.outcome.out_of_time = sum(self.over.values()) < self.turns
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        return self.outcome

    def _round(self, workload: Workload, number: int, until: Instant, progress: Callable[[Cell, int], None]) -> None:
        if number >= self._rounds(workload):
            return
        cells = [
            cell
            for cell in self.outcome.cells
            if cell.workload is workload and not cell.skipped and number not in cell.turns
        ]
        # A new order each time: who comes after whom, and when, must not be the same for one of them.
        self._random.shuffle(cells)
        for first in range(0, len(cells), workload.together):
            if time.monotonic() > until:
                return
            batch = cells[first : first + workload.together]
            progress(batch[0], sum(self.over.values()))
            for cell in batch:
                cell.turns.add(number)
            # Whatever one that failed waited for then, it would wait for again.
            self._turns([cell for cell in batch if not cell.failed], number)
            self.over[workload.name] += len(batch)

    def _turns(self, cells: Sequence[Cell], number: int) -> None:
        if not cells:
            return
        workload = cells[0].workload
        if workload.together > 1:
            results = workload.measure_together([cell.subject for cell in cells], self.outcome.settings)
        else:
            results = [self._measure(cell) for cell in cells]
        for cell, result in zip(cells, results, strict=True):
            if isinstance(result, Exception):
                cell.failed = str(result) or type(result).__name__
            else:
                cell.rounds[number] = result

    def _measure(self, cell: Cell) -> Measured | WorkerFailed | OSError:
        try:
            return cell.workload.measure(cell.subject, self.outcome.settings)
        except (WorkerFailed, OSError) as error:
            return error

    def _rounds(self, workload: Workload) -> int:
        settings = self.outcome.settings
        return min(settings.rounds, settings.rounds_max_long) if workload.long else settings.rounds
