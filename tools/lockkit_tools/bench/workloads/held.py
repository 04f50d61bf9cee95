"""Held leases: what it costs to keep many locks alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.observers import watch
from lockkit_tools.bench.parts import ParentPipe, enter, idle_percent, leave
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerPool
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name

MICROSECONDS_EACH = 10_000
"""What acquiring and releasing one lease may take before the subject has failed."""

SESSIONS_MAX = 80
"""Leases that take a connection each. More are refused by a PostgreSQL or MariaDB as it comes."""


class Held(Workload):
    """One client holds ``leases`` locks of ``lease_ttl`` for one ttl, in which every one of them must be renewed."""

    name = "held"
    title = "Held leases"
    explains = (
        "CPU time of the holding process, as a share of one core, over one whole ttl (in which each lease is renewed "
        "at least once), and its threads. Measured at the ttl shown: a longer ttl needs proportionally fewer renewals."
    )
    silent = "The server's CPU time is not included, only the commands that it received."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("leases", "leases", "max", 0),
        Figure("ttl", "ttl s", "max", 0),
        Figure("cpu_percent", "CPU % of a core", digits=2),
        Figure("threads", "threads", "max", 0),
        Figure("lost", "lost", "sum", 0),
        Figure("commands_per_second", "commands/s"),
        Figure("connections", "connections", "max", 0),
        Figure("acquire_us", "acquire µs each", digits=1),
    )
    headline = "cpu_percent"
    long = True

    def inapplicable(self, subject: Subject) -> str:
        """Only for what keeps a lease alive by itself."""
        if not subject.renews:
            return f"{subject.label} does not renew a lock that is held"
        return super().inapplicable(subject)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        settings = settings.with_ttls_from(subject.ttl_min)
        leases = min(settings.leases, SESSIONS_MAX) if subject.session_each else settings.leases
        part = {"name": fresh_name(), "leases": leases, "seconds": settings.lease_ttl}
        expected = settings.lease_ttl + leases * MICROSECONDS_EACH / 1e6
        with ExitStack() as stack:
            observer = stack.enter_context(watch(subject.url))
            pool = stack.enter_context(WorkerPool(expected + settings.patience))
            worker = pool.start(subject, self.name, part, ttl=settings.lease_ttl)
            worker.ready()
            observer.begin()
            worker.go()
            worker.ready()
            seen = observer.end()
            worker.go()
            result = worker.result()
        lost = int(result["lost"])
        note = f"{lost} of {leases} leases were lost" if lost else ""
        if leases < settings.leases and not note:
            note = f"{leases} leases only: each of them takes a connection"
        return Measured({**result, **seen, "leases": leases, "ttl": settings.lease_ttl}, note=note)

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        adapter.renews = True
        locks = [adapter.lock(f"{part['name']}-{index}") for index in range(part["leases"])]
        began = time.monotonic()
        entered = [await enter(adapter, lock) for lock in locks]
        acquire_us = (time.monotonic() - began) / len(locks) * 1e6
        await parent.ready()
        cpu_percent = await idle_percent(adapter, part["seconds"])
        threads = threading.active_count()
        lost = sum(adapter.still_held(lock, lease) is False for lock, lease in zip(locks, entered, strict=True))
        await parent.ready()
        if not lost:
            for lock in locks:
                await leave(adapter, lock)
        return {"cpu_percent": cpu_percent, "threads": threads, "lost": lost, "acquire_us": acquire_us}
