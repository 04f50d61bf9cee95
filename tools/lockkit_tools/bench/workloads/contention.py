"""Contention: several processes want the same all the time; a witness sees whether too many are inside at once."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, enter, leave, now_ns, pause, run_contenders
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.witness import Section, Verdict, judge
from lockkit_tools.bench.worker_pool import WorkerPool
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name

Turn = tuple[Any, bool]
"""What a contender enters, and whether that excludes all others."""

Note = tuple[int, int, int | None, bool]
"""When a section began and ended (ns), its token, and whether it excludes all others."""


class Contended(Workload):
    """``processes`` contenders enter and leave in a loop for ``seconds``."""

    more_is_faster = True

    @abstractmethod
    def turns(self, adapter: Adapter, name: str, index: int, contenders: int) -> list[Turn]:
        """Say what a contender enters, turn after turn, and then again from the first one."""

    @abstractmethod
    def judge(self, sections: Iterable[Section], contenders: int) -> Verdict:
        """Say what the sections of so many contenders show."""

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        alone = subject.scope == "process"
        name, contenders = fresh_name(), settings.processes
        parts = [list(range(contenders))] if alone else [[index] for index in range(contenders)]
        with WorkerPool(settings.seconds + settings.patience) as pool:
            for indexes in parts:
                part = {"name": name, "indexes": indexes, "contenders": contenders, "seconds": settings.seconds}
                pool.start(subject, self.name, part, ttl=settings.ttl)
            start_ns = pool.start_together()
            notes: list[list[Note]] = [contender for result in pool.results() for contender in result["contenders"]]
        return self._measured(notes, start_ns, settings.seconds)

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        # Some connect here, and some with their first lock: that is not measured.
        turns = [self.turns(adapter, part["name"], index, part["contenders"]) for index in part["indexes"]]
        ((lock, _), *_) = self.turns(adapter, fresh_name(), part["indexes"][0], part["contenders"])
        await enter(adapter, lock)
        await leave(adapter, lock)
        start_ns = (await parent.ready())["start_ns"]
        until_ns = start_ns + int(part["seconds"] * 1e9)
        contend = partial(_contend, start_ns=start_ns, until_ns=until_ns, alone=len(turns) == 1)
        return {"contenders": await run_contenders(adapter, [partial(contend, adapter, each) for each in turns])}

    def _measured(self, contenders: list[list[Note]], start_ns: int, seconds: float) -> Measured:
        verdict = self.judge(
            (
                Section(began, ended, token, contender, writes)
                for contender, notes in enumerate(contenders)
                for began, ended, token, writes in notes
            ),
            len(contenders),
        )
        # All sections are judged, but only those that ended in time are counted: a late one says more about the end.
        until_ns = start_ns + int(seconds * 1e9)
        in_time = [[note for note in notes if note[1] <= until_ns] for notes in contenders]
        counts = [len(notes) for notes in in_time]
        found: dict[str, float] = {
            self.headline: sum(counts) / seconds,
            "writes_per_second": sum(writes for notes in in_time for *_, writes in notes) / seconds,
            "longest_wait_ms": max(longest_wait(notes, start_ns, until_ns) for notes in contenders) / 1e6,
            "overlaps": verdict.overlaps,
            "excess": verdict.overlaps,
            "starved": counts.count(0),
            "sections": verdict.sections,
        }
        if max(counts):
            found["share"] = min(counts) / max(counts)
            # (Σx)² / (n·Σx²), Jain, Chiu, Hawe 1984: 1 when all got the same, 1/n when one got everything.
            found["jain"] = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
        figures = {figure.key: found[figure.key] for figure in self.figures if figure.key in found}
        return Measured(figures, broken=verdict.broken, details={"turns": counts})


class Contention(Contended):
    """One lock."""

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
    ratios = ("pairs_per_second",)

    def turns(self, adapter: Adapter, name: str, index: int, contenders: int) -> list[Turn]:
        del index, contenders
        return [(adapter.lock(name), True)]

    def judge(self, sections: Iterable[Section], contenders: int) -> Verdict:
        del contenders
        return judge(sections)


async def _contend(adapter: Adapter, turns: Sequence[Turn], start_ns: int, until_ns: int, *, alone: bool) -> list[Note]:
    """Enter and leave until the time is over."""
    notes: list[Note] = []
    await pause(adapter, max(0.0, (start_ns - now_ns()) / 1e9))
    # The loop is written twice: code shared by the sync and async APIs would be measured with them.
    if adapter.face == "asyncio":
        for lock, writes in cycle(turns):
            if now_ns() >= until_ns:
                break
            async with lock as entered:
                began = now_ns()
                if not alone:
                    await pause(adapter, 0)
                ended = now_ns()
            notes.append((began, ended, adapter.token(entered), writes))
    else:
        for lock, writes in cycle(turns):
            if now_ns() >= until_ns:
                break
            with lock as entered:
                began = now_ns()
                if not alone:
                    os.sched_yield()
                ended = now_ns()
            notes.append((began, ended, adapter.token(entered), writes))
    return notes


def longest_wait(notes: Iterable[Note], start_ns: int, until_ns: int) -> int:
    """Give the longest time that a contender was outside, from the common start to the common end."""
    outside_since, longest = start_ns, 0
    for began, ended, *_ in notes:
        longest = max(longest, began - outside_since)
        outside_since = ended
    return max(longest, until_ns - outside_since)
