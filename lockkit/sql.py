"""
A lock inside the application's own transaction.

::

    with Session(engine) as session, session.begin():
        lock_in(session, "stock:42")
        product = session.get(Product, 42)
        product.stock -= 1

The lock is taken on the connection that the transaction has, and ends with it: by commit, by rollback, or when the
connection is lost. There is no ttl, no renewal and no second connection, and the next holder always sees what this one
has committed. (A lock that is released *before* the transaction commits lets the next one read old data.)

It keeps those apart who use `lock_in` on the same database, and nobody else: other locks of lockkit live elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from datetime import timedelta

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from lockkit.storage.sql.client import Asynchronous, Blocking, Place

__all__ = ["FENCES", "TABLE", "TransactionLock", "create_tables", "ddl", "lock_in"]

TABLE = "lockkit_tx"
"""The table of `lock_in`, unless told otherwise."""

FENCES = "lockkit_fences"
"""The table of `lockkit.fencing.SqlGuard`, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class TransactionLock:
    """
    A name locked until the transaction ends.

    Attributes:
        name: What is locked.
        owner: Random id of the transaction.
        token: Fencing token: for a name it grows with each transaction that is granted the lock, also if the one
            before rolled back.
    """

    name: str
    owner: str
    token: int


@overload
def lock_in(
    target: Blocking,
    name: str,
    *,
    timeout: float | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> TransactionLock: ...


@overload
def lock_in(
    target: Asynchronous,
    name: str,
    *,
    timeout: float | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> Awaitable[TransactionLock]: ...


def lock_in(
    target: Blocking | Asynchronous,
    name: str,
    *,
    timeout: float | timedelta | None = None,
    table: str = TABLE,
    auto_create: bool = True,
) -> TransactionLock | Awaitable[TransactionLock]:
    """
    Lock a name until the transaction ends. Awaited for an `AsyncSession` or `AsyncConnection`.

    **Take it before you read.** What was read before may have changed until the lock was granted. At REPEATABLE READ
    and SERIALIZABLE a whole transaction reads as of its first statement; one that began to read before the last holder
    committed is refused, as it would never see that.

    The same name again in the same transaction is granted at once, with the same token. After ROLLBACK TO SAVEPOINT
    count a lock that was taken since as gone: PostgreSQL frees it at once; MariaDB, MySQL and SQLite keep it until the
    transaction ends.

    On PostgreSQL an uncontended call is one round trip, with a timeout two. On MariaDB and MySQL it is five, and the
    first use of a name in a process opens a connection for a moment. **On SQLite it locks the whole database for
    writers**, whatever the name: SQLite has one writer.

    Args:
        target: A SQLAlchemy `Session` or `Connection`, or one of their asyncio forms, not in autocommit. Its
            transaction begins now if it has not begun yet.
        name: As for other locks: 1 to 255 UTF-8 bytes without NUL.
        timeout: Seconds to wait, 0 tries once, None waits as long as the database lets it.
        table: Where the names are, as ``table`` or ``schema.table``.
        auto_create: Make the table if it is missing. Without it, see `create_tables`.

    Raises:
        LockTimeout: Somebody else's transaction held the lock all the time; this one is as it was before and can go on.
            Also a deadlock, and a transaction that began too early (see above): the message says so, and that the
            transaction must be rolled back and run again. `lockkit.optimistic.transact` does that.
        BackendUnavailable: The database gave no usable answer; the transaction is lost.
        ConfigurationError: Wrong name, timeout or target, no transaction, a missing table or right.
        Unsupported: The database is none of PostgreSQL, MariaDB, MySQL and SQLite.
    """
    place = _place(target)
    return place.ask(_locked(place, name, timeout, table=table, auto_create=auto_create))


async def _locked(place: Place, name: object, timeout: object, *, table: str, auto_create: bool) -> TransactionLock:
    from lockkit.storage.sql.lock_in import acquire  # noqa: PLC0415 - loads the driver

    return TransactionLock(*await acquire(place, name, timeout, table=table, auto_create=auto_create))


@overload
def create_tables(target: Engine | Connection, *, locks: str | None = TABLE, fences: str | None = FENCES) -> None: ...


@overload
def create_tables(
    target: AsyncEngine | AsyncConnection, *, locks: str | None = TABLE, fences: str | None = FENCES
) -> Awaitable[None]: ...


def create_tables(target: Any, *, locks: str | None = TABLE, fences: str | None = FENCES) -> Any:
    """
    Make the tables of `lock_in` and `lockkit.fencing.SqlGuard` where they are missing. Awaited for asyncio.

    Several processes may do it at once. It is needed only where ``auto_create`` is off or the application has no right
    to create tables; for Alembic see `ddl`.

    Args:
        target: An engine, whose connection commits; or a connection, whose transaction the caller commits.
        locks: Name of the table of `lock_in`; None leaves it out.
        fences: Name of the table of the guard; None leaves it out.

    Raises:
        ConfigurationError: A right is missing, or `target` is something else.
        BackendUnavailable: The database gave no usable answer.
    """
    _need_sqlalchemy()
    from lockkit.storage.sql import schema as sql_schema  # noqa: PLC0415 - loads the driver

    return sql_schema.create_at(target, locks=locks, fences=fences)


def ddl(dialect: str, *, locks: str | None = TABLE, fences: str | None = FENCES) -> list[str]:
    """
    Give the statements with which `create_tables` makes the tables, for a migration. No I/O.

    Args:
        dialect: ``postgresql``, ``mariadb``, ``mysql`` or ``sqlite``.
        locks: See `create_tables`.
        fences: See `create_tables`.

    Raises:
        Unsupported: It is another database.
    """
    _need_sqlalchemy()
    from lockkit.storage.sql import schema as sql_schema  # noqa: PLC0415 - loads the driver

    return sql_schema.ddl(sql_schema.family_of(dialect), locks=locks, fences=fences)


def _place(target: object) -> Place:
    _need_sqlalchemy()
    from lockkit.storage.sql.client import Place  # noqa: PLC0415 - loads the driver

    return Place(target)


def _need_sqlalchemy() -> None:
    try:
        import sqlalchemy.ext.asyncio  # noqa: F401, PLC0415 - only where it is needed
    except ModuleNotFoundError as error:
        message = f"lockkit.sql needs the module {error.name!r}: pip install 'lockkit[sql]'"
        raise ConfigurationError(message) from error
