"""Idle waiters: what many threads or tasks cost that wait for a lock that somebody keeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from lockkit.runtime import drive
from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.observers import watch
from lockkit_tools.bench.parts import ParentPipe, enter, idle_percent, leave, pause
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerPool
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name

LEAVE_SECONDS = 2.0
"""What the waiters get for taking their turn at the end; who polls slowly is ended with the process."""


class Idle(Workload):
    """A holder keeps the lock; ``waiters`` threads or tasks of another process wait for it for ``idle_seconds``."""

    name = "idle"
    title = "Idle waiters on one lock"
    explains = (
        "CPU time of the waiting process as a share of one core, its threads, and what the waiting costs the server: "
        "commands per second, and connections of this process and the holder. A waiter that polls keeps costing."
    )
    silent = "Memory is not counted; columns are missing where the server does not report the figure."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("waiters", "waiters", "max", 0),
        Figure("cpu_percent", "CPU % of a core", digits=2),
        Figure("threads", "threads", "max", 0),
        Figure("commands_per_second", "commands/s"),
        Figure("connections", "connections", "max", 0),
    )
    headline = "cpu_percent"
    long = True

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        alone = subject.scope == "process"
        part = {
            "name": fresh_name(),
            "waiters": settings.waiters,
            "settle": settings.settle,
            "seconds": settings.idle_seconds,
        }
        expected = settings.idle_seconds + settings.settle + LEAVE_SECONDS
        with ExitStack() as stack:
            observer = stack.enter_context(watch(subject.url))
            pool = stack.enter_context(WorkerPool(expected + settings.patience))
            holder = None
            if not alone:
                holder = pool.start(subject, self.name, {**part, "holds": True, "waiters": 0}, ttl=settings.ttl)
                holder.ready()
            waiting = pool.start(subject, self.name, {**part, "holds": alone}, ttl=settings.ttl)
            waiting.ready()
            observer.begin()
            waiting.go()
            waiting.ready()
            seen = observer.end()
            if holder is not None:
                holder.go()
                holder.result()
            waiting.go()
            result = waiting.result()
        early = int(result.pop("early"))
        broken = f"{early} of {settings.waiters} waiters were let in while the lock was held" if early else ""
        return Measured({**result, **seen, "waiters": settings.waiters}, broken=broken)

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        lock = adapter.lock(part["name"])
        if part["holds"]:
            await enter(adapter, lock)
        if not part["waiters"]:
            await parent.ready()
            await leave(adapter, lock)
            return {}
        crowd = _Crowd(adapter, part["name"], part["waiters"])
        crowd.begin()
        await pause(adapter, part["settle"])
        await parent.ready()
        cpu_percent = await idle_percent(adapter, part["seconds"])
        early = crowd.check()
        threads = threading.active_count()
        await parent.ready()
        if part["holds"]:
            await leave(adapter, lock)
        await crowd.end(LEAVE_SECONDS)
        return {"cpu_percent": cpu_percent, "threads": threads, "early": early}


class _Crowd:
    """The waiters: each enters its own lock object of the same name once."""

    def __init__(self, adapter: Adapter, name: str, count: int) -> None:
        self._adapter = adapter
        self._name = name
        self._count = count
        self._inside = 0
        self._ended = 0
        self._errors: list[BaseException] = []
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        for _ in range(self._count):
            if self._adapter.face == "asyncio":
                self._tasks.append(asyncio.get_running_loop().create_task(self._wait()))
            else:
                threading.Thread(target=lambda: drive(self._wait()), daemon=True).start()

    async def _wait(self) -> None:
        try:
            lock = self._adapter.lock(self._name)
            await enter(self._adapter, lock)
            self._inside += 1
            await leave(self._adapter, lock)
        except Exception as error:  # noqa: BLE001 - `check` raises it in the worker's own thread
            self._errors.append(error)
        finally:
            self._ended += 1

    def check(self) -> int:
        """Give the number of waiters that got in; raise what one of them raised."""
        if self._errors:
            message = f"{len(self._errors)} of {self._count} waiters failed; first: {self._errors[0]!r}"
            raise RuntimeError(message) from self._errors[0]
        return self._inside

    async def end(self, seconds: float) -> None:
        """Let the waiters take their turns, for so long."""
        until = time.monotonic() + seconds
        while self._ended < self._count and time.monotonic() < until:
            await pause(self._adapter, 0.01)
        for task in self._tasks:
            task.cancel()
