"""On what it was measured."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["file_system", "machine"]


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


def file_system(path: Path) -> str:
    """Name the kind of file system that a path of this machine lies on; empty if that is not known."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists() or not path.is_absolute():
        return ""
    kinds = {}
    for line in mounts.read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        kinds[Path(mount.replace("\\040", " "))] = kind  # a later mount hides an earlier one
    try:
        resolved = path.resolve()
        if not resolved.exists():
            return ""
    except OSError:
        return ""  # not ours to look into
    above = next(mount for mount in (resolved, *resolved.parents) if mount in kinds)
    return kinds[above]


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
