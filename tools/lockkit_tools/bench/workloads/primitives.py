"""What the primitives beyond one lock cost without contention, and how long an office is vacant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, spread
from lockkit_tools.bench.workloads.base import Figure
from lockkit_tools.bench.workloads.handoff import Handoff
from lockkit_tools.bench.workloads.pair import Pair, time_pairs

NAMES = (2, 10)
"""How many locks are taken at once."""


class Read(Pair):
    """`Pair` with the read side of a read/write lock."""

    name = "read"
    title = "Uncontended read lock"
    explains = "What a read lock costs without contention, from acquire to release. Compare it with a pair."
    silent = "It says nothing about readers that meet writers: see the contended readers."
    kind = "read"


class Write(Pair):
    """`Pair` with the write side of a read/write lock."""

    name = "write"
    title = "Uncontended write lock"
    explains = "What a write lock costs without contention, from acquire to release. Compare it with a pair."
    silent = "In lockkit an ordinary lock is a write lock, so both should cost the same."
    kind = "write"


class Once(Pair):
    """`Pair` with a key that is done."""

    name = "once"
    title = "Repeat of work that is done once per key"
    explains = (
        "What it costs to find out that the work of a key is done, and to get its stored result. The first run, which "
        "takes a lock and stores the result, is not timed."
    )
    silent = "The stored result is a small number; a long one takes longer to send."
    kind = "once"


class Several(Pair):
    """Several locks at once, entered and left again and again."""

    name = "locks"
    title = "Several locks at once"
    explains = (
        f"What {NAMES[0]} and {NAMES[1]} locks cost without contention, from the first acquire to the last release. "
        "Divide by their number to compare with a pair."
    )
    silent = "Sets that overlap wait for one another: then the order of the names matters, and is not measured."
    kind = "locks"
    figures: ClassVar[tuple[Figure, ...]] = (
        *(Figure(f"min_us_{count}", f"min µs of {count}", "min") for count in NAMES),
        *(Figure(f"median_us_{count}", f"median µs of {count}") for count in NAMES),
    )
    headline = f"median_us_{NAMES[0]}"
    ratios = (f"median_us_{NAMES[0]}", f"median_us_{NAMES[1]}")

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        name: str = part["name"]
        figures: dict[str, float] = {}
        for count in NAMES:
            await time_pairs(adapter, name, kind=self.kind, count=count, pairs=part["warm_up"])
        await parent.ready()
        for count in NAMES:
            samples = await time_pairs(
                adapter,
                name,
                kind=self.kind,
                count=count,
                pairs=part["pairs"],
                seconds=part["seconds"] / len(NAMES),
            )
            times = spread(samples, "us")
            figures |= {f"min_us_{count}": times["min_us"], f"median_us_{count}": times["median_us"]}
        return figures


class Election(Handoff):
    """`Handoff` of an office: the leader resigns, and a candidate that waits becomes the leader."""

    name = "election"
    title = "Takeover after the leader resigns"
    explains = (
        "From just before the leader resigns until the waiting candidate knows that it leads, measured on the clock "
        "that both processes share. Compare it with a hand-off."
    )
    silent = "A leader that dies is followed later: see the takeover after a crash."
    kind = "election"
