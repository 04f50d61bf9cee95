"""Examines ``memory:`` URLs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.doctor.findings import Check, Severity

if TYPE_CHECKING:
    from lockkit.doctor.examination import Examination

__all__ = ["examine"]

PROCESS_ONLY = Check(
    "memory-process-only",
    Severity.INFO,
    "Threads and tasks of one process exclude one another; another process is not kept out.",
    "backends/memory.md#what-it-does-not-promise",
)


async def examine(examination: Examination) -> None:
    """Say whom it keeps apart: there is nothing that could be set wrongly."""
    examination.find(
        PROCESS_ONLY,
        examination.url.safe_text,
        "Locks live in the memory of each process.",
        "For several processes of one machine: file:; for several machines: redis://, postgresql:// and others.",
    )
