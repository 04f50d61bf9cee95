"""What is measured: one module for each workload, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockkit.bench.workloads.base import Workload
from lockkit.bench.workloads.contention import Contention
from lockkit.bench.workloads.crash import Crash, Freeze
from lockkit.bench.workloads.distance import Distance
from lockkit.bench.workloads.handoff import Handoff
from lockkit.bench.workloads.held import Held
from lockkit.bench.workloads.idle import Idle
from lockkit.bench.workloads.imports import Imports
from lockkit.bench.workloads.overhead import Overhead
from lockkit.bench.workloads.pair import Pair
from lockkit.bench.workloads.primitives import Election, Once, Read, Several, Write
from lockkit.bench.workloads.sharing import Permits, Readers
from lockkit.bench.workloads.sweep import Sweep
from lockkit.bench.workloads.throughput import Throughput

__all__ = ["WORKLOADS"]

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Pair(),
            Contention(),
            Handoff(),
            Crash(),
            Freeze(),
            Distance(),
            Sweep(),
            Throughput(),
            Idle(),
            Held(),
            Overhead(),
            Read(),
            Write(),
            Readers(),
            Permits(),
            Several(),
            Election(),
            Once(),
            Imports(),
        )
    }
)
"""By name."""
