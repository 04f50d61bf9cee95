"""
The tables: their columns, how lockkit makes them, and the keys of locks in them.

A `Table` is the one description. lockkit makes the DDL from it, `create` runs that, and `lock_table` makes SQLAlchemy's
form of it for applications that keep their schema with Alembic. ``lockkit migrate`` works on any backend that has
``tables`` and a ``database``.

The key of a lock is its name, and for what lives apart from the locks a key that no lock can have.

Several processes may start at once and all find no table: ``CREATE TABLE IF NOT EXISTS`` is not atomic on PostgreSQL
(two of them can meet in ``pg_type``), so "it exists already" counts as success if the table is there then.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lockkit.backend import apart, split_space
from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import AlreadyThere, MissingTable
from lockkit.errors import ConfigurationError, LockError
from lockkit.validation import METADATA_BYTES_MAX, NAME_BYTES_MAX, lock_name

if TYPE_CHECKING:
    import sqlalchemy


TABLE = "lockkit_locks"
"""Name of the lock table unless ``table=`` says otherwise."""

_STORAGE = "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000"
"""Of PostgreSQL: room in each page for new versions of its rows, and soon cleaned up. Each acquisition is an update."""

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_TABLE = re.compile(rf"(?:({_IDENTIFIER})\.)?({_IDENTIFIER})")


def parse_table(value: object) -> str:
    """Parse the option ``table``: a name, or a schema and a name with a dot between them."""
    if isinstance(value, str) and _TABLE.fullmatch(value):
        return value
    raise ValueError("it must be a name of letters, digits and _, at most 63 long, or two of them as schema.name")


Kind = Literal["key", "number", "flag", "ascii", "text", "json"]

_LONG = "MEDIUMTEXT CHARACTER SET utf8mb4"
_TYPES: dict[str, dict[Kind, str]] = {
    "postgresql": {"key": 'TEXT COLLATE "C"', "json": "JSONB"},
    "mysql": {
        "key": "VARBINARY(255)",  # text is padded with spaces before it is compared, even with a binary collation
        "ascii": f"VARCHAR({METADATA_BYTES_MAX}) CHARACTER SET ascii",
        "text": _LONG,
        "json": _LONG,
    },
    "sqlite": {},
}
_COMMON_TYPES: dict[Kind, str] = {"number": "BIGINT", "flag": "BOOLEAN"}
"""And TEXT for all others."""


class Column(NamedTuple):
    """One column."""

    name: str
    kind: Kind  # of its values: ``key`` is compared as bytes
    default: str | None = None  # in SQL; None: there is none
    null: bool = True  # it may be NULL, if it has no default
    beyond_locks: bool = False  # locks work without it: only what needs it names it

    def spec(self, dialect: str) -> str:
        """Describe it as CREATE TABLE and ADD COLUMN do."""
        kind = _TYPES[dialect].get(self.kind) or _COMMON_TYPES.get(self.kind, "TEXT")
        default = "" if self.default is None else f" DEFAULT {self.default}"
        return f"{self.name} {kind}{default}{'' if self.null and self.default is None else ' NOT NULL'}"


@dataclass(frozen=True)
class Table:
    """One table; its first column is the primary key."""

    fullname: str  # as in ``table=``: a name, or a schema and a name
    columns: tuple[Column, ...]
    busy: bool = True  # its rows are often updated

    @property
    def schema(self) -> str:
        return self.fullname.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.fullname.rpartition(".")[2]

    def quoted(self, dialect: str) -> str:
        """Return its name as SQL writes it."""
        mark = "`" if dialect == "mysql" else '"'
        return ".".join(f"{mark}{part}{mark}" for part in self.fullname.split("."))

    def ddl(self, dialect: str) -> str:
        """Return the statement that makes it if it is not there."""
        lines = ",\n    ".join([column.spec(dialect) for column in self.columns])
        end = {"mysql": " ENGINE=InnoDB", "sqlite": " WITHOUT ROWID"}.get(dialect, f" WITH ({_STORAGE})" * self.busy)
        key = self.columns[0].name
        return f"CREATE TABLE IF NOT EXISTS {self.quoted(dialect)} (\n    {lines},\n    PRIMARY KEY ({key})\n){end}"


_LOCK_COLUMNS = (
    Column("name", "key", null=False),
    # NULL when free. A foreign writer that sets owner and expires_at_us holds the lock.
    Column("owner", "key"),
    Column("token", "number", "0"),
    Column("expires_at_us", "number", "0"),
    # Written by the owner in metadata_owner; a holder that is not that owner is a foreign client.
    Column("metadata", "ascii"),
    Column("metadata_owner", "key"),
    # The owner whose lock break_lock broke last.
    Column("broken_owner", "key"),
    # A client waits, and the release must notify it by NOTIFY.
    Column("wanted", "flag", "false"),
    # The note on the lock, and the end of its life. Only what reads and writes notes names these columns.
    Column("note", "text", beyond_locks=True),
    Column("note_until_us", "number", "0", beyond_locks=True),
    # Readers or permits; the writer that waits for them, and until when no reader gets in before it.
    Column("shares", "json", beyond_locks=True),
    Column("writer", "key", beyond_locks=True),
    Column("writer_until_us", "number", "0", beyond_locks=True),
)


def locks(name: str) -> Table:
    """Describe the lock table; `name` as in ``table=``."""
    return Table(name, _LOCK_COLUMNS)


def lock_table(metadata: sqlalchemy.MetaData | None = None, name: str = TABLE) -> sqlalchemy.Table:
    """Describe the lock table for SQLAlchemy: for Alembic or ``MetaData.create_all``."""
    import sqlalchemy as sa  # noqa: PLC0415 - lockkit itself does without
    from sqlalchemy.dialects import mysql, postgresql  # noqa: PLC0415

    long = sa.Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4"), "mysql", "mariadb")
    key = postgresql.TEXT(collation="C").with_variant(mysql.VARBINARY(255), "mysql", "mariadb")
    types: dict[Kind, sa.types.TypeEngine[Any]] = {
        "key": key.with_variant(sa.Text(), "sqlite"),
        "number": sa.BigInteger(),
        "flag": sa.Boolean(),
        "ascii": sa.Text().with_variant(mysql.VARCHAR(METADATA_BYTES_MAX, charset="ascii"), "mysql", "mariadb"),
        "text": long,
        "json": long.with_variant(postgresql.JSONB(), "postgresql"),
    }
    columns = [
        sa.Column(
            one.name,
            types[one.kind],
            primary_key=one is _LOCK_COLUMNS[0],
            nullable=one.null and one.default is None,
            server_default=None if one.default is None else sa.text(one.default),
        )
        for one in _LOCK_COLUMNS
    ]
    schema, _, plain = name.rpartition(".")
    made = sa.Table(
        plain,
        metadata if metadata is not None else sa.MetaData(),
        *columns,
        schema=schema or None,
        mysql_engine="InnoDB",
        sqlite_with_rowid=False,
    )

    # The option postgresql_with would be enough, but SQLAlchemy 2.0 has it for indexes only.
    def store(table: sa.Table, connection: sa.Connection, **_: object) -> None:
        if connection.dialect.name == "postgresql":
            quoted = connection.dialect.identifier_preparer.format_table(table)
            connection.execute(sa.text(f"ALTER TABLE {quoted} SET ({_STORAGE})"))

    sa.event.listen(made, "after_create", store)
    return made


async def create(database: Database, tables: Sequence[Table], answer_by: float = inf) -> None:
    """Make tables that are not there. Any number of processes may do it at once."""
    dialect = database.dialect.name
    for table in tables:
        try:
            await database.run(Statement(table.ddl(dialect)), answer_by=answer_by)
        except AlreadyThere as error:
            # Another client has made it just now; or it is something else that has the name: on PostgreSQL a type.
            look = Statement(f"SELECT 1 FROM {table.quoted(dialect)} WHERE 1 = 0")
            try:
                await database.run(look, again=True, answer_by=answer_by)
            except MissingTable:
                raise error from error.__cause__
        except LockError as error:
            cause = error.__cause__
            if cause is None or database.kind(cause) not in {"denied", "read-only", "no table"}:
                raise
            message = (
                f"{database.url} has no table {table.fullname}, and it cannot be made: {error}. Let a user with that "
                "right run lockkit migrate, or what lockkit migrate --sql prints"
            )
            raise ConfigurationError(message, backend=database.url) from cause


async def migrate(database: Database, tables: Sequence[Table]) -> list[str]:
    """Make tables that are not there, and columns that later versions added."""
    changes = []
    for table in tables:
        before = await columns_of(database, table)
        if before is None:
            await create(database, [table])
            if await columns_of(database, table) is None:
                message = (
                    f"{database.url} has something else named {table.fullname}, such as an index or a sequence: rename "
                    "that, or give another table="
                )
                raise ConfigurationError(message, backend=database.url)
            changes.append(f"made table {table.fullname}")
            continue
        missing = [column for column in table.columns if column.name not in before]
        for column in missing:
            dialect = database.dialect.name
            text = f"ALTER TABLE {table.quoted(dialect)} ADD COLUMN {column.spec(dialect)}"
            with suppress(AlreadyThere):  # others may add it at the same time
                await database.run(Statement(text))
        names = ", ".join(column.name for column in missing)
        changes.append(f"table {table.fullname} " + (f"lacked {names}: added" if missing else "is as it should be"))
    return changes


_COLUMNS = {
    # A table, a view or the like; not an index or a sequence.
    "postgresql": Statement(
        "SELECT a.attname FROM pg_class c LEFT JOIN pg_attribute a"
        " ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " WHERE c.oid = to_regclass($1) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"
    ),
    "mysql": Statement(
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = COALESCE(NULLIF($1, ''), DATABASE()) AND table_name = $2"
    ),
    "sqlite": Statement("SELECT name FROM pragma_table_info($2)"),
}


async def columns_of(database: Database, table: Table) -> set[str] | None:
    """Name the columns that a table has; None if it is not there, or not to be seen."""
    dialect = database.dialect.name
    name = (table.quoted(dialect),) if dialect == "postgresql" else (table.schema, table.name)
    rows = (await database.run(_COLUMNS[dialect], name, again=True)).rows
    return {str(name) for (name,) in rows} if rows else None


async def drop(database: Database, tables: Iterable[Table]) -> None:
    """Drop tables, with the locks and tokens in them, where they exist."""
    for table in tables:
        name = table.quoted(database.dialect.name)
        columns = ", ".join(column.name for column in table.columns if not column.beyond_locks)
        with suppress(MissingTable):  # what has other columns is no table of lockkit's
            await database.run(Statement(f"SELECT {columns} FROM {name} WHERE 1 = 0"), again=True)
            await database.run(Statement(f"DROP TABLE IF EXISTS {name}"), again=True)


# -- keys ----------------------------------------------------------------------------------------------------------


def row_key(name: str, dialect: str) -> str:
    """Return the key of a name."""
    if name[0] != "\0":
        return name
    space, plain = split_space(name)
    if dialect != "mysql":
        # Longer than any lock name. The text ends at the last slash, so no two names have the same key.
        return f"+{space}/{plain}/".ljust(NAME_BYTES_MAX + 1, ".")
    # The column takes no more bytes than a lock name has, but, unlike PostgreSQL's, NUL.
    key = f"\0{space}\0{plain}"
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return key if len(key.encode()) <= NAME_BYTES_MAX else f"\0{space}\0\0{digest}"


def name_of_key(key: str) -> str | None:
    """Return the name from which `row_key` made a key; None if it made no such key, or only a digest is left."""
    space, plain = "", key
    if key.startswith("\0"):
        space, _, plain = key[1:].partition("\0")
    elif len(key.encode()) > NAME_BYTES_MAX and key.startswith("+"):
        space, _, plain = key[1:].rpartition("/")[0].partition("/")
    try:
        plain = lock_name(plain)
    except ConfigurationError:
        return None
    return apart(space, plain) if space else plain


def range_of(prefix: str, dialect: str) -> tuple[str, str | None]:
    """
    Return the first key of the names with a prefix, in byte order, and the first key after them; None: there is none.

    This relies on ASCII only, which has the same bytes, below those of all other characters, in each encoding that a
    database may use. So the range of ``aé`` ends with that of ``a``.
    """
    space, plain = split_space(prefix)
    head = "" if not space else f"\0{space}\0" if dialect == "mysql" else f"+{space}/"
    counted = re.match(r"[\x01-\x7e]*", plain)
    assert counted is not None, "a pattern that matches the empty string"
    text = head + counted[0]
    return head + plain, text[:-1] + chr(ord(text[-1]) + 1) if text else None
