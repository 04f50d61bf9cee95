"""The uncontended pair: lock and unlock with nobody else about."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, now_ns, spread
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Kind, Subject
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name


class Pair(Workload):
    """One process, one lock object, entered and left again and again; every pair is timed."""

    name = "pair"
    title = "Uncontended acquire + release"
    explains = (
        "What a lock costs without contention; it says nothing about waiting. Ratios are taken between medians: other "
        "work on the machine disturbs the minimum less."
    )
    silent = "Over a network the round trip dominates and differences in CPU time vanish: see the distances."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("min_us", "min µs", "min"),
        Figure("median_us", "median µs"),
        Figure("p99_us", "p99 µs"),
        Figure("p25_us", "p25 µs", shown=False),
        Figure("p75_us", "p75 µs", shown=False),
        Figure("p90_us", "p90 µs", shown=False),
        Figure("max_us", "max µs", "max", shown=False),
        Figure("count", "pairs", "sum", 0, shown=False),
    )
    headline = "median_us"
    ratios = ("min_us", "median_us")

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        part = {"name": fresh_name(), "seconds": settings.seconds, "pairs": 1, "warm_up": settings.warm_up}
        return Measured(self.measure_alone(subject, settings, part))

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        """Time pairs until ``part["seconds"]`` have passed and ``part["pairs"]`` were timed."""
        name, kind = part["name"], self.kind
        await time_pairs(adapter, name, kind=kind, pairs=part["warm_up"])
        await parent.ready()
        return spread(await time_pairs(adapter, name, kind=kind, pairs=part["pairs"], seconds=part["seconds"]), "us")


async def time_pairs(
    adapter: Adapter,
    name: str,
    *,
    pairs: int = 0,
    seconds: float = 0.0,
    kind: Kind = "lock",
    count: int = 1,
) -> array[int]:
    """Time pairs, nanoseconds each."""
    samples = array("q")
    # The loop is written twice: code shared by the sync and async APIs would be measured with them.
    if adapter.face == "asyncio":
        async_lock = adapter.primitive(kind, name, count)
        until = now_ns() + int(seconds * 1e9)
        while len(samples) < pairs or now_ns() < until:
            began = now_ns()
            async with async_lock:
                pass
            samples.append(now_ns() - began)
    else:
        lock = adapter.primitive(kind, name, count)
        until = now_ns() + int(seconds * 1e9)
        while len(samples) < pairs or now_ns() < until:
            began = now_ns()
            with lock:
                pass
            samples.append(now_ns() - began)
    return samples
