"""The lock that schema migrations take, whichever tool runs them: in the migrated database itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lockkit.errors import ConfigurationError
from lockkit.sync import Client, connect, from_client

if TYPE_CHECKING:
    from sqlalchemy import Engine


__all__ = ["LOCK_NAME", "beside_file", "client_for", "is_in_memory"]

LOCK_NAME = "lockkit:migrations"
"""Of the lock, unless the caller gives another one."""


def client_for(engine: Engine, **options: Any) -> Client:
    """
    Make a client whose locks are rows of the engine's database, on connections of their own.

    A row needs no open transaction and no session. So ``CREATE INDEX CONCURRENTLY``, which waits for all transactions,
    does not wait for the lock, and a pooler may use another session for each statement. SQLite has one writer at a
    time, and a migration would block renewals: its lock is a file beside the database.

    Args:
        engine: The database. Stays the caller's.
        **options: As for ``lockkit.connect``.

    Raises:
        ConfigurationError: The engine's driver is for asyncio, or an option is wrong.
    """
    if engine.dialect.is_async:
        raise ConfigurationError(
            f"the engine's driver {engine.dialect.driver} is for asyncio, and migrations are locked without an event "
            "loop: pass the URL of the database with a blocking driver, such as postgresql+psycopg://…"
        )
    if engine.dialect.name == "sqlite":
        return connect(beside_file(engine.url.database or ""), **options)
    return from_client(engine, mode="table", **options)


def beside_file(database: str) -> str:
    """
    Return the URL of locks that are files in the directory ``DATABASE-lockkit``, beside an SQLite database.

    Args:
        database: Path of the database's file.

    Raises:
        ConfigurationError: The path is an SQLite URI.
    """
    if database.startswith("file:"):
        message = f"SQLite's URI {database!r} does not say where to put a lock: give the path of the file"
        raise ConfigurationError(message)
    return f"file://{quote(str(Path(database).absolute()))}-lockkit"


def is_in_memory(database: str | None) -> bool:
    """Tell whether an SQLite database is in memory: no other process has it, so there is nothing to lock."""
    name = (database or ":memory:").removeprefix("file:")
    return name.startswith(":memory:") or "mode=memory" in name
