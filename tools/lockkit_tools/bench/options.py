"""What the command line of the benchmark may say. Light: ``lockkit --help`` loads it."""

from __future__ import annotations

from enum import StrEnum

WORKLOAD_NAMES = (
    "pair",
    "contention",
    "handoff",
    "crash",
    "freeze",
    "distance",
    "sweep",
    "throughput",
    "idle",
    "held",
    "overhead",
    "read",
    "write",
    "readers",
    "permits",
    "locks",
    "election",
    "once",
    "import",
)
"""The keys of `lockkit_tools.bench.workloads.WORKLOADS`, in the order of the report."""

QUICK_WORKLOADS = ("pair", "contention", "handoff", "crash")
"""The default workloads of a first look."""


class FaceChoice(StrEnum):
    """Values of ``--face``."""

    SYNC = "sync"
    ASYNC = "async"
    BOTH = "both"


class ServersChoice(StrEnum):
    """Values of ``--servers``."""

    LOCAL = "local"
    DOCKER = "docker"
    NONE = "none"


WorkloadChoice = StrEnum("WorkloadChoice", {name.upper(): name for name in WORKLOAD_NAMES})  # type: ignore[misc]
