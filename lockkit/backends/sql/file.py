"""The file behind a connection to SQLite."""

from __future__ import annotations

import os
from contextlib import suppress

from lockkit.errors import ConfigurationError
from lockkit.file_systems import find_flaw_on_the_way


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
        """Check that other clients see what was read or written there."""
        if self.moved:
            message = f"{self._path} was removed or replaced while it was in use"
            raise ConnectionAbortedError(message)


def prepare(path: str, *, group: bool) -> None:
    """
    Create the file of a database if it is missing, and refuse one that other users could have made or could replace.

    SQLite creates its journals with the same mode, and takes an empty file for a new database.
    """
    _refuse(path, group=group)  # first: who owns a link decides where the file is made
    with suppress(OSError):  # it exists, or its directory is missing, which SQLite reports
        mode = 0o660 if group else 0o600
        made = os.open(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(made, mode)  # whatever the umask says
        finally:
            os.close(made)
    _refuse(path, group=group)  # again: another user may have made it meanwhile


def _refuse(path: str, *, group: bool) -> None:
    try:
        flaw = find_flaw_on_the_way(path, group=group)
    except OSError as error:
        message = f"{path} cannot be used for locks: {error}"
        raise ConfigurationError(message) from error
    if flaw is not None:
        message = (
            f"{path} cannot be used for locks: {flaw.path} {flaw.seen}, so another user could free any lock. "
            f"Fix: {flaw.fix}; or say ?group=1 to share the locks with the group"
        )
        raise ConfigurationError(message)


def identity(path: str) -> tuple[int, int] | None:
    """Tell which file a path leads to; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - before and after each statement: a Path would cost more than the call
    except OSError:
        return None
    return found.st_dev, found.st_ino
