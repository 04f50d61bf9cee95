"""
Let only one process at a time migrate a database, with Alembic or with SQLAlchemy alone.

Needs ``pip install 'lockkit[alembic]'`` and a driver of the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import ArgumentError

from lockkit.errors import ConfigurationError
from lockkit.integrations.migrations import LOCK_NAME, client_for, is_in_memory
from lockkit.sync import Client, Lease
from lockkit.units import Seconds

__all__ = ["migration_lock"]


@contextmanager
def migration_lock(
    database: str | URL | Engine | Connection,
    *,
    timeout: Seconds | timedelta | None = None,
    ttl: Seconds | timedelta | None = None,
    name: str = LOCK_NAME,
    client: Client | None = None,
    version_table: str = "alembic_version",
    version_table_schema: str | None = None,
) -> Iterator[Lease | None]:
    """
    Hold the lock of a database's migrations, in ``env.py`` around ``context.run_migrations()``, or anywhere else.

    In ``env.py`` it first compares the database's revision with the newest one. It takes no lock if they are the same,
    or if the command does not change the schema (``current``, ``check``, ``revision``, ``--sql``).

    The lock is in the migrated database, see `lockkit.integrations.migrations.client_for`. It uses a separate
    connection, so the migration can begin and end transactions freely.

    Args:
        database: A SQLAlchemy URL, an engine, or a connection that has not begun a transaction yet.
        timeout: Seconds to wait for another process's migration; None without limit.
        ttl: Seconds after which the lock of a crashed process is free. None: 30.
        name: Of the lock. Give one per schema or version table if they may be migrated at the same time.
        client: Take the lock through this client, for example on Redis. The caller closes it.
        version_table: As in ``context.configure``.
        version_table_schema: As in ``context.configure``.

    Yields:
        The lease; None if no lock was needed.

    Raises:
        LockTimeout: Another process was still migrating when the timeout ended.
        LockLost: The lease was lost during the migration, so another process may have migrated at the same time.
        BackendUnavailable: The database does not answer.
        ConfigurationError: The connection is inside a transaction, or the driver is for asyncio.
    """
    with ExitStack() as stack:
        engine = _engine_of(database, stack)
        if (client is None and _is_in_memory(engine)) or _nothing_to_do(engine, version_table, version_table_schema):
            yield None
            return
        if client is None:
            client = stack.enter_context(client_for(engine))
        yield stack.enter_context(client.lock(name, timeout=timeout, ttl=ttl))


def _engine_of(database: str | URL | Engine | Connection, stack: ExitStack) -> Engine:
    if isinstance(database, Connection):
        if database.in_transaction():
            # Its snapshot may be older than the migration that this one waits for.
            raise ConfigurationError(
                "migration_lock was given a connection inside a transaction, which may not see what the previous "
                "process has migrated: call it before you use the connection, or pass the engine"
            )
        return database.engine
    if isinstance(database, Engine):
        return database
    refused = ConfigurationError("migration_lock needs a valid URL, an Engine or a Connection of SQLAlchemy")
    if not isinstance(database, str | URL):  # SQLAlchemy 2.0.0 does not ask
        raise refused
    try:
        engine = create_engine(database, poolclass=NullPool)
    except ArgumentError:
        raise refused from None  # the other error may quote the URL, with its password
    stack.callback(engine.dispose)
    return engine


def _is_in_memory(engine: Engine) -> bool:
    # SQLAlchemy takes the query off the name.
    url = engine.url
    return engine.dialect.name == "sqlite" and (is_in_memory(url.database) or url.query.get("mode") == "memory")


def _nothing_to_do(engine: Engine, version_table: str, version_table_schema: str | None) -> bool:
    """Tell whether env.py runs for a command that changes nothing, or whose database has the newest revision."""
    try:
        from alembic import context  # noqa: PLC0415 - create_all needs no Alembic
        from alembic.migration import MigrationContext  # noqa: PLC0415
    except ImportError:
        return False
    if not hasattr(context, "config"):  # not in env.py
        return False
    if context.is_offline_mode():
        return True
    try:
        wanted = _revisions(context.get_revision_argument())
    except KeyError:  # no destination: the command only looks
        return True
    heads = _revisions(context.get_head_revisions())
    # A relative destination, such as +1, may look like an absolute one: only what is the newest is left alone. And a
    # driver for asyncio connects only in an event loop.
    if wanted != heads or engine.dialect.is_async:
        return False
    options = {"version_table": version_table, "version_table_schema": version_table_schema}
    with engine.connect() as connection:
        return set(MigrationContext.configure(connection, opts=options).get_current_heads()) == heads


def _revisions(argument: str | tuple[str, ...] | list[str] | None) -> set[str]:
    return {argument} if isinstance(argument, str) else set(argument or ())
