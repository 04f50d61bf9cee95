"""What PyInstaller has to know of lockkit: it finds this folder by the entry point ``pyinstaller40``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["hook_directories"]


def hook_directories() -> list[str]:
    """Return the folder of ``hook-lockkit.py``."""
    return [str(Path(__file__).parent)]
