"""The sweep: contention by one process, two, four, …: does a lock keep its pace, and stay fair, as the crowd grows?"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lockkit_tools.bench.settings import CONTENDERS, Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload
from lockkit_tools.bench.workloads.contention import Contention

_CONTENTION = Contention()


class Sweep(Workload):
    """`Contention`, once for each number of contenders."""

    name = "sweep"
    title = "Contention by 1 to 16 processes"
    explains = (
        "Critical sections per second of all contenders together, and the fairness, as the number of contenders grows. "
        "A lock that serves waiters in order keeps its pace and a fairness near 1; where pairs rise while the fairness "
        "falls, one contender monopolises the lock."
    )
    silent = "With more processes than cores the figures also reflect the operating system's scheduler."
    figures: ClassVar[tuple[Figure, ...]] = (
        *(Figure(f"pairs_{count}", f"pairs/s by {count}", digits=0) for count in CONTENDERS),
        *(Figure(f"share_{count}", f"fairness by {count}", digits=2) for count in CONTENDERS[1:]),
        Figure("overlaps", "overlaps", "sum", 0),
    )
    headline = f"pairs_{CONTENDERS[-1]}"
    more_is_faster = True
    ratios = (f"pairs_{CONTENDERS[-1]}",)
    long = True

    def inapplicable(self, subject: Subject) -> str:
        """Every subject that can contend can do it in any number."""
        return _CONTENTION.inapplicable(subject)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        figures: dict[str, float] = {"overlaps": 0}
        broken = ""
        for count in settings.contenders:
            measured = _CONTENTION.measure(subject, replace(settings, processes=count))
            figures[f"pairs_{count}"] = measured.figures["pairs_per_second"]
            if count > 1 and "share" in measured.figures:
                figures[f"share_{count}"] = measured.figures["share"]
            figures["overlaps"] += measured.figures["overlaps"]
            broken = broken or measured.broken
        return Measured(figures, broken=broken)
