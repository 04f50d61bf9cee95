"""Crash and freeze: how long a lock stays locked after its holder was killed, or stopped, in mid-work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, enter, leave, now_ns
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerFailed, WorkerPool, WorkerProcess
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name

HELD_SECONDS_MIN = 0.3
"""The waiter has begun to wait by then, on a busy machine too."""

TTLS_MAX = 3
"""A lock that is not free after so many ttl counts as one that its holder keeps until somebody looks after it."""


class Crash(Workload):
    """A holder is killed while another process waits for its lock. Many subjects at a time: they only wait."""

    name = "crash"
    title = "Takeover after the holder was killed"
    explains = (
        "From SIGKILL to the holding process until the waiting process has the lock, as a multiple of the ttl. A lease "
        "that was just renewed lasts nearly 1 ttl; a lock that belongs to a connection or an open file is free as soon "
        "as its process dies."
    )
    silent = (
        "Only the process died here. When its machine dies or the network fails, no connection is closed, and the "
        "takeover waits until the server notices."
    )
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("fraction", "takeover / ttl", digits=2),
        Figure("slowest_fraction", "slowest / ttl", "max", 2),
        Figure("seconds", "takeover s", digits=2),
        Figure("ttl", "ttl s", "max", 0),
        Figure("never", "never taken over", "sum", 0, shown=False),
    )
    headline = "fraction"
    long = True
    together = 8

    strike: ClassVar[signal.Signals] = signal.SIGKILL

    def inapplicable(self, subject: Subject) -> str:
        """A lock within one process ends with it."""
        if subject.scope == "process":
            return "there is nobody left to take over when the only process dies"
        return super().inapplicable(subject)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        (result,) = self.measure_together([subject], settings)
        if isinstance(result, Exception):
            raise result
        return result

    def measure_together(
        self, subjects: Sequence[Subject], settings: Settings
    ) -> list[Measured | WorkerFailed | OSError]:
        """See `Workload.measure_together`. One step of all subjects after the other, in one thread."""
        with ExitStack() as stack:
            scenes = [_Scene(self, subject, settings.with_ttls_from(subject.ttl_min), stack) for subject in subjects]
            for step in (_Scene.start, _Scene.begin, _Scene.strike, _Scene.look):
                # The first one that is struck comes first: waiting for it delays nobody.
                for scene in sorted(scenes, key=lambda scene: scene.strike_ns):
                    scene.do(step)
            return [scene.outcome() for scene in scenes]

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        """See `Workload.work`. The holder never gets to its end."""
        adapter.renews = part["renews"]
        lock = adapter.lock(part["name"])
        # Connections and scripts: the first use makes them, and that is no part of a takeover.
        warm = adapter.lock(f"{part['name']}-warm-{part['role']}")
        await enter(adapter, warm)
        await leave(adapter, warm)
        await parent.ready()
        if part["role"] == "hold":
            await enter(adapter, lock)
            await parent.ready()
        await enter(adapter, lock)
        taken_ns = now_ns()
        await leave(adapter, lock)
        return {"taken_ns": taken_ns}


class Freeze(Crash):
    """A holder is stopped, as by a debugger or a suspended machine: it lives, keeps its connections, does nothing."""

    name = "freeze"
    title = "Takeover after the holder was frozen"
    explains = (
        "From SIGSTOP to the holding process until the waiting process has the lock, as a multiple of the ttl: the "
        "holder lives and its connections stay open, but nothing renews the lease. A lock with a ttl goes to the "
        "waiter when the ttl ends; one that belongs to a connection or an open file stays locked, here for more than "
        f"{TTLS_MAX} ttl."
    )
    silent = (
        "A frozen holder that wakes up does not know yet that it lost the lock: only storage that checks the fencing "
        "token rejects its next write."
    )
    strike = signal.SIGSTOP


@dataclass(slots=True)
class _Scene:
    """One subject: a holder and a waiter, taken through the steps together with those of others."""

    workload: Crash
    subject: Subject
    settings: Settings
    stack: ExitStack
    holder: WorkerProcess = field(init=False)
    waiter: WorkerProcess = field(init=False)
    strike_ns: int = 0
    failure: WorkerFailed | OSError | None = None
    result: dict[str, Any] | None = None

    def do(self, step: Callable[[_Scene], None]) -> None:
        """Take a step, unless an earlier one failed."""
        if self.failure is not None:
            return
        try:
            step(self)
        except (WorkerFailed, OSError) as error:
            self.failure = error

    def start(self) -> None:
        ttl = self.settings.crash_ttl
        pool = self.stack.enter_context(WorkerPool((TTLS_MAX + 1) * ttl + self.settings.patience))
        part = {"name": fresh_name(), "renews": self.subject.renews}
        self.holder, self.waiter = (
            pool.start(self.subject, self.workload.name, {**part, "role": role}, ttl=ttl) for role in ("hold", "wait")
        )

    def begin(self) -> None:
        self.holder.ready()
        self.waiter.ready()
        self.holder.go()
        self.holder.ready()
        self.waiter.go()
        # Anywhere between two renewals, which come every third of a ttl.
        held_ns = (HELD_SECONDS_MIN + random.uniform(0, self.settings.crash_ttl / 3)) * 1e9
        self.strike_ns = now_ns() + int(held_ns)

    def strike(self) -> None:
        time.sleep(max(0.0, (self.strike_ns - now_ns()) / 1e9))
        self.strike_ns = now_ns()
        os.kill(self.holder.pid, self.workload.strike)

    def look(self) -> None:
        left = (self.strike_ns - now_ns()) / 1e9 + TTLS_MAX * self.settings.crash_ttl
        if self.waiter.answers_within(max(0.0, left)):
            self.result = self.waiter.result()

    def outcome(self) -> Measured | WorkerFailed | OSError:
        if self.failure is not None:
            return self.failure
        ttl = self.settings.crash_ttl
        if self.result is None:
            return Measured({"never": 1, "ttl": ttl}, note=f"still locked {TTLS_MAX * ttl:g} s later (ttl {ttl:g} s)")
        seconds = (self.result["taken_ns"] - self.strike_ns) / 1e9
        if seconds < 0 and self.subject.renews:
            return Measured({}, broken="the waiter was let in while the holder lived and renewed")
        if seconds < 0:
            return Measured({"ttl": ttl}, note="the lock ran out before its holder was struck: it is not renewed")
        fraction = seconds / ttl
        figures = {"seconds": seconds, "fraction": fraction, "slowest_fraction": fraction, "ttl": ttl, "never": 0}
        return Measured(figures)
