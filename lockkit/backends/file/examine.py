"""Examines ``file:`` URLs: the directory of the locks. Makes nothing there."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from lockkit.backends.file.backend import FileBackend
from lockkit.backends.file.directory import find_directory_flaw
from lockkit.backends.file.wakeup import Inotify
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.file_systems import NETWORK_FILE_SYSTEMS, kind_of_file_system

_OPTIONS = "backends/file.md#url-and-options"
_LIMITS = "backends/file.md#what-it-does-not-promise"

_ELSEWHERE = "Name a directory elsewhere, in the URL or with LOCKKIT_STATE_DIR"

MISSING = Check("file-missing", Severity.INFO, "None: the first lock makes the directory.", _OPTIONS)
UNUSABLE = Check("file-unusable", Severity.ERROR, "No lock can be taken.", _OPTIONS)
WRITABLE_BY_OTHERS = Check(
    "file-writable-by-others",
    Severity.ERROR,
    "Another user may remove locks that are held, so lockkit refuses the directory.",
    _LIMITS,
)
NETWORK = Check(
    "file-network",
    Severity.ERROR,
    "Another machine would not see the locks, or see them too late, so that two hold one lock. lockkit refuses it.",
    _LIMITS,
)
NO_INOTIFY = Check(
    "file-no-inotify",
    Severity.WARNING,
    "Waiters poll every 2 to 50 ms instead of being woken, which is slower and costs processor time.",
    "backends/file.md#waiting",
)


async def examine(examination: Examination) -> None:
    """Examine the directory."""
    backend = FileBackend.open(examination.url, examination.options, examination.host)
    path = Path(backend.url.removeprefix("file://"))
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))  # noqa: ASYNC240 - the doctor blocks
    if there.is_dir():
        _examine_directory(examination, path, there)
    else:
        fix = f"Remove {there}, or name another directory: file:///…"
        examination.find(UNUSABLE, str(path), f"{there} is not a directory.", fix)
    _examine_inotify(examination, str(path))


def _examine_directory(examination: Examination, path: Path, there: Path) -> None:
    """Examine the directory, or, if it is missing, `there`: the nearest one above it."""
    kind = kind_of_file_system(there.stat().st_dev)
    if not os.access(there, os.W_OK | os.X_OK | (os.R_OK if there == path else 0)):
        _find_denied(examination, path, there)
    elif there != path and kind == "proc":
        examination.find(UNUSABLE, str(path), f"{there} takes no directories.", _ELSEWHERE)
        return
    elif there != path:
        seen = f"The directory is missing; {there} exists and may be written to."
        examination.find(MISSING, str(path), seen, f"Nothing to do; or: mkdir -p -m 700 {quote(str(path))}")
    flaw = find_directory_flaw(str(path), group=examination.options["group"])
    if flaw is not None:
        examination.find(WRITABLE_BY_OTHERS, str(path), f"{flaw.path} {flaw.seen}.", flaw.fix)
    if kind in NETWORK_FILE_SYSTEMS:
        examination.find(
            NETWORK,
            str(path),
            f"The directory is on a network file system ({kind}).",
            "Name a local directory, or use a backend for several machines, such as redis:// or postgresql://",
        )


def _find_denied(examination: Examination, path: Path, where: Path) -> None:
    """Report that nothing can be made in `where`, which is the directory or, if that is missing, the nearest above."""
    name, user = quote(str(path)), os.geteuid()
    seen = f"This user may not write to {where}."
    if os.statvfs(where).f_flag & os.ST_RDONLY:
        seen = f"{where} is on a read-only file system."
        fix = _ELSEWHERE
    elif where == path:
        fix = f"chown {user} {name} && chmod u+rwx {name}; or share it with a group: {path.as_uri()}?group=1"
    else:
        # Not the directory above, which may be that of the system.
        fix = f"As root: install -d -m 700 -o {user} {name}; or name a directory elsewhere"
    examination.find(UNUSABLE, str(path), seen, fix)


def _examine_inotify(examination: Examination, where: str) -> None:
    try:
        Inotify().close()
    except OSError as error:
        examination.find(
            NO_INOTIFY,
            where,
            f"This user gets no inotify instance ({error.strerror}).",
            "sysctl fs.inotify.max_user_instances=1024 (and a line in /etc/sysctl.d); another program uses all of them",
        )
