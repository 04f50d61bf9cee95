"""Overhead: what face and engine add to the backend's own operations."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

from lockkit.backend import Grant, LockBackend, Request
from lockkit.configuration import registry
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.url import parse
from lockkit_tools.bench.adapters.base import Adapter
from lockkit_tools.bench.parts import ParentPipe, now_ns, spread
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name
from lockkit_tools.bench.workloads.pair import time_pairs

BLOCK = 200
"""Pairs in one go of each kind. Smaller interleaves the two better, larger forgives more warming up."""


class Overhead(Workload):
    """In one process, in turns: pairs through the face, and the backend's own ``try_acquire`` and ``release``."""

    name = "overhead"
    title = "Overhead of API and engine"
    explains = (
        "A pair through the public API minus the same pair through the backend's own operations with prepared "
        "requests. The difference pays for owner, deadline, local queue, renewal and lease."
    )
    silent = "It is the difference of two larger figures: where a pair takes milliseconds, it drowns in their noise."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("face_min_us", "API min µs", "min"),
        Figure("backend_min_us", "backend min µs", "min"),
        # Not the least of the rounds: of a difference that would be the round in which the backend was disturbed.
        Figure("overhead_min_us", "overhead of minima µs"),
        Figure("overhead_median_us", "overhead of medians µs"),
        Figure("face_median_us", "API median µs", shown=False),
        Figure("backend_median_us", "backend median µs", shown=False),
    )
    headline = "overhead_median_us"

    def inapplicable(self, subject: Subject) -> str:
        """Only lockkit has the two layers."""
        if subject.role != "lockkit":
            return f"{subject.label} is not lockkit"
        return super().inapplicable(subject)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        part = {"name": fresh_name(), "url": subject.url, "ttl": settings.ttl}
        part |= {"seconds": settings.seconds, "warm_up": settings.warm_up}
        result = self.measure_alone(subject, settings, part)
        for kind in ("min", "median"):
            result[f"overhead_{kind}_us"] = result[f"face_{kind}_us"] - result[f"backend_{kind}_us"]
        return Measured({figure.key: result[figure.key] for figure in self.figures})

    async def work(self, adapter: Adapter, part: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
        direct = _Direct(part, AsyncioRuntime() if adapter.face == "asyncio" else BlockingRuntime())
        await time_pairs(adapter, part["name"], pairs=part["warm_up"])
        await direct.time(adapter, part["warm_up"])
        await parent.ready()
        faces, backends = array("q"), array("q")
        until = now_ns() + int(part["seconds"] * 1e9)
        while now_ns() < until:
            faces += await time_pairs(adapter, part["name"], pairs=BLOCK)
            backends += await direct.time(adapter, BLOCK)
        await direct.backend.close()
        face, backend = spread(faces, "us"), spread(backends, "us")
        return {f"face_{k}": v for k, v in face.items()} | {f"backend_{k}": v for k, v in backend.items()}


class _Direct:
    """A backend without engine."""

    def __init__(self, part: Mapping[str, Any], runtime: Runtime) -> None:
        host = registry.DetachedHost()
        host.runtime = runtime  # type: ignore[assignment]  # of either API
        self.backend: LockBackend
        self.backend, _ = registry.open_backend(parse(part["url"]), {}, host)
        self._runtime = runtime
        self._name = part["name"] + "-direct"
        self._ttl = part["ttl"]

    async def time(self, adapter: Adapter, pairs: int) -> array[int]:
        """Time pairs, nanoseconds each."""
        blocking = adapter.face == "blocking"
        backend = self.backend
        samples = array("q")
        for request in [self._request() for _ in range(pairs)]:
            began = now_ns()
            if blocking:
                grant = drive(backend.try_acquire(request))
                assert isinstance(grant, Grant), grant
                drive(backend.release(grant))
            else:
                grant = await backend.try_acquire(request)
                assert isinstance(grant, Grant), grant
                await backend.release(grant)
            samples.append(now_ns() - began)
        return samples

    def _request(self) -> Request:
        return Request(self._name, self._runtime.owner(), self._ttl, "{}", queue=True, runtime=self._runtime)
