"""What is measured: one module for each workload, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockkit_tools.bench.workloads.base import Workload
from lockkit_tools.bench.workloads.contention import Contention
from lockkit_tools.bench.workloads.crash import Crash, Freeze
from lockkit_tools.bench.workloads.distance import Distance
from lockkit_tools.bench.workloads.handoff import Handoff
from lockkit_tools.bench.workloads.held import Held
from lockkit_tools.bench.workloads.idle import Idle
from lockkit_tools.bench.workloads.imports import Imports
from lockkit_tools.bench.workloads.overhead import Overhead
from lockkit_tools.bench.workloads.pair import Pair
from lockkit_tools.bench.workloads.primitives import Election, Once, Read, Several, Write
from lockkit_tools.bench.workloads.sharing import Permits, Readers
from lockkit_tools.bench.workloads.sweep import Sweep
from lockkit_tools.bench.workloads.throughput import Throughput

__all__ = ["WORKLOADS"]

_ALL = (
    Pair, Contention, Handoff, Crash, Freeze, Distance, Sweep, Throughput, Idle, Held, Overhead, Read, Write, Readers,
    Permits, Several, Election, Once, Imports,
)  # fmt: skip

WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload() for workload in _ALL})
"""By name."""
