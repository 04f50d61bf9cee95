"""
The tables: their columns, and how lockkit makes them.

`lock_table` is the one description. lockkit makes the DDL from it, `create` runs that, and applications that keep their
schema with Alembic put the table into their own ``MetaData``. ``lockkit migrate`` works on any backend that has
``tables`` and a ``database``.

Several processes may start at once and all find no table: ``CREATE TABLE IF NOT EXISTS`` is not atomic on PostgreSQL
(two of them can meet in ``pg_type``), so "it exists already" counts as success if the table is there then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Boolean, Column, MetaData, String, Table, Text, event, inspect, text
from sqlalchemy.dialects.mysql import MEDIUMTEXT, VARBINARY, VARCHAR
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import TEXT as PG_TEXT
from sqlalchemy.schema import CreateColumn, CreateTable

from lockkit.backends.sql.database import Database
from lockkit.backends.sql.errors import AlreadyThere, MissingTable
from lockkit.backends.sql.statement import Statement
from lockkit.errors import ConfigurationError, LockError
from lockkit.validation import METADATA_BYTES_MAX

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy import Dialect as SqlDialect


TABLE = "lockkit_locks"
"""Name of the lock table unless ``table=`` says otherwise."""

BEYOND_LOCKS = {"lockkit": "beyond locks"}
"""The ``info`` of columns without which locks work."""

_STORAGE = "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000"
"""Of PostgreSQL: room in each page for new versions of its rows, and soon cleaned up. Each acquisition is an update."""

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_TABLE = re.compile(rf"(?:({_IDENTIFIER})\.)?({_IDENTIFIER})")


def parse_table(value: object) -> str:
    """Parse the option ``table``: a name, or a schema and a name with a dot between them."""
    if isinstance(value, str) and _TABLE.fullmatch(value):
        return value
    message = "it must be a name of letters, digits and _, at most 63 long, or two of them as schema.name"
    raise ValueError(message)


def lock_table(metadata: MetaData | None = None, name: str = TABLE) -> Table:
    """Describe the lock table, for Alembic or ``MetaData.create_all``."""
    key: String = PG_TEXT(collation="C").with_variant(VARBINARY(255), "mysql", "mariadb").with_variant(Text(), "sqlite")
    long = Text().with_variant(VARCHAR(METADATA_BYTES_MAX, charset="ascii"), "mysql", "mariadb")
    schema, _, plain = name.rpartition(".")
    zero, no = text("0"), text("false")
    table = Table(
        plain,
        metadata if metadata is not None else MetaData(),
        Column("name", key, primary_key=True),
        # NULL when free. A foreign writer that sets owner and expires_at_us holds the lock.
        Column("owner", key),
        Column("token", BigInteger, nullable=False, server_default=zero),
        Column("expires_at_us", BigInteger, nullable=False, server_default=zero),
        # Written by the owner in metadata_owner; a holder that is not that owner is a foreign client.
        Column("metadata", long),
        Column("metadata_owner", key),
        # The owner whose lock break_lock broke last.
        Column("broken_owner", key),
        # A client waits, and the release must notify it by NOTIFY.
        Column("wanted", Boolean, nullable=False, server_default=no),
        # The note on the lock, and the end of its life. Only what reads and writes notes names these columns.
        Column("note", Text().with_variant(MEDIUMTEXT(charset="utf8mb4"), "mysql", "mariadb"), info=BEYOND_LOCKS),
        Column("note_until_us", BigInteger, nullable=False, server_default=zero, info=BEYOND_LOCKS),
        # Readers or permits; the writer that waits for them, and until when no reader gets in before it.
        # Only what they need names these columns.
        Column(
            "shares",
            Text().with_variant(MEDIUMTEXT(charset="utf8mb4"), "mysql", "mariadb").with_variant(JSONB(), "postgresql"),
            info=BEYOND_LOCKS,
        ),
        Column("writer", key, info=BEYOND_LOCKS),
        Column("writer_until_us", BigInteger, nullable=False, server_default=zero, info=BEYOND_LOCKS),
        schema=schema or None,
        mysql_engine="InnoDB",
        sqlite_with_rowid=False,
    )
    return with_fillfactor(table)


def with_fillfactor(table: Table) -> Table:
    """Have PostgreSQL store a table as one whose rows are often updated, however the table is made."""
    # The option postgresql_with would be enough, but SQLAlchemy 2.0 has it for indexes only.
    table.info["lockkit_storage"] = _STORAGE

    def store(made: Table, connection: Connection, **_: object) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"ALTER TABLE {quoted(made, connection.dialect)} SET ({_STORAGE})"))

    event.listen(table, "after_create", store)
    return table


def quoted(table: Table, dialect: SqlDialect) -> str:
    """Return the name of a table as SQL writes it."""
    return dialect.identifier_preparer.format_table(table)


def ddl(table: Table, dialect: SqlDialect) -> str:
    """Return the statement that makes a table if it is not there."""
    lines = str(CreateTable(table, if_not_exists=True).compile(dialect=dialect)).strip().splitlines()
    if dialect.name == "postgresql" and (storage := table.info.get("lockkit_storage")):
        lines[-1] += f" WITH ({storage})"
    return "\n".join(line.replace("\t", "    ").rstrip() for line in lines)


async def create(database: Database, tables: Sequence[Table], answer_by: float = inf) -> None:
    """Make tables that are not there. Any number of processes may do it at once."""
    for table in tables:
        try:
            await _create_one(database, table, answer_by)
        except LockError as error:
            raise _cannot_make(database, table, error) from error.__cause__


async def _create_one(database: Database, table: Table, answer_by: float) -> None:
    dialect = database.engine.dialect
    try:
        await database.run(Statement(ddl(table, dialect), once=True), answer_by=answer_by)
    except AlreadyThere as error:
        # Another client has made it just now; or it is something else that has the name: on PostgreSQL a type.
        look = Statement(f"SELECT 1 FROM {quoted(table, dialect)} WHERE 1 = 0", once=True)
        try:
            await database.run(look, again=True, answer_by=answer_by)
        except MissingTable:
            raise error from error.__cause__


def _cannot_make(database: Database, table: Table, failure: LockError) -> LockError:
    error = failure.__cause__
    if error is None or database.kind(error) not in {"denied", "read-only", "no table"}:
        return failure
    message = (
        f"{database.url} has no table {table.fullname}, and it cannot be made: {failure}. Let a user with that right "
        "run lockkit migrate, or what lockkit migrate --sql prints"
    )
    return ConfigurationError(message, backend=database.url)


async def migrate(database: Database, tables: Sequence[Table]) -> list[str]:
    """Make tables that are not there, and columns that later versions added."""
    changes = []
    for table in tables:
        before = columns_of(database, table)
        if before is None:
            await create(database, [table])
            if columns_of(database, table) is None:
                message = (
                    f"{database.url} has something else named {table.fullname}, such as an index or a sequence: rename "
                    "that, or give another table="
                )
                raise ConfigurationError(message, backend=database.url)
            changes.append(f"made table {table.fullname}")
            continue
        missing = [column for column in table.columns if column.name not in before]
        for column in missing:
            spec = CreateColumn(column).compile(dialect=database.engine.dialect)
            text = f"ALTER TABLE {quoted(table, database.engine.dialect)} ADD COLUMN {spec}"
            with suppress(AlreadyThere):  # others may add it at the same time
                await database.run(Statement(text, once=True))
        names = ", ".join(column.name for column in missing)
        changes.append(f"table {table.fullname} " + (f"lacked {names}: added" if missing else "is as it should be"))
    return changes


def columns_of(database: Database, table: Table) -> set[str] | None:
    """Name the columns that a table has; None if it is not there."""
    try:
        with database.engine.connect() as connection:
            found = inspect(connection)
            if not found.has_table(table.name, schema=table.schema):
                return None
            return {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
    except database.driver_errors as error:
        raise database.translate(error) from error


async def drop(database: Database, tables: Iterable[Table]) -> None:
    """Drop tables, with the locks and tokens in them, where they exist."""
    for table in tables:
        name = quoted(table, database.engine.dialect)
        columns = ", ".join(column.name for column in table.columns if column.info != BEYOND_LOCKS)
        try:
            await database.run(Statement(f"SELECT {columns} FROM {name} WHERE 1 = 0", once=True), again=True)
        except MissingTable:
            continue
        await database.run(Statement(f"DROP TABLE IF EXISTS {name}"), again=True)
