"""
Temporary directories that also go when their process was killed: the next process that makes one removes them.

`tempfile.TemporaryDirectory` removes its directory when the interpreter ends in order, which SIGKILL and, by default,
SIGTERM and SIGHUP prevent. Here a file ``NAME.in-use`` stands beside each directory ``NAME``, and the process that uses
the directory holds a lock on the file (flock(2)). The kernel frees the lock when that process ends, however it ends, so
a directory whose file can be locked is abandoned. A process id would not tell: ids are given again, and containers that
share a directory number their processes each for itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lockkit.errors import ConfigurationError
from lockkit.file_systems import find_flaw

__all__ = ["TemporaryDirectory", "remove_abandoned", "shared_directory"]

PREFIX = "lockkit-"

SUFFIX = ".in-use"


class TemporaryDirectory:
    """
    A directory that only we may read; a context manager that gives its path.

    The first one that a process makes in a parent directory removes those that others abandoned there.

    Attributes:
        path: The directory.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if parent not in _looked_at:
            _looked_at.add(parent)
            remove_abandoned(parent)
        self._fd, in_use = tempfile.mkstemp(prefix=f"{PREFIX}{kind}-", suffix=SUFFIX, dir=parent)
        # Before there is a directory: without one, nobody takes the file for abandoned.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._in_use: Path | None = Path(in_use)
        self.path = Path(in_use.removesuffix(SUFFIX))
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        """Remove it with all that is in it; may be called twice."""
        if self._in_use is not None:
            _remove(self.path, self._in_use)
            self._in_use = None
            os.close(self._fd)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_looked_at: set[Path] = set()


def shared_directory(kind: str) -> Path:
    """Return a directory that all processes of this user share; its name is always the same."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{kind}-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or find_flaw(str(path), status) is not None:
        raise ConfigurationError(f"{path} was made by another user or program, or others may write to it: remove it")
    return path


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes of this user that have ended without removing them."""
    for in_use in parent.glob(f"{PREFIX}*{SUFFIX}"):
        # In a directory for everybody, others have theirs. Where the file goes meanwhile, its owner removes both.
        with suppress(FileNotFoundError, BlockingIOError):
            about = in_use.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                _remove_if_abandoned(in_use)


def _remove_if_abandoned(in_use: Path) -> None:
    """Remove one directory with its file."""
    with in_use.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory = in_use.with_suffix("")
        if directory.is_dir():
            _remove(directory, in_use)


def _remove(directory: Path, in_use: Path) -> None:
    """Remove a directory, then its file: interrupted in between, this is done again by the next process."""
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        in_use.unlink(missing_ok=True)
