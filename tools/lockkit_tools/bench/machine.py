"""On what it was measured."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


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
    for line in mounts.read_text("utf-8", "surrogateescape").splitlines():
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


def processor_seconds() -> tuple[float, float]:
    """Return the time for which the machine's processors were busy, and all of their time; zeros if it does not say."""
    if sys.platform != "linux":
        return 0.0, 0.0
    # In ticks (proc_stat(5)).
    user, nice, system, idle, iowait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    tick, busy = 1 / os.sysconf("SC_CLK_TCK"), user + nice + system + irq + softirq
    return busy * tick, (busy + idle + iowait) * tick


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
