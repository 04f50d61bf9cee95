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
from lockkit_tools.bench.workloads.base import Measured, Workload

Status = Literal["ok", "broken", "failed", "skipped", "pending"]


@dataclass(slots=True)
class Cell:
    """One subject in one workload."""

    subject: Subject
    workload: Workload
    # What each round gave, by its number from 0 on; a round that failed is left out.
    rounds: dict[int, Measured] = field(default_factory=dict)
    skipped: str = ""  # why it is not measured at all; empty if it is
    failed: str = ""  # how it failed; empty if it did not
    turns: set[int] = field(default_factory=set)  # the numbers of the rounds in which its turn has come

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
    """What there is after a run."""

    cells: list[Cell]  # workload by workload, subjects in the order given
    settings: Settings
    seed: int
    interrupted: bool = False  # it was ended before its end
    out_of_time: bool = False  # it reached its limit before its end

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
        self._over = 0
        self._workloads = workloads

    @property
    def turns(self) -> int:
        """How many turns there are at the most."""
        return sum(self._rounds(cell.workload) for cell in self.outcome.cells if not cell.skipped)

    def go(self, progress: Callable[[Cell, int], None]) -> Outcome:
        """
        Measure everything; after Ctrl-C, what there was time for.

        The processes that workers are forked from stay for the next run of this process, and end with it.
        """
        began, limit = time.monotonic(), self.outcome.settings.limit
        end = float("inf") if limit is None else began + limit
        try:
            for number in range(self.outcome.settings.rounds):
                for position, workload in enumerate(self._workloads, 1):
                    # In the first round each workload has its share of the time, or a slow machine would spend all of
                    # it on the first one.
                    share = position / len(self._workloads) if number == 0 and limit is not None else 1.0
                    self._round(workload, number, end if limit is None else began + share * limit, progress)
                if number == 0:
                    # Those that the shares left out: each is measured once before any is measured twice.
                    for workload in self._workloads:
                        self._round(workload, number, end, progress)
            self.outcome.out_of_time = self._over < self.turns
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        return self.outcome

    def _round(self, workload: Workload, number: int, until: Instant, progress: Callable[[Cell, int], None]) -> None:
        if number >= self._rounds(workload):
            return
        mine = [cell for cell in self.outcome.cells if cell.workload is workload]
        cells = [cell for cell in mine if not cell.skipped and number not in cell.turns]
        # A new order each time: who comes after whom, and when, must not be the same for one of them.
        self._random.shuffle(cells)
        for first in range(0, len(cells), workload.together):
            if time.monotonic() > until:
                return
            batch = cells[first : first + workload.together]
            progress(batch[0], self._over)
            for cell in batch:
                cell.turns.add(number)
            # Whatever one that failed waited for then, it would wait for again.
            if able := [cell for cell in batch if not cell.failed]:
                results = workload.measure_together([cell.subject for cell in able], self.outcome.settings)
                for cell, result in zip(able, results, strict=True):
                    if isinstance(result, Measured):
                        cell.rounds[number] = result
                    else:
                        cell.failed = str(result) or type(result).__name__
            self._over += len(batch)

    def _rounds(self, workload: Workload) -> int:
        settings = self.outcome.settings
        return min(settings.rounds, settings.rounds_max_long) if workload.long else settings.rounds
