"""
A lock inside the application's own transaction.

::

    with Session(engine) as session, session.begin():
        lock_in(session, "stock:42")
        product = session.get(Product, 42)
        product.stock -= 1

`lock_in` takes the lock on the transaction's own connection. The lock ends with the transaction: by commit, by
rollback, or when the connection is lost. There is no ttl, no renewal and no second connection, and the next holder
always sees what this one has committed. (A lock that is released *before* the transaction commits lets the next holder
read old data.)

Only callers of `lock_in` on the same database exclude one another: other locks of lockkit are stored elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from lockkit.storage import load
from lockkit.storage.sql import FENCES
from lockkit.storage.sql import LOCKS as TABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from datetime import timedelta

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from lockkit.storage.sql.client import ApplicationTransaction, Asynchronous, Blocking
    from lockkit.units import Seconds

__all__ = ["FENCES", "TABLE", "TransactionLock", "create_tables", "ddl", "lock_in"]


@dataclass(frozen=True, slots=True)
class TransactionLock:
    """
    A name locked until the transaction ends.

    Attributes:
        name: What is locked.
        owner: Random id of the transaction.
        token: Fencing token. For a name it increases with each transaction that gets the lock, also when the one before
            rolled back.
    """

    name: str
    owner: str
    token: int


@overload
def lock_in(
    target: Blocking,
    name: str,
    *,
    timeout: Seconds | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> TransactionLock: ...


@overload
def lock_in(
    target: Asynchronous,
    name: str,
    *,
    timeout: Seconds | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> Awaitable[TransactionLock]: ...


def lock_in(
    target: Blocking | Asynchronous,
    name: str,
    *,
    timeout: Seconds | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> TransactionLock | Awaitable[TransactionLock]:
    """
    Lock a name until the transaction ends. Awaited for an `AsyncSession` or `AsyncConnection`.

    **Take the lock before you read.** What you read earlier may have changed before the lock was granted. At REPEATABLE
    READ and SERIALIZABLE a whole transaction reads the state of its first statement; if that was before the last holder
    committed, `lock_in` refuses, because the transaction would never see that commit.

    A second call with the same name in the same transaction returns at once, with the same token. After ROLLBACK TO
    SAVEPOINT, treat a lock that was taken after the savepoint as released: PostgreSQL releases it at once; MariaDB,
    MySQL and SQLite keep it until the transaction ends.

    On PostgreSQL an uncontended call takes one round trip, with a timeout two. On MariaDB and MySQL it takes five, and
    the first use of a name in a process opens a second connection for a moment. **On SQLite it locks the whole database
    for writers**, whatever the name: SQLite has one writer. There, call it before the first savepoint
    (``begin_nested``), unless SQLAlchemy sends BEGIN: the driver sends none before a savepoint, so a lock that was
    taken inside would end with the savepoint.

    Args:
        target: A SQLAlchemy `Session` or `Connection`, or one of their asyncio forms, not in autocommit. Its
            transaction begins now if it has not begun yet.
        name: As for other locks: 1 to 255 UTF-8 bytes without NUL.
        timeout: Seconds to wait; 0 tries once, None waits as long as the database allows.
        table: The table of the names, as ``table`` or ``schema.table``.
        auto_create: Create the table if it is missing. Without it, see `create_tables`.

    Raises:
        LockTimeout: Another transaction held the lock all the time; this one is unchanged and can go on. Also raised
            for a deadlock, for a transaction that began too early (see above), and when PostgreSQL's ``lock_timeout``
            or ``statement_timeout``, or MariaDB's ``max_statement_time``, ends the wait: the message then tells you to
            roll back and run the transaction again. `lockkit.optimistic.transact` does that.
        BackendUnavailable: The database gave no usable answer; the transaction has failed.
        ConfigurationError: Wrong name, timeout or target, no transaction, a missing table or right.
        Unsupported: The database is not PostgreSQL, MariaDB, MySQL or SQLite.
    """
    transaction: ApplicationTransaction = load("sql.client", "lockkit.sql").ApplicationTransaction(target)
    acquire = load("sql.lock_in", "lockkit.sql").acquire

    async def locked() -> TransactionLock:
        return TransactionLock(*await acquire(transaction, name, timeout, table=table, auto_create=auto_create))

    return transaction.ask(locked())


@overload
def create_tables(target: Engine | Connection, *, locks: str | None = TABLE, fences: str | None = FENCES) -> None: ...


@overload
def create_tables(
    target: AsyncEngine | AsyncConnection, *, locks: str | None = TABLE, fences: str | None = FENCES
) -> Awaitable[None]: ...


def create_tables(target: Any, *, locks: str | None = TABLE, fences: str | None = FENCES) -> Any:
    """
    Create the tables of `lock_in` and `lockkit.fencing.SqlGuard` if they are missing. Awaited for asyncio.

    Several processes may call it at once. You need it only if ``auto_create`` is off or the application has no right to
    create tables; for Alembic see `ddl`.

    Args:
        target: An engine, on which lockkit commits; or a connection, whose transaction you commit.
        locks: Name of the table of `lock_in`; None leaves it out.
        fences: Name of the table of the guard; None leaves it out.

    Raises:
        ConfigurationError: A right is missing, or `target` is neither an engine nor a connection.
        BackendUnavailable: The database gave no usable answer.
    """
    return load("sql.schema", "lockkit.sql").create_at(target, locks=locks, fences=fences)


def ddl(dialect: str, *, locks: str | None = TABLE, fences: str | None = FENCES) -> list[str]:
    """
    Return the statements with which `create_tables` creates the tables, for a migration. No I/O.

    Args:
        dialect: ``postgresql``, ``mariadb``, ``mysql`` or ``sqlite``.
        locks: See `create_tables`.
        fences: See `create_tables`.

    Raises:
        Unsupported: lockkit does not support that database.
    """
    schema = load("sql.schema", "lockkit.sql")
    statements: list[str] = schema.ddl(schema.family_of(dialect), locks=locks, fences=fences)
    return statements
