"""Hand-off: how long a lock that is released stays without holder while somebody waits for it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, enter, leave, now_ns, pause, readable, run_contenders, spread
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerPool
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name

HOLD_SECONDS_MORE = 0.02
"""Hold times vary by this much and by the polling interval, so that a poller is met anywhere in its interval."""


class Handoff(Workload):
    """A giver holds the lock; a taker in another process waits for it; the giver releases."""

    name = "handoff"
    title = "Hand-off to a waiting process"
    explains = (
        "From just before the holder calls release until just after the waiter's acquire returns, measured on the "
        "clock that both processes share. On a busy machine it includes the time until the waiter gets a core."
    )
    silent = "There is one waiter only: waking many at once costs more, and shows in the contention workload."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("min_ms", "min ms", "min", 3),
        Figure("median_ms", "median ms", digits=3),
        Figure("p99_ms", "p99 ms", digits=3),
        Figure("p25_ms", "p25 ms", digits=3, shown=False),
        Figure("p75_ms", "p75 ms", digits=3, shown=False),
        Figure("p90_ms", "p90 ms", digits=3, shown=False),
        Figure("max_ms", "max ms", "max", 3, shown=False),
        Figure("count", "hand-offs", "sum", 0, shown=False),
    )
    headline = "median_ms"
    ratios = ("median_ms", "min_ms")

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        hold_min = settings.hold_min
        part = {"name": fresh_name(), "count": settings.handoffs, "poll": subject.poll, "hold_min": hold_min}
        part["kind"] = self.kind
        expected = settings.handoffs * (hold_min + HOLD_SECONDS_MORE + 2 * subject.poll)
        # Threads or tasks of one process, where the lock excludes no others.
        casts = [["give", "take"]] if subject.scope == "process" else [["give"], ["take"]]
        with ExitStack() as stack:
            begin, done = os.pipe(), os.pipe()
            for fd in (*begin, *done):
                stack.callback(os.close, fd)
            pool = stack.enter_context(WorkerPool(expected + settings.patience))
            workers = [
                pool.start(
                    subject,
                    self.name,
                    {**part, "roles": roles, "begin": begin, "done": done},
                    ttl=settings.ttl,
                    pass_fds=[*begin, *done],
                )
                for roles in casts
            ]
            for worker in workers:
                worker.ready()
            for worker in workers:
                worker.go()
            times = {role: stamps for result in pool.results() for role, stamps in result.items()}
        gaps = [taken - given for given, taken in zip(times["give"], times["take"], strict=True)]
        return _measured(gaps)

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        parts: dict[str, Callable[[], Coroutine[Any, Any, list[int]]]] = {
            "give": partial(_give, adapter, part),
            "take": partial(_take, adapter, part),
        }
        roles: Sequence[str] = part["roles"]
        await parent.ready()
        return dict(zip(roles, await run_contenders(adapter, [parts[role] for role in roles]), strict=True))


async def _give(adapter: Adapter, part: Mapping[str, Any]) -> list[int]:
    """Hold, tell the taker to wait, release; note the time before each release."""
    lock = adapter.primitive(part["kind"], part["name"])
    stamps = []
    for _ in range(part["count"]):
        await enter(adapter, lock)
        _tell(part["begin"][1])
        await pause(adapter, part["hold_min"] + random.uniform(0, HOLD_SECONDS_MORE + part["poll"]))
        stamps.append(now_ns())
        await leave(adapter, lock)
        await _hear(part["done"][0])
    return stamps


async def _take(adapter: Adapter, part: Mapping[str, Any]) -> list[int]:
    """Wait for the lock when told to; note the time after each acquire."""
    lock = adapter.primitive(part["kind"], part["name"])
    # The first use connects, loads scripts and so on: that is not the hand-off.
    await _hear(part["begin"][0])
    stamps = []
    for turn in range(part["count"]):
        await enter(adapter, lock)
        stamps.append(now_ns())
        await leave(adapter, lock)
        _tell(part["done"][1])
        if turn + 1 < part["count"]:
            await _hear(part["begin"][0])
    return stamps


def _measured(gaps: list[int]) -> Measured:
    early = sum(gap < 0 for gap in gaps)
    if early:
        # Inside before the holder had so much as called release.
        return Measured({}, broken=f"{early} of {len(gaps)} waiters were let in while the lock was held")
    # The first one of each process finds no connection, no inotify handle and no script at the server.
    return Measured(spread(gaps[1:] or gaps, "ms"))


def _tell(writer: int) -> None:
    os.write(writer, b".")


async def _hear(reader: int) -> None:
    await readable(reader)
    if not os.read(reader, 1):
        raise EOFError("the other process has ended")
