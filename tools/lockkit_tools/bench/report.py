"""From what was measured to figures and ratios: for a table, for a page, and for JSON, which can be read back."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lockkit_tools.bench.run import Cell, Outcome, Status
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.bench.workloads.base import Measured, Workload

FASTER_MIN = 1.15
"""A subject this many times as fast as its baseline is suspect. Ratios repeat to within about 15 %: with less, some are
suspect by chance; with more, a baseline that is no baseline stays unnoticed."""

SCHEMA = 1
"""Of the JSON. Raised when a reader of the former one would misread it."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One subject's figure divided by another's."""

    median: float
    lowest: float
    highest: float
    rounds: list[float]  # one for each round in which both were measured

    @classmethod
    def of(cls, figure: str, one: Cell, other: Cell) -> Ratio | None:
        """Compare two cells of one workload, round by round; None if no round has both."""
        pairs = [
            (measured.figures.get(figure), other.rounds[number].figures.get(figure))
            for number, measured in sorted(one.rounds.items())
            if number in other.rounds
        ]
        ratios = [mine / its for mine, its in pairs if mine is not None and its]
        if not ratios:
            return None
        return cls(statistics.median(ratios), min(ratios), max(ratios), ratios)

    def __str__(self) -> str:
        """Give the median, and the lowest and the highest round where they were several."""
        digits = 2 if self.median < 10 else 0
        middle = f"{self.median:.{digits}f}"
        if len(self.rounds) < 2:
            return middle
        return f"{middle} ({self.lowest:.{digits}f}\N{EN DASH}{self.highest:.{digits}f})"


@dataclass(slots=True)
class Row:
    """One subject in one workload."""

    subject: Subject
    status: Status
    reason: str  # why, unless it is ``ok``
    figures: dict[str, float]  # over all rounds, by `Figure.key`
    # By figure, then by the key of the subject that it was divided by.
    ratios: dict[str, dict[str, Ratio]] = field(default_factory=dict)
    baseline: str | None = None  # key of the baseline of its face and URL, or None
    notes: list[str] = field(default_factory=list)  # what else a reader must know
    # Why its headline figure must not be believed before it is understood; empty if there is no reason.
    suspect: str = ""

    def over_baseline(self, workload: Workload) -> Ratio | None:
        """Give the headline figure as a multiple of the baseline's."""
        return self.ratios.get(workload.headline, {}).get(self.baseline or "")

    @property
    def shown(self) -> bool:
        """Whether it was measured, or failed."""
        return self.status not in {"skipped", "pending"}

    @property
    def label(self) -> str:
        """Name the subject, also where its URL was given twice."""
        return self.subject.label + (f" #{self.subject.number}" if self.subject.number > 1 else "")


@dataclass(slots=True)
class Section:
    """One workload, and its rows in the order of the subjects."""

    workload: Workload
    rows: list[Row]
    rounds: list[dict[str, Any]]

    def ours(self, row: Row) -> Row | None:
        """Find lockkit's row on the same backend and API."""
        place = row.subject.group, row.subject.face
        ours = (one for one in self.rows if one.subject.role == "lockkit" and one.subject.number == 1 and one.shown)
        return next((one for one in ours if (one.subject.group, one.subject.face) == place), None)


