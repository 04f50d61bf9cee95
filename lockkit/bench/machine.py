"""On what it was measured."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["machine"]


def machine() -> dict[str, str | int | float]:
    """Describe processor, system and interpreter, and what else the machine was doing."""
    about: dict[str, str | int | float] = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load_before": os.getloadavg()[0],
    }
    if hasattr(os, "sched_getaffinity"):
        about["cores"] = len(os.sched_getaffinity(0))
    if sys.platform == "linux":
        kilobytes = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
        about["memory_gib"] = round(int(kilobytes) / 2**20, 1)
    return about


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
