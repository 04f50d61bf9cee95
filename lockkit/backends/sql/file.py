"""The file behind a connection to SQLite."""

from __future__ import annotations

import os

__all__ = ["SqliteFile", "identity"]


class SqliteFile:
    """
    The file behind a connection to SQLite, which may be removed or replaced while it is open.

    SQLite goes on in a file that has no name any more, and another client locks in the new one. In the modes with a
    rollback journal it checks before it writes, in WAL mode it does not.
    """

    def __init__(self, path: str) -> None:
        """Remember which file is at this path now."""
        self._path = path
        self.identity = identity(path)

    @property
    def moved(self) -> bool:
        """Whether the path leads to another file now, or to none."""
        return identity(self._path) != self.identity

    def check(self) -> None:
        """
        Check that other clients see what was read or written there.

        Raises:
            ConnectionAbortedError: They use another file by now.
        """
        if self.moved:
            message = f"{self._path} was removed or replaced while it was in use"
            raise ConnectionAbortedError(message)


def identity(path: str) -> tuple[int, int] | None:
    """Tell which file a path leads to; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - before and after each statement: a Path would cost more than the call
    except OSError:
        return None
    return found.st_dev, found.st_ino
