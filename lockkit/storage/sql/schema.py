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
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Literal, TypeVar

from sqlalchemy import Connection, Engine, exc, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from lockkit.backends.sql.dialect import dialect_named
from lockkit.backends.sql.schema import Column, Table, parse_table
from lockkit.errors import ConfigurationError, Unsupported
from lockkit.storage.sql.client import kind_of, spare, translating
from lockkit.validation import shown

T = TypeVar("T")

Family = Literal["postgresql", "mysql", "sqlite"]
Kind = Literal["locks", "fences"]

KEYS: dict[Family, str] = {
    "postgresql": "convert_from(decode(:{0}, 'hex'), 'UTF8')",
    "mysql": "UNHEX(:{0})",
    "sqlite": ":{0}",
}
"""How a statement writes a name that it takes as the parameter ``{0}``, see `key_of`."""

# The bytes of "lockkit": the advisory lock under which one process at a time creates tables.
ADVISORY_KEY = int.from_bytes(b"lockkit")

_ready: weakref.WeakKeyDictionary[Engine, set[str]] = weakref.WeakKeyDictionary()


def family_of(name: str) -> Family:
    """Return which family of databases a dialect of SQLAlchemy's is for."""
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
        raise ConfigurationError(f"table={shown(table)} is not understood: {error}") from None
    return Table(f"{name}{suffix}", ()).quoted(family)


def ddl(family: Family, *, locks: str | None = None, fences: str | None = None) -> list[str]:
    """Return the statements that create the tables if they are missing."""
    name, scope = (Column(column, "key", null=False).spec(family) for column in ("name", "scope"))
    engine = " ENGINE=InnoDB" if family == "mysql" else ""
    made = []
    if locks is not None:
        # The tokens first: `with_table` looks for the other table, and on MariaDB others see each statement at once.
        tokens = quoted(family, locks, "_token")
        if family == "postgresql":
            made.append(f"CREATE SEQUENCE IF NOT EXISTS {tokens}")
        elif family == "mysql":
            made.append(f"CREATE TABLE IF NOT EXISTS {tokens} (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY){engine}")
        made.append(
            f"CREATE TABLE IF NOT EXISTS {quoted(family, locks)} ({name} PRIMARY KEY, "
            f"owner VARCHAR(64), token BIGINT NOT NULL DEFAULT 0){engine}"
        )
    if fences is not None:
        made.append(
            f"CREATE TABLE IF NOT EXISTS {quoted(family, fences)} ({scope} PRIMARY KEY, "
            f"token BIGINT NOT NULL, read_token BIGINT NOT NULL DEFAULT 0){engine}"
        )
    return made


def create(connection: Connection, *, locks: str | None = None, fences: str | None = None) -> None:
    """Create tables if they are missing, in the transaction of a connection."""
    family = family_of(connection.dialect.name)
    if family == "postgresql":
        # Without it, one of two sessions that create the same name at once fails, despite IF NOT EXISTS.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_KEY})
    for statement in ddl(family, locks=locks, fences=fences):
        connection.execute(text(statement))


def create_at(target: object, **tables: str | None) -> Awaitable[None] | None:
    """Create the tables at an engine or connection. The result must be awaited for asyncio's."""

    async def make_there(target: AsyncEngine | AsyncConnection) -> None:
        begun = target.begin() if isinstance(target, AsyncEngine) else nullcontext(target)
        with translating(target.sync_engine):
            async with begun as connection:
                await connection.run_sync(create, **tables)

    if isinstance(target, (AsyncEngine, AsyncConnection)):
        return make_there(target)
    if isinstance(target, (Engine, Connection)):
        begun = target.begin() if isinstance(target, Engine) else nullcontext(target)
        with translating(target.engine), begun as connection:
            create(connection, **tables)
        return None
    raise ConfigurationError(f"target must be a SQLAlchemy engine or connection, not {type(target).__name__}")


def with_table(connection: Connection, kind: Kind, table: str, ask: Callable[[], T], *, auto_create: bool) -> T:
    """Query a table, which is created if it is missing, once for each engine and process."""
    family = family_of(connection.dialect.name)
    ready = _ready.setdefault(connection.engine, set())
    if auto_create and family != "sqlite" and table not in ready:
        with spare(connection.engine) as own:
            schema, _, name = table.rpartition(".")
            # A user without the right to create tables can use one that is there.
            if not inspect(own).has_table(name, schema=schema or None):
                create(own, **{kind: table})
                own.commit()
        ready.add(table)
    try:
        return ask()
    except exc.DBAPIError as error:
        if kind_of(error) != "no table":
            raise
        ready.discard(table)
        if family != "sqlite" or not auto_create:
            raise
    create(connection, **{kind: table})  # a rollback removes it again
    return ask()
