"""What the doctor looks at in every SQL database: tables, rights, round trip, clock."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.connection import Connection
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.schema import BEYOND_LOCKS, columns_of, quoted
from lockkit.backends.sql.statement import Parameter, Statement
from lockkit.doctor import timing
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import LockError

if TYPE_CHECKING:
    from sqlalchemy import Table


_PAGE = "how-to/check-your-servers.md#sql-databases"

FULL = 0.9
"""Part of a limit from which on it is nearly reached. Higher tells later, lower cries wolf."""

TABLE_MISSING = Check("sql-table-missing", Severity.ERROR, "No lock can be taken.", _PAGE)
TABLE_TO_BE_MADE = Check("sql-table-to-be-made", Severity.INFO, "None: the first lock makes the table.", _PAGE)
COLUMNS_MISSING = Check(
    "sql-columns-missing", Severity.ERROR, "No lock can be taken: the table is of another version of lockkit.", _PAGE
)
FURTHER_COLUMNS_MISSING = Check(
    "sql-further-columns-missing",
    Severity.WARNING,
    "Read locks, semaphores and notes (client.once) cannot be used: the table is of another version of lockkit. Locks "
    "work.",
    _PAGE,
)
RIGHTS = Check("sql-rights", Severity.ERROR, "Locks cannot be taken, renewed or released.", _PAGE)
READ_ONLY = Check(
    "sql-read-only", Severity.ERROR, "The server takes no writes, so no lock can be taken, renewed or released.", _PAGE
)
TLS_UNVERIFIED = Check(
    "sql-tls-unverified",
    Severity.WARNING,
    "Whoever stands between client and server can pretend to be the server: read the login, grant and free locks.",
    _PAGE,
)
NO_TLS = Check(
    "sql-no-tls",
    Severity.WARNING,
    "Anyone on the network path can read the password, and break any lock with it.",
    _PAGE,
)
NO_PASSWORD = Check("sql-no-password", Severity.WARNING, "Anyone who reaches the server can break any lock.", _PAGE)
CONNECTIONS = Check(
    "sql-connections",
    Severity.WARNING,
    "When no connection is left, clients cannot connect: a holder that reconnects cannot renew. In the modes row and "
    "advisory every lock that is held or waited for takes one.",
    _PAGE,
)


class SqlServer:
    """
    A database and one connection to it, made as lockkit makes them.

    Attributes:
        database: The database.
        tables: What the backend needs there.
        connection: The connection.
    """

    def __init__(self, database: Database, tables: Sequence[Table], connection: Connection) -> None:
        """Take the connection."""
        self.database = database
        self.tables = tables
        self.connection = connection

    async def ask(self, text: str, *parameters: Parameter) -> list[tuple[Any, ...]]:
        """Run a query."""
        try:
            return list((await self.connection.run(Statement(text), parameters)).rows)
        except self.database.driver_errors as error:
            raise self.database.translate(error) from error

    async def refuses(self, text: str) -> bool:
        """Tell whether this user has no right to a statement. It must be one that changes nothing."""
        try:
            await self.connection.run(Statement(text))
        except self.database.driver_errors as error:
            if self.database.kind(error) == "denied":
                return True
            raise self.database.translate(error) from error
        return False

    async def time(self, examination: Examination) -> None:
        """Measure round trip and clock."""
        where = examination.url.safe_text
        await examination.time(where, lambda: self.ask("SELECT 1"))
        now = f"SELECT {self.database.dialect.now_us}"

        async def clock() -> float:
            ((micros,),) = await self.ask(now)
            return int(micros) / 1e6

        timing.judge_clock(examination, where, *await timing.clock_offset(examination.runtime, clock))

    def columns(self, table: Table) -> set[str] | None:
        """Name the columns that a table has; None if it is not there, or not to be seen."""
        try:
            return columns_of(self.database, table)
        except LockError as error:
            if error.__cause__ is not None and self.database.kind(error.__cause__) == "denied":
                return None
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self.connection.close()
        await self.database.close()


def migrate_command(examination: Examination) -> str:
    """Return the command that makes the tables, for a shell. It shows no password."""
    return f"lockkit migrate {shlex.quote(examination.url.safe_text)}"


async def open_server(examination: Examination) -> SqlServer:
    """Connect as the backend does."""
    opened = examination.backend_class.open(examination.url, examination.options, examination.host)
    backend = cast("SqlBackend", opened)
    return SqlServer(backend.database, backend.tables, await backend.database.connect())


async def examine_tables(examination: Examination, server: SqlServer, *, creatable: bool) -> list[Table]:
    """Look whether the tables are there as they should be."""
    where, present = examination.url.safe_text, []
    for table in server.tables:
        columns = server.columns(table)
        if columns is None:
            auto = bool(examination.options.get("auto_create", True))
            if creatable and auto:
                seen = f"There is no table {table.fullname}, and this user may make it."
                examination.find(TABLE_TO_BE_MADE, where, seen, f"Nothing to do; or: {migrate_command(examination)}")
            else:
                why = "auto_create is off" if creatable else "this user may not make it"
                seen = f"There is no table {table.fullname}, and {why}."
                fix = f"As a user who may make tables: {migrate_command(examination)}"
                examination.find(TABLE_MISSING, where, seen, fix)
            continue
        present.append(table)
        missing = [column for column in table.columns if column.name not in columns]
        further = [column.name for column in missing if column.info == BEYOND_LOCKS]
        needed = [column.name for column in missing if column.name not in further]
        for check, names in ((COLUMNS_MISSING, needed), (FURTHER_COLUMNS_MISSING, further)):
            if names:
                seen = f"The table {table.fullname} has no {', '.join(names)}."
                examination.find(check, where, seen, migrate_command(examination))
    return present


def find_rights(examination: Examination, server: SqlServer, table: Table, missing: Sequence[str], grant: str) -> None:
    """Take down which rights to a table are missing; `grant` is a GRANT with ``{rights}`` and ``{table}``."""
    if missing:
        name = quoted(table, server.database.engine.dialect)
        seen = f"This user has no right to {', '.join(missing)} on {table.fullname}."
        fix = grant.format(rights="SELECT, INSERT, UPDATE, DELETE", table=name)
        examination.find(RIGHTS, examination.url.safe_text, seen, fix)


def examine_network(examination: Examination, *, encrypted: bool, verified: bool, loopback: bool, fix: str) -> None:
    """Judge how the connection was made."""
    if loopback:
        return
    if not encrypted:
        seen = "The connection crosses a network and is not encrypted."
        examination.find(NO_TLS, examination.url.safe_text, seen, fix)
    elif not verified:
        seen = "The connection crosses a network, and nothing checks that the server is the host of the URL."
        examination.find(TLS_UNVERIFIED, examination.url.safe_text, seen, fix)


def examine_connections(examination: Examination, used: int, most: int, fix: str) -> None:
    """Judge how many connections the server has left."""
    if used > FULL * most:
        seen = f"{used} of {most} connections are in use."
        examination.find(CONNECTIONS, examination.url.safe_text, seen, fix)
