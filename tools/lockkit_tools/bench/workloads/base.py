"""What a workload is."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Kind, Subject
from lockkit_tools.bench.worker_pool import WorkerFailed, WorkerPool

_WORDS: Mapping[Kind, str] = MappingProxyType(
    {
        "lock": "lock",
        "read": "read lock",
        "write": "write lock",
        "permit": "semaphore",
        "locks": "lock of several names",
        "election": "election",
        "once": "record of what is done",
    }
)

Combine = Literal["min", "median", "max", "sum"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a workload measures."""

    key: str
    title: str
    combine: Combine = "median"  # what becomes of the rounds
    digits: int = 1
    shown: bool = True


@dataclass(slots=True)
class Measured:
    """What one turn gave."""

    figures: dict[str, float]  # by `Figure.key`; what could not be measured is left out
    broken: str = ""  # how the subject broke exclusion; empty if it did not
    note: str = ""  # what else a reader must know
    details: dict[str, Any] = field(default_factory=dict)


class Workload(ABC):
    """Something that is measured alike for every subject."""

    name: ClassVar[str]  # on the command line and in results
    title: ClassVar[str]
    explains: ClassVar[str]  # what the figures say. One to three sentences.
    silent: ClassVar[str]  # what they do not say. A sentence.
    figures: ClassVar[tuple[Figure, ...]]
    headline: ClassVar[str]  # the figure by which subjects are compared
    ratios: ClassVar[tuple[str, ...]] = ()  # the figures of which ratios to other subjects are taken, within each round
    more_is_faster: ClassVar[bool] = False  # of the headline figure, as of a rate; of a time less is
    kind: ClassVar[Kind] = "lock"  # the primitive that it uses
    long: ClassVar[bool] = False  # takes long each time, so it gets fewer rounds
    together: ClassVar[int] = 1  # how many subjects may be measured at the same time, because they do little but wait

    def inapplicable(self, subject: Subject) -> str:
        """Say why it makes no sense for a subject; empty if it does."""
        if self.kind not in subject.kinds:
            return subject.lacks.get(self.kind) or f"{subject.label} has no {_WORDS[self.kind]}"
        if self.kind == "lock" and subject.workloads is not None and self.name not in subject.workloads:
            return f"{subject.label} is there for {', '.join(subject.workloads)}"
        return ""

    @abstractmethod
    def measure(self, subject: Subject, settings: Settings) -> Measured:
        """Measure once. Runs in the process of the command; starts the processes that lock."""

    def measure_alone(self, subject: Subject, settings: Settings, part: Mapping[str, Any]) -> dict[str, Any]:
        """Have one process do its part, and give its result."""
        with WorkerPool(settings.seconds + settings.patience) as pool:
            worker = pool.start(subject, self.name, part, ttl=settings.ttl)
            worker.ready()
            worker.go()
            return worker.result()

    def measure_together(
        self, subjects: Sequence[Subject], settings: Settings
    ) -> list[Measured | WorkerFailed | OSError]:
        """Measure up to `together` of them at the same time: what each gave, or how it failed."""
        results: list[Measured | WorkerFailed | OSError] = []
        for subject in subjects:
            try:
                results.append(self.measure(subject, settings))
            except (WorkerFailed, OSError) as error:
                results.append(error)
        return results

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        """Do the part of one process. Must not block an event loop that it runs in."""
        raise NotImplementedError


def fresh_name() -> str:
    """Give a lock name that nobody uses: what one turn leaves behind cannot disturb another."""
    return f"lockkit-bench-{secrets.token_hex(6)}"
