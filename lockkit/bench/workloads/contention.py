"""Contention: several processes want one lock all the time, and a witness looks whether two were inside at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit.bench.adapters.base import AsyncAdapter, BlockingAdapter
from lockkit.bench.contenders import pause, run_contenders
from lockkit.bench.samples import now_ns
from lockkit.bench.witness import Section, judge
from lockkit.bench.worker_pool import WorkerPool
from lockkit.bench.workloads.base import Figure, Measured, Workload, fresh_name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from lockkit.bench.pipe import ParentPipe
    from lockkit.bench.settings import Settings
    from lockkit.bench.subject import Subject

__all__ = ["Contention", "longest_wait"]

Note = tuple[int, int, int | None]
"""When a section began and ended (ns), and its token."""


class Contention(Workload):
    """``processes`` contenders enter one lock in a loop for ``seconds``."""

    name = "contention"
    title = "Contention for one lock"
    explains = (
        "Critical sections per second of all contenders together, the fairness (least-served \N{DIVISION SIGN} "
        "most-served contender), and the longest wait. Read all three: a lock that polls looks fast when one process "
        "keeps retaking the lock that it has just released while the others starve. Overlaps count critical sections "
        "that ran at the same time, as seen by a witness outside the backend."
    )
    silent = "The critical sections are empty: with work of some milliseconds, the hand-off time matters more."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("pairs_per_second", "pairs/s", digits=0),
        Figure("share", "fairness", digits=3),
        Figure("longest_wait_ms", "longest wait ms", "max", 0),
        Figure("jain", "Jain's index", digits=3, shown=False),
        Figure("overlaps", "overlaps", "sum", 0),
        Figure("starved", "contenders without a turn", "max", 0, shown=False),
        Figure("sections", "sections seen", "sum", 0, shown=False),
    )
    headline = "pairs_per_second"
    more_is_faster = True
    ratios = ("pairs_per_second",)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        """See `Workload.measure`."""
        alone = subject.scope == "process"
        contenders = settings.processes if alone else 1
        part = {"name": fresh_name(), "contenders": contenders, "seconds": settings.seconds}
        with WorkerPool(settings.seconds + settings.patience) as pool:
            count = 1 if alone else settings.processes
            for _ in range(count):
                pool.start(subject, self.name, part, ttl=settings.ttl)
            start_ns = pool.start_together()
            notes: list[list[Note]] = [contender for result in pool.results() for contender in result["contenders"]]
        return _measured(notes, start_ns, settings.seconds)

    async def work(
        self, adapter: BlockingAdapter | AsyncAdapter, part: Mapping[str, Any], parent: ParentPipe
    ) -> dict[str, Any]:
        """See `Workload.work`."""
        start_ns = (await parent.ready())["start_ns"]
        until_ns = start_ns + int(part["seconds"] * 1e9)

        def contender() -> Coroutine[Any, Any, list[Note]]:
            return _contend(adapter, part["name"], start_ns, until_ns, alone=part["contenders"] == 1)

        contenders: list[Callable[[], Coroutine[Any, Any, list[Note]]]] = [contender] * part["contenders"]
        return {"contenders": await run_contenders(adapter, contenders)}


async def _contend(
    adapter: BlockingAdapter | AsyncAdapter, name: str, start_ns: int, until_ns: int, *, alone: bool
) -> list[Note]:
    """
    Enter and leave until the time is over.

    Args:
        adapter: Whose lock.
        name: The lock.
        start_ns: When to begin.
        until_ns: When to end.
        alone: The only contender of this process. The others are threads or tasks here, and must get a chance to
            intrude: in one interpreter a section that does nothing would never be interrupted.
    """
    notes: list[Note] = []
    await pause(adapter, max(0.0, (start_ns - now_ns()) / 1e9))
    if isinstance(adapter, AsyncAdapter):
        async_lock = adapter.lock(name)
        while now_ns() < until_ns:
            async with async_lock as entered:
                began = now_ns()
                if not alone:
                    await pause(adapter, 0)
                ended = now_ns()
            notes.append((began, ended, adapter.token(entered)))
    else:
        lock = adapter.lock(name)
        while now_ns() < until_ns:
            with lock as entered:
                began = now_ns()
                if not alone:
                    os.sched_yield()
                ended = now_ns()
            notes.append((began, ended, adapter.token(entered)))
    return notes


def _measured(contenders: list[list[Note]], start_ns: int, seconds: float) -> Measured:
    verdict = judge(Section(*note, contender) for contender, notes in enumerate(contenders) for note in notes)
    # All sections are judged, but only those that ended in time are counted: a late one says more about the end.
    until_ns = start_ns + int(seconds * 1e9)
    counts = [sum(note[1] <= until_ns for note in notes) for notes in contenders]
    figures: dict[str, float] = {
        "pairs_per_second": sum(counts) / seconds,
        "overlaps": verdict.overlaps,
        "longest_wait_ms": max(longest_wait(notes, start_ns, until_ns) for notes in contenders) / 1e6,
        "starved": counts.count(0),
        "sections": verdict.sections,
    }
    if max(counts):
        figures["share"] = min(counts) / max(counts)
        # (Σx)² / (n·Σx²), Jain, Chiu, Hawe 1984: 1 when all got the same, 1/n when one got everything.
        figures["jain"] = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    return Measured(figures, broken=verdict.broken, details={"turns": counts})


def longest_wait(notes: list[Note], start_ns: int, until_ns: int) -> int:
    """Give the longest time that a contender was outside, from the common start to the common end."""
    outside_since, longest = start_ns, 0
    for began, ended, _ in notes:
        longest = max(longest, began - outside_since)
        outside_since = ended
    return max(longest, until_ns - outside_since)
