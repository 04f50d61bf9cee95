"""
The tables of `lockkit.sql.lock_in` and `lockkit.fencing.SqlGuard`, and how they are created.

================  =========================================  ==================================================
``lockkit_tx``    ``name``, ``owner``, ``token``             a row for each name of `lockkit.sql.lock_in`
``…_token``       a sequence; on MariaDB and MySQL a table   tokens: a rollback does not give a number back
                  of an AUTO_INCREMENT number, empty
``lockkit_fences``  ``scope``, ``token``, ``read_token``     a row for each scope of `lockkit.fencing.SqlGuard`: the
                                                             newest token of a writer and that of a reader
================  =========================================  ==================================================

Names are compared as bytes. Rows are never removed: each name that was ever used has one.

lockkit creates and commits tables on a connection of its own: DDL in the application's transaction would commit it
(MariaDB, MySQL) or block others from the new table until it ends (PostgreSQL). SQLite has one writer, so there lockkit
uses the application's transaction.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection, Engine, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from lockkit.backends.sql.dialect import dialect_named
from lockkit.backends.sql.schema import parse_table
from lockkit.errors import ConfigurationError, Unsupported
from lockkit.storage.sql import FENCES, LOCKS
from lockkit.storage.sql.client import data_error, kind_of, spare
from lockkit.validation import shown

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect


Family = Literal["postgresql", "mysql", "sqlite"]
Kind = Literal["locks", "fences"]

_NAME_TYPES: dict[Family, str] = {
    # MariaDB and MySQL pad text with spaces before they compare it, even with a binary collation.
    "postgresql": 'text COLLATE "C"',
    "mysql": "VARBINARY(255)",
    "sqlite": "TEXT",
}
KEYS: dict[Family, str] = {
    "postgresql": "convert_from(decode(:{0}, 'hex'), 'UTF8')",
    "mysql": "UNHEX(:{0})",
    "sqlite": ":{0}",
}
"""How a statement writes a name that it takes as the parameter ``{0}``, see `key_of`."""

# The bytes of "lockkit": the advisory lock under which one process at a time creates tables or raises the tokens.
ADVISORY_KEY = int.from_bytes(b"lockkit")

_ready: weakref.WeakKeyDictionary[Engine, set[str]] = weakref.WeakKeyDictionary()


def family_of(dialect: Dialect | str) -> Family:
    """Return which SQL dialect family a database belongs to."""
    name = dialect if isinstance(dialect, str) else dialect.name
    try:
        return dialect_named(name).name
    except ConfigurationError:
        message = f"lockkit supports PostgreSQL, MariaDB, MySQL and SQLite, not {name}: use one of those"
        raise Unsupported(message) from None


def key_of(family: Family, name: str) -> str:
    """
    Encode a name as the parameter of a statement, see `KEYS`: in hexadecimal digits, except for SQLite.

    A str would depend on the character set of the application's connection: a SQL_ASCII database stores the bytes that
    it gets, and a driver cannot send a character that the connection's encoding lacks.
    """
    return name if family == "sqlite" else name.encode().hex()


def quoted(family: Family, table: object, suffix: str = "") -> str:
    """Quote a table's name, with its schema if it has one, for use in a statement."""
    try:
        name = parse_table(table)
    except ValueError as error:
        message = f"table={shown(table)} is not understood: {error}"
        raise ConfigurationError(message) from None
    mark = "`" if family == "mysql" else '"'
    return ".".join(f"{mark}{part}{mark}" for part in f"{name}{suffix}".split("."))


def ddl(family: Family, *, locks: str | None = LOCKS, fences: str | None = FENCES) -> list[str]:
    """Return the statements that create the tables if they are missing."""
    name = _NAME_TYPES[family]
    engine = " ENGINE=InnoDB" if family == "mysql" else ""
    made = []
    if locks is not None:
        # The tokens first: `ensure` looks for the other table, and on MariaDB others see each statement at once.
        tokens = quoted(family, locks, "_token")
        if family == "postgresql":
            made.append(f"CREATE SEQUENCE IF NOT EXISTS {tokens}")
        elif family == "mysql":
            made.append(f"CREATE TABLE IF NOT EXISTS {tokens} (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY){engine}")
        made.append(
            f"CREATE TABLE IF NOT EXISTS {quoted(family, locks)} (name {name} NOT NULL PRIMARY KEY, "
            f"owner VARCHAR(64), token BIGINT NOT NULL DEFAULT 0){engine}"
        )
    if fences is not None:
        made.append(
            f"CREATE TABLE IF NOT EXISTS {quoted(family, fences)} (scope {name} NOT NULL PRIMARY KEY, "
            f"token BIGINT NOT NULL, read_token BIGINT NOT NULL DEFAULT 0){engine}"
        )
    return made


def create(connection: Connection, *, locks: str | None = LOCKS, fences: str | None = FENCES) -> None:
    """Create the tables if they are missing, in the transaction of a connection."""
    family = family_of(connection.dialect)
    if family == "postgresql":
        # Without it, one of two sessions that create the same name at once fails, despite IF NOT EXISTS.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_KEY})
    for statement in ddl(family, locks=locks, fences=fences):
        connection.execute(text(statement))


def create_at(target: object, *, locks: str | None, fences: str | None) -> Awaitable[None] | None:
    """Create the tables at an engine or connection. The result must be awaited for asyncio's."""

    def make(connection: Connection) -> None:
        try:
            create(connection, locks=locks, fences=fences)
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise data_error(error, connection) from error

    async def make_there(engine: AsyncEngine) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(make)

    if isinstance(target, Engine):
        with target.begin() as connection:
            make(connection)
        return None
    if isinstance(target, Connection):
        make(target)
        return None
    if isinstance(target, AsyncEngine):
        return make_there(target)
    if isinstance(target, AsyncConnection):
        return target.run_sync(make)
    message = f"target must be a SQLAlchemy engine or connection, not {type(target).__name__}"
    raise ConfigurationError(message)


def ensure(connection: Connection, kind: Kind, table: str) -> None:
    """Make sure that a table exists, once for each engine and process. Not for SQLite: see `make_here`."""
    ready = _ready.setdefault(connection.engine, set())
    if table in ready:
        return
    try:
        with spare(connection.engine) as own:
            if not _there(own, table):
                create(own, **_only(kind, table))
                own.commit()
    except (exc.DBAPIError, exc.TimeoutError) as error:
        raise data_error(error, connection) from error
    ready.add(table)


def forget_if_missing(connection: Connection, table: str, error: BaseException) -> None:
    """Forget that a table exists if this error says that it is missing, so that the next `ensure` looks again."""
    if kind_of(error) == "no table":
        _ready.get(connection.engine, set()).discard(table)


def make_here(connection: Connection, kind: Kind, table: str) -> None:
    """Create a table in the application's transaction, after it was found missing. A rollback removes it again."""
    create(connection, **_only(kind, table))


def _only(kind: Kind, table: str) -> dict[str, str | None]:
    return {"locks": None, "fences": None, kind: table}


def _there(connection: Connection, table: str) -> bool:
    """Return whether a table exists, so that a user without the right to create tables can use it."""
    try:
        connection.execute(text(f"SELECT token FROM {quoted(family_of(connection.dialect), table)} LIMIT 0"))
    except exc.DBAPIError as error:
        if kind_of(error) != "no table":
            raise
        connection.rollback()
        return False
    return True
