"""Contention for what several may hold: readers with a writer in between, and the permits of a semaphore."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit.bench.adapters.base import AsyncAdapter, BlockingAdapter
from lockkit.bench.contenders import pause, run_contenders
from lockkit.bench.samples import now_ns
from lockkit.bench.witness import Section, judge_permits, judge_readers
from lockkit.bench.worker_pool import WorkerPool
from lockkit.bench.workloads.base import Figure, Measured, Workload, fresh_name
from lockkit.bench.workloads.contention import longest_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from lockkit.bench.pipe import ParentPipe
    from lockkit.bench.settings import Settings
    from lockkit.bench.subject import Kind, Subject

__all__ = ["Permits", "Readers"]

WRITE_EVERY = 10
"""One turn of so many is a writer's."""

Note = tuple[int, int, int | None, bool]
"""When a section began and ended (ns), its token, and whether it was a writer's."""


@dataclass(frozen=True, slots=True)
class Turns:
    """
    What a contender enters, turn after turn.

    Attributes:
        every: The kind of every turn.
        tenth: The kind of one turn of `WRITE_EVERY`; None: none is different.
        permits: Of a semaphore: how many there are.
    """

    every: Kind
    tenth: Kind | None = None
    permits: int = 1


class _Shared(Workload):
    """Contenders enter what they share, in a loop for ``seconds``."""

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        """See `Workload.measure`."""
        alone = subject.scope == "process"
        name, processes = fresh_name(), settings.processes
        parts = [list(range(processes))] if alone else [[index] for index in range(processes)]
        with WorkerPool(settings.seconds + settings.patience) as pool:
            for indexes in parts:
                part = {
                    "name": name,
                    "indexes": indexes,
                    "seconds": settings.seconds,
                    "permits": _permits(processes),
                }
                pool.start(subject, self.name, part, ttl=settings.ttl)
            start_ns = pool.start_together()
            notes: list[list[Note]] = [contender for result in pool.results() for contender in result["contenders"]]
        return self.judge(notes, start_ns, settings)

    @abstractmethod
    def judge(self, contenders: list[list[Note]], start_ns: int, settings: Settings) -> Measured:
        """Turn what the contenders noted into figures."""

    @abstractmethod
    def turns(self, permits: int) -> Turns:
        """Say what a contender enters."""

    async def work(
        self, adapter: BlockingAdapter | AsyncAdapter, part: Mapping[str, Any], parent: ParentPipe
    ) -> dict[str, Any]:
        """See `Workload.work`."""
        start_ns = (await parent.ready())["start_ns"]
        until_ns = start_ns + int(part["seconds"] * 1e9)
        turns = self.turns(part["permits"])

        alone = len(part["indexes"]) == 1

        def contender(index: int) -> Callable[[], Coroutine[Any, Any, list[Note]]]:
            return lambda: _contend(adapter, part["name"], turns, index, (start_ns, until_ns), alone=alone)

        return {"contenders": await run_contenders(adapter, [contender(index) for index in part["indexes"]])}


class Readers(_Shared):
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
    more_is_faster = True
    ratios = ("turns_per_second",)
    kind = "read"

    def turns(self, permits: int) -> Turns:
        """See `_Shared.turns`."""
        del permits
        return Turns("read", "write")

    def judge(self, contenders: list[list[Note]], start_ns: int, settings: Settings) -> Measured:
        """See `_Shared.judge`."""
        verdict = judge_readers(
            Section(began, ended, token, contender, writes)
            for contender, notes in enumerate(contenders)
            for began, ended, token, writes in notes
        )
        until_ns = start_ns + int(settings.seconds * 1e9)
        in_time = [note for notes in contenders for note in notes if note[1] <= until_ns]
        figures = {
            "turns_per_second": len(in_time) / settings.seconds,
            "writes_per_second": sum(writes for *_, writes in in_time) / settings.seconds,
            "longest_wait_ms": _longest_wait(contenders, start_ns, until_ns),
            "overlaps": verdict.overlaps,
            "sections": verdict.sections,
        }
        return Measured(figures, broken=verdict.broken)


class Permits(_Shared):
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
    more_is_faster = True
    ratios = ("permits_per_second",)
    kind = "permit"

    def turns(self, permits: int) -> Turns:
        """See `_Shared.turns`."""
        return Turns("permit", permits=permits)

    def judge(self, contenders: list[list[Note]], start_ns: int, settings: Settings) -> Measured:
        """See `_Shared.judge`."""
        sections = (
            Section(began, ended, token, contender)
            for contender, notes in enumerate(contenders)
            for began, ended, token, _ in notes
        )
        verdict = judge_permits(sections, _permits(settings.processes))
        until_ns = start_ns + int(settings.seconds * 1e9)
        counts = [sum(note[1] <= until_ns for note in notes) for notes in contenders]
        figures = {
            "permits_per_second": sum(counts) / settings.seconds,
            "longest_wait_ms": _longest_wait(contenders, start_ns, until_ns),
            "excess": verdict.overlaps,
            "sections": verdict.sections,
        }
        if max(counts):
            figures["share"] = min(counts) / max(counts)
        return Measured(figures, broken=verdict.broken, details={"turns": counts})


def _permits(contenders: int) -> int:
    """Give the number of permits for so many contenders: half as many."""
    return max(1, contenders // 2)


def _longest_wait(contenders: list[list[Note]], start_ns: int, until_ns: int) -> float:
    """Give the longest time that a contender was outside, milliseconds."""
    return max(longest_wait([note[:3] for note in notes], start_ns, until_ns) for notes in contenders) / 1e6


async def _contend(
    adapter: BlockingAdapter | AsyncAdapter,
    name: str,
    turns: Turns,
    index: int,
    span_ns: tuple[int, int],
    *,
    alone: bool,
) -> list[Note]:
    """
    Enter and leave until the time is over.

    Args:
        adapter: Whose.
        name: What.
        turns: What to enter.
        index: Number of the contender: not all of them write in the same turn.
        span_ns: When to begin and to end.
        alone: The only contender of this process; see `lockkit.bench.workloads.contention`.
    """
    notes: list[Note] = []
    every: Any = adapter.primitive(turns.every, name, turns.permits)
    tenth: Any = every if turns.tenth is None else adapter.primitive(turns.tenth, name)
    turn, (start_ns, until_ns) = index, span_ns
    await pause(adapter, max(0.0, (start_ns - now_ns()) / 1e9))
    while now_ns() < until_ns:
        turn += 1
        writes = turns.tenth is not None and turn % WRITE_EVERY == 0
        lock = tenth if writes else every
        if isinstance(adapter, AsyncAdapter):
            async with lock as entered:
                began = now_ns()
                if not alone:
                    await pause(adapter, 0)
                ended = now_ns()
        else:
            with lock as entered:
                began = now_ns()
                if not alone:
                    os.sched_yield()
                ended = now_ns()
        notes.append((began, ended, adapter.token(entered), writes))
    return notes
