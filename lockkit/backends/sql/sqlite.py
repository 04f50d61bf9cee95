"""
SQLite, by Python's sqlite3.

It waits for nothing but other writers and the disk, so a blocking client calls it as it is.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockkit import validation
from lockkit.backends.sql.connection import Connection, Driver, Parameter, Result, Statement, end_quietly
from lockkit.backends.sql.dialect import SQLITE_LOCK_SECONDS
from lockkit.errors import ConfigurationError
from lockkit.file_systems import find_flaw_on_the_way
from lockkit.runtime import Runtime

OPENINGS_MAX = 4
"""How often lockkit opens a SQLite file until it is the one that was there before. A new file takes two attempts."""

CLOSE_SECONDS = 3.0
"""How long `SqliteConnection.close` waits under asyncio, seconds: on a busy disk SQLite takes long to copy its log into
the file."""

OPTIONS: dict[str, Callable[[Any], object]] = {"cached_statements": validation.parse_int(0)}
"""sqlite3's that a URL may give; not timeout, which is the option of the client's locks."""


class SqliteDriver(Driver):
    """
    Opens a file: a path, or from an application's engine also a URI of SQLite's, whose path only SQLite knows.

    Of an `adopted` one the application answers for who may write there; `group` shares the file with the group.
    """

    errors = (sqlite3.Error, OSError, EOFError)

    def __init__(self, database: str, options: dict[str, Any], *, adopted: bool, group: bool = False) -> None:
        self._database = database
        self._options = options
        self._adopted = adopted
        self._group = group
        self.path = "" if database.startswith("file:") else str(Path(database).absolute())

    def open(self, runtime: Runtime) -> SqliteConnection:
        for _ in range(OPENINGS_MAX):
            if self.path and not self._adopted:
                prepare(self.path, group=self._group)
            before = identity(self.path) if self.path else None
            dbapi = sqlite3.connect(
                self._database,
                timeout=SQLITE_LOCK_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                **self._options,
            )
            if not self.path:
                rows = dbapi.execute("PRAGMA database_list").fetchall()
                self.path = next((file or "" for _, name, file in rows if name == "main"), "")
            if not self.path or (before is not None and identity(self.path) == before):
                return SqliteConnection(dbapi, self.path, before, runtime)
            # Made just now, or replaced: lockkit cannot tell whether this connection leads to what is there now.
            dbapi.close()
        raise ConnectionAbortedError(f"{self.path} was replaced again and again while it was opened")


class SqliteConnection(Connection):
    """
    One connection to a file.

    The file may be removed or replaced while it is open. SQLite goes on in a file that has no name any more, and
    another client locks in the new one. In the modes with a rollback journal it checks before it writes, in WAL mode it
    does not. So lockkit checks before and after each statement which file is at `path`; empty for a database in memory,
    shared under a name.
    """

    def __init__(self, dbapi: sqlite3.Connection, path: str, file: tuple[int, int] | None, runtime: Runtime) -> None:
        super().__init__(runtime, -1)
        self.dbapi: sqlite3.Connection | None = dbapi
        self._cursor: sqlite3.Cursor | None = dbapi.cursor()
        self._path = path
        self._file = file

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        return await self._call(partial(self._run, statement, parameters), seconds)

    def _run(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        cursor = self._cursor
        assert cursor is not None
        cursor.execute(statement.numbered, tuple(parameters))
        rows = cursor.fetchall() if cursor.description else ()
        if self.stale:
            raise ConnectionAbortedError(f"{self._path} was removed or replaced while it was in use")
        return Result(rows, cursor.rowcount, 0)

    @property
    def stale(self) -> bool:
        return bool(self._path) and identity(self._path) != self._file

    def terminate(self) -> None:
        if self._worker is None:
            self._close()
        elif self.dbapi is not None:
            self._worker.end(self._close)

    async def close(self) -> None:
        if self._worker is None or self.dbapi is None:
            self.terminate()
        else:
            await self._worker.end(self._close).wait(CLOSE_SECONDS)

    def _close(self) -> None:
        # First the cursor: the traceback of an interrupt may refer to it, and while it is open SQLite keeps the lock of
        # a statement whose rows were not read, although the connection was closed (sqlite3_close_v2).
        for one in (self._cursor, self.dbapi):
            if one is not None:
                end_quietly(one.close)
        self._cursor = self.dbapi = None


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
        raise ConfigurationError(f"{path} cannot be used for locks: {error}") from error
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
