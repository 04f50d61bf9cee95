"""Contention for what several may hold: readers with a writer in between, and the permits of a semaphore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.witness import Section, Verdict, judge, judge_permits
from lockkit_tools.bench.workloads.base import Figure
from lockkit_tools.bench.workloads.contention import Contended, Turn

WRITE_EVERY = 10
"""One turn of so many is a writer's."""


class Readers(Contended):
    """Readers, of whom each writes in one turn of ten."""

    name = "readers"
    title = f"Contended readers, one turn in {WRITE_EVERY} a writer's"
    explains = (
        "Critical sections per second of all contenders together, and the longest time for which a contender stayed "
        "outside. Overlaps count writers that were inside together with anybody, as seen by a witness outside the "
        "backend; readers may overlap. Read all three: a lock that always lets readers in first looks fast while its "
        "writers starve."
    )
    silent = "The critical sections are empty: readers gain more where they stay inside for longer."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("turns_per_second", "turns/s", digits=0),
        Figure("writes_per_second", "writes/s", digits=0),
        Figure("longest_wait_ms", "longest wait ms", "max", 0),
        Figure("overlaps", "overlaps", "sum", 0),
        Figure("sections", "sections seen", "sum", 0, shown=False),
    )
    headline = "turns_per_second"
    ratios = ("turns_per_second",)
    kind = "read"

    def turns(self, adapter: Adapter, name: str, index: int, contenders: int) -> list[Turn]:
        """See `Contended.turns`. Not all of them write in the same turn."""
        del contenders
        read, write = adapter.primitive("read", name), adapter.primitive("write", name)
        numbers = range(index + 1, index + 1 + WRITE_EVERY)
        return [(write, True) if number % WRITE_EVERY == 0 else (read, False) for number in numbers]

    def judge(self, sections: Iterable[Section], contenders: int) -> Verdict:
        del contenders
        return judge(sections)


class Permits(Contended):
    """Twice as many contenders as there are permits."""

    name = "permits"
    title = "Contention for the permits of a semaphore"
    explains = (
        "Permits per second of all contenders together, who are twice as many as the permits (8 for 4 by default), the "
        "fairness (least-served \N{DIVISION SIGN} most-served contender), and the longest wait. Excess counts critical "
        "sections that began while all permits were held, as seen by a witness outside the backend."
    )
    silent = "The critical sections are empty: with work of some milliseconds, the time of a hand-off matters more."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("permits_per_second", "permits/s", digits=0),
        Figure("share", "fairness", digits=3),
        Figure("longest_wait_ms", "longest wait ms", "max", 0),
        Figure("excess", "excess", "sum", 0),
        Figure("sections", "sections seen", "sum", 0, shown=False),
    )
    headline = "permits_per_second"
    ratios = ("permits_per_second",)
    kind = "permit"

    def turns(self, adapter: Adapter, name: str, index: int, contenders: int) -> list[Turn]:
        del index
        return [(adapter.primitive("permit", name, _permits(contenders)), False)]

    def judge(self, sections: Iterable[Section], contenders: int) -> Verdict:
        return judge_permits(sections, _permits(contenders))


def _permits(contenders: int) -> int:
    """Give the number of permits for so many contenders: half as many."""
    return max(1, contenders // 2)
