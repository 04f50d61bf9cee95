"""Examines ``memory:`` URLs."""

from __future__ import annotations

from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

PROCESS_ONLY = Check(
    "memory-process-only",
    Severity.INFO,
    "Locks exclude threads and tasks of one process only; other processes have their own locks.",
    "backends/memory.md#what-it-does-not-promise",
)


async def examine(examination: Examination) -> None:
    """Report the scope of the locks: nothing else can be misconfigured."""
    examination.find(
        PROCESS_ONLY,
        examination.url.safe_text,
        "Locks live in the memory of each process.",
        "For several processes of one machine use file:; for several machines redis://, postgresql:// or others.",
    )
