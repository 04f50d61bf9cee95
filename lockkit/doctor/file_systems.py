"""On which file system something is: locks of files do not work on each."""

from __future__ import annotations

from pathlib import Path

from lockkit.backends.file.directory import NETWORK_FILE_SYSTEMS, file_system

__all__ = ["NETWORK_FILE_SYSTEMS", "kind_of_file_system"]


def kind_of_file_system(device: int) -> str:
    """Return the type of the file system of a device (``st_dev``); empty where the system does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # macOS
    return file_system(mounts, device)