class Report:
    """
    Everything that a reader gets.

    Args:
        about: Machine, versions, command: goes to JSON as it is.
    """

    def __init__(self, outcome: Outcome, about: Mapping[str, Any]) -> None:
        self.outcome = outcome
        self.about = about
        workloads = dict.fromkeys(cell.workload for cell in outcome.cells)
        self.sections = [self._section(workload) for workload in workloads]

    @property
    def broken(self) -> list[Subject]:
        """Who broke exclusion."""
        found = dict.fromkeys(cell.subject for cell in self.outcome.cells if cell.broken)
        return list(found)

    def to_json(self) -> dict[str, Any]:
        """Give all of it, without passwords."""
        return {
            "schema": SCHEMA,
            **self.about,
            "interrupted": self.outcome.interrupted,
            "out_of_time": self.outcome.out_of_time,
            "seed": self.outcome.seed,
            "settings": asdict(self.outcome.settings),
            "subjects": [subject.to_json() for subject in dict.fromkeys(cell.subject for cell in self.outcome.cells)],
            "workloads": [_section_json(section) for section in self.sections],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_json` back, as from a file. What follows from the rounds (figures, ratios) is worked out anew."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a report of schema {SCHEMA} is wanted, this is {data.get('schema')}: measure again")
        subjects = {entry["key"]: Subject.from_json(entry) for entry in data["subjects"]}
        cells = [cell for section in data["workloads"] for cell in _cells(section, subjects)]
        outcome = Outcome(
            cells, Settings.from_json(data["settings"]), data["seed"], data["interrupted"], data["out_of_time"]
        )
        return cls(outcome, {key: data[key] for key in data.keys() - _OF_THE_OUTCOME})

    def _section(self, workload: Workload) -> Section:
        cells = [cell for cell in self.outcome.cells if cell.workload is workload]
        rows = [self._row(cell, cells) for cell in cells]
        rounds = [
            {"subject": cell.subject.key, "round": number, **asdict(measured)}
            for cell in cells
            for number, measured in sorted(cell.rounds.items())
        ]
        return Section(workload, rows, rounds)

    def _row(self, cell: Cell, cells: Sequence[Cell]) -> Row:
        status, reason = cell.status, cell.skipped or cell.broken or cell.failed
        elsewhere = self.outcome.broken(cell.subject)
        if status == "ok" and elsewhere:
            # However fast it is: it is no lock.
            status, reason = "broken", elsewhere
        row = Row(cell.subject, status, reason, _combined(cell))
        row.notes = list(dict.fromkeys(measured.note for measured in cell.rounds.values() if measured.note))
        if status == "failed" and cell.rounds:
            row.notes.append(f"figures of the {len(cell.rounds)} rounds before it failed")
        comparable = [other for other in cells if self._comparable(cell, other)] if status == "ok" else []
        for figure in cell.workload.ratios:
            ratios = {other.subject.key: Ratio.of(figure, cell, other) for other in comparable}
            row.ratios[figure] = {key: ratio for key, ratio in ratios.items() if ratio is not None}
        row.baseline = _baseline(cell, comparable)
        row.suspect = _suspect(cell.workload, row)
        return row

    def _comparable(self, cell: Cell, other: Cell) -> bool:
        return (
            other is not cell
            and other.subject.group == cell.subject.group
            and other.status == "ok"
            and not self.outcome.broken(other.subject)
        )


def _baseline(cell: Cell, comparable: Sequence[Cell]) -> str | None:
    baselines = [other.subject for other in comparable if other.subject.role == "baseline"]
    if cell.subject.role == "baseline" or not baselines:
        return None
    # An asyncio subject without a baseline of its own is compared with the blocking one: the least that is possible.
    same_face = [baseline for baseline in baselines if baseline.face == cell.subject.face]
    return (same_face or baselines)[0].key


def _suspect(workload: Workload, row: Row) -> str:
    """Say that a subject is faster than its baseline, in every round and by more than what does not repeat."""
    ratio = row.over_baseline(workload)
    if ratio is None or ratio.lowest <= 0:
        return ""
    # How many times as fast, in the worst round and in the middle one.
    if workload.more_is_faster:
        slowest, median = ratio.lowest, ratio.median
    else:
        slowest, median = 1 / ratio.highest, 1 / ratio.median
    return f"{median:.2f} times as fast as its baseline" if slowest > 1 and median > FASTER_MIN else ""


_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "sum": sum,
    "median": statistics.median,
}


def _combined(cell: Cell) -> dict[str, float]:
    """Combine the rounds of each figure."""
    values = {
        figure: [measured.figures[figure.key] for measured in cell.rounds.values() if figure.key in measured.figures]
        for figure in cell.workload.figures
    }
    return {figure.key: _COMBINE[figure.combine](found) for figure, found in values.items() if found}


_OF_THE_OUTCOME = frozenset({"schema", "interrupted", "out_of_time", "seed", "settings", "subjects", "workloads"})
"""Keys of the JSON. All others are what the report tells about the run."""


def _cells(section: Mapping[str, Any], subjects: Mapping[str, Subject]) -> list[Cell]:
    """Read what `_section_json` wrote: the cells of one workload."""
    cells = {
        result["subject"]: Cell(
            subjects[result["subject"]],
            WORKLOADS[section["name"]],
            skipped=result["reason"] if result["status"] == "skipped" else "",
            failed=result["reason"] if result["status"] == "failed" else "",
        )
        for result in section["results"]
    }
    for entry in section["rounds"]:
        measured = {name: value for name, value in entry.items() if name not in {"subject", "round"}}
        cells[entry["subject"]].rounds[entry["round"]] = Measured(**measured)
    return list(cells.values())


def _section_json(section: Section) -> dict[str, Any]:
    workload = section.workload
    return {
        "name": workload.name,
        "title": workload.title,
        "explains": workload.explains,
        "figures": [asdict(figure) for figure in workload.figures],
        "results": [{**asdict(row), "subject": row.subject.key} for row in section.rows],
        "rounds": section.rounds,
    }
