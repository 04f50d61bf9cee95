"""Throughput: processes that never wait for each other, so that the server, the network or the machine is the limit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.machine import processor_seconds
from lockkit_tools.bench.parts import ParentPipe, enter, leave, now_ns, pause, run_contenders
from lockkit_tools.bench.settings import CONTENDERS, Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerPool
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name


class Throughput(Workload):
    """One process, two, four, …: each acquires and releases a lock of its own for ``seconds``."""

    name = "throughput"
    title = "Throughput on different locks"
    explains = (
        "Pairs of acquire and release per second of 1 to 16 processes together, each with a lock of its own, and for "
        "the largest number the share of the machine's processors that was busy, and that these processes used. "
        "Where the machine is not busy, the server waits for its disk or its peers."
    )
    silent = "Clients and a local server share the machine: with a server of its own there is more for both."
    figures: ClassVar[tuple[Figure, ...]] = (
        *(Figure(f"pairs_{count}", f"pairs/s by {count}", digits=0) for count in CONTENDERS),
        Figure("machine_percent", "machine busy %", digits=0),
        Figure("clients_percent", "clients' share of it %", digits=0),
    )
    headline = f"pairs_{CONTENDERS[-1]}"
    more_is_faster = True
    ratios = (f"pairs_{CONTENDERS[-1]}",)
    long = True

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        figures: dict[str, float] = {}
        for count in settings.contenders:
            figures |= self._measure(subject, settings, count)
        return Measured(figures)

    def _measure(self, subject: Subject, settings: Settings, count: int) -> dict[str, float]:
        # Locks of one process are taken by its threads or tasks.
        processes = 1 if subject.scope == "process" else count
        with WorkerPool(settings.seconds + settings.patience) as pool:
            parts = [
                {"names": [fresh_name() for _ in range(count // processes)], "seconds": settings.seconds}
                for _ in range(processes)
            ]
            for part in parts:
                pool.start(subject, self.name, part, ttl=settings.ttl)
            start_ns = pool.start_together()
            time.sleep(max(0.0, (start_ns - now_ns()) / 1e9))  # until then the machine is idle
            before = processor_seconds()
            results = pool.results()
            busy, every = (now - then for now, then in zip(processor_seconds(), before, strict=True))
        figures = {f"pairs_{count}": sum(result["pairs"] for result in results) / settings.seconds}
        if busy:
            clients = sum(result["cpu_seconds"] for result in results)
            figures["machine_percent"] = 100 * busy / every
            figures["clients_percent"] = min(100.0, 100 * clients / busy)
        return figures

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        for name in part["names"]:  # what is made with the first lock is not measured
            await _pairs(adapter, name, now_ns(), now_ns())
        start_ns = (await parent.ready())["start_ns"]
        cpu = time.process_time()
        until_ns = start_ns + int(part["seconds"] * 1e9)
        counts = await run_contenders(
            adapter, [partial(_pairs, adapter, name, start_ns, until_ns) for name in part["names"]]
        )
        return {"pairs": sum(counts), "cpu_seconds": time.process_time() - cpu}


async def _pairs(adapter: Adapter, name: str, start_ns: int, until_ns: int) -> int:
    """Acquire and release until the time is over, at least once; tell how often in time."""
    lock, count = adapter.lock(name), 0
    await pause(adapter, max(0.0, (start_ns - now_ns()) / 1e9))
    while True:
        await enter(adapter, lock)
        await leave(adapter, lock)
        if now_ns() >= until_ns:
            return count
        count += 1
