"""
Optimistic locking: change a value without a lock, and try again if another writer was faster.

Where changes are short and collisions rare, this is faster than a lock, and a holder that hangs cannot block anyone.
Where changes are long, or have effects elsewhere, take a lock.

`with_retry` and `with_retry_async` change a string key of Redis or Valkey: ``WATCH`` and ``GET``, then ``MULTI``,
``SET`` and ``EXEC``, which does nothing if another client changed the key in between (Redis manual, "Transactions").
The ``transaction()`` of redis-py tries without limit and without a pause.

In a SQL database, through SQLAlchemy, `transact` and `transact_async` run a function in a transaction, and run it again
if the database, or SQLAlchemy's version counter (``version_id_col``), rolled it back because of another transaction.
`update_row` and `update_row_async` change one row by a function. `versioned` is the condition alone.

In etcd, `update_key` and `update_key_async` read a key, and write it in a transaction that compares its
``mod_revision``, which every change increases.

In ZooKeeper, through kazoo, `update_node` and `update_node_async` change the data of a node by a function, if it still
has the version that was read.

All of them end:

- they make at most `attempts` tries, and start no new one after `timeout` seconds;
- between two tries they pause for a random time, of up to twice, four times, eight times … as long as the try took. A
  try collides with those that overlap it, so its duration is the right unit, whether it is 200 µs or, with a slow `fn`,
  a second. No pause is longer than `PAUSE_MAX`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.storage import load
from lockkit.storage.retry import ATTEMPTS, DELETE, PAUSE_MAX, TIMEOUT, Delete

if TYPE_CHECKING:
    from datetime import timedelta

    from kazoo.client import KazooClient
    from sqlalchemy import ColumnElement, Engine, RowMapping, Table
    from sqlalchemy import Delete as DeleteStatement
    from sqlalchemy import Update as UpdateStatement
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from lockkit.storage.redis import AsyncClient, Key, SyncClient, Value
    from lockkit.units import Seconds

__all__ = [
    "ATTEMPTS",
    "DELETE",
    "PAUSE_MAX",
    "TIMEOUT",
    "Delete",
    "transact",
    "transact_async",
    "update_key",
    "update_key_async",
    "update_node",
    "update_node_async",
    "update_row",
    "update_row_async",
    "versioned",
    "with_retry",
    "with_retry_async",
]

K = TypeVar("K", bound="str | bytes | Literal[Delete.DELETE] | None")
V = TypeVar("V", bound="Value | Literal[Delete.DELETE] | None")
T = TypeVar("T")
N = TypeVar("N", bound="bytes | str | Literal[Delete.DELETE] | None")
R = TypeVar("R", bound="Mapping[str, Any] | Literal[Delete.DELETE] | None")
S = TypeVar("S", bound="UpdateStatement | DeleteStatement")


def with_retry(
    client: SyncClient,
    key: Key,
    fn: Callable[[Any], V],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
    ttl: Seconds | timedelta | None = None,
) -> V:
    """
    Change the value of a key by a function, atomically.

    ::

        stock = with_retry(redis.Redis(), "stock:12", lambda now: int(now or 0) - 1)

    Args:
        client: A `redis.Redis` or `redis.RedisCluster`.
        key: A key that holds a string, or nothing.
        fn: Gets the value (bytes, or str with ``decode_responses``; None if there is none) and returns the new one,
            `DELETE`, or None to change nothing. **It may be called several times**, so it should have no effects
            elsewhere. If it raises, nothing is changed and you get that exception.
        attempts: Maximum number of tries; None sets no bound.
        timeout: Seconds after which no new try begins; 0 tries once, None sets no bound. One of the two must be set.
        ttl: Seconds after which the key expires; None keeps the expiry that it has, if any.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: Another writer was faster each time. Nothing was changed. As for a lock that stayed busy, this is
            also a `TimeoutError`, and you can try again later or give up.
        BackendUnavailable: Redis gave no usable answer. The message says so if the change may have been made: lockkit
            then does *not* try again, because a second try could make it twice.
        ConfigurationError: The key holds a value that is not a string, or an argument is wrong.
    """
    update = load("redis", "lockkit.optimistic").StringUpdate(BlockingRuntime(), client, key, fn, ttl)
    return cast("V", drive(update.run(attempts, timeout)))


async def with_retry_async(
    client: AsyncClient,
    key: Key,
    fn: Callable[[Any], V | Awaitable[V]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
    ttl: Seconds | timedelta | None = None,
) -> V:
    """
    Change the value of a key by a function, atomically; with asyncio.

    The same as `with_retry`, and `fn` may be ``async def``.

    Raises:
        Unsupported: The client is a `redis.asyncio.RedisCluster`: after a lost connection it sends a transaction again
            without its ``WATCH``, so it could overwrite another writer's change.
    """
    update = load("redis", "lockkit.optimistic").StringUpdate(AsyncioRuntime(), client, key, fn, ttl)
    return cast("V", await update.run(attempts, timeout))


def transact(
    source: Engine | sessionmaker[Any],
    fn: Callable[[Any], T],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> T:
    """
    Run a function in a transaction of a SQL database and commit; try again after a conflict with another one.

    ::

        def sell_one(session):
            product = session.get_one(Product, 12)  # has a version_id_col
            product.stock -= 1


        transact(sessionmaker(engine), sell_one)

    lockkit tries again after a deadlock, a serialization failure, a database lock that stayed busy, SQLAlchemy's
    `StaleDataError`, a snapshot that `lockkit.sql.lock_in` refused, and a connection that was lost before the commit.
    **This protects only rows with a version column, or SERIALIZABLE transactions**: at READ COMMITTED, two transactions
    that read the same number and write it back lose one of the changes, without an error.

    Args:
        source: Where each try gets its transaction: from an `Engine`, `fn` gets a `Connection`; from a `sessionmaker`,
            a `Session`.
        fn: **It may be called several times**, so it should have no effects elsewhere. It must not commit. If it
            raises anything but a conflict, the transaction is rolled back and you get that exception. Return plain
            values: the session is closed after the commit, and ORM objects cannot load their attributes any more.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that was committed.

    Raises:
        LockTimeout: Another writer was faster each time. Nothing was changed.
        BackendUnavailable: The database cannot be reached. The message says so if the commit may have been made:
            lockkit then does *not* try again, because a second try could make the change twice.
        ConfigurationError: An argument is wrong.
    """
    update = load("sql.update", "lockkit.optimistic").TransactionRetry(BlockingRuntime(), source, fn)
    return cast("T", drive(update.run(attempts, timeout)))


async def transact_async(
    source: AsyncEngine | async_sessionmaker[Any],
    fn: Callable[[Any], Awaitable[T]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> T:
    """
    Run a coroutine function in a transaction of a SQL database; with asyncio.

    The same as `transact`, with an `AsyncEngine` or an `async_sessionmaker`.
    """
    update = load("sql.update", "lockkit.optimistic").TransactionRetry(AsyncioRuntime(), source, fn)
    return cast("T", await update.run(attempts, timeout))


def update_key(
    client: Any,  # noqa: ANN401 - of one of several libraries
    key: Key,
    fn: Callable[[bytes | None], K],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> K:
    """
    Change the value of a key in etcd by a function, atomically.

    ::

        stock = update_key(client, "stock/12", lambda now: str(int(now or 0) - 1))

    Args:
        client: A `lockkit.Client` on etcd, or what `lockkit.from_client` takes for etcd.
        key: A key.
        fn: Gets the value, or None if there is none; returns the new one, `DELETE`, or None to change nothing. **It may
            be called several times.** If it raises, nothing is changed and you get that exception.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: See `with_retry`.
        BackendUnavailable: etcd gave no usable answer. The message says so if the change may have been made: lockkit
            then does *not* try again.
        ConfigurationError: An argument is wrong, or `fn` returned a value of another type.
    """
    update = load("etcd", "lockkit.optimistic").KeyUpdate(BlockingRuntime(), client, key, fn)
    return cast("K", drive(update.run(attempts, timeout)))


async def update_key_async(
    client: Any,  # noqa: ANN401 - of one of several libraries
    key: Key,
    fn: Callable[[bytes | None], K | Awaitable[K]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> K:
    """
    Change the value of a key in etcd by a function, atomically; with asyncio.

    The same as `update_key`, and `fn` may be ``async def``.
    """
    update = load("etcd", "lockkit.optimistic").KeyUpdate(AsyncioRuntime(), client, key, fn)
    return cast("K", await update.run(attempts, timeout))


def update_row(
    source: Engine | sessionmaker[Any],
    table: Table | type[Any],
    key: Any,  # noqa: ANN401 - of any type that a database has
    fn: Callable[[RowMapping | None], R],
    *,
    version: str = "version",
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> R:
    """
    Change a row of a SQL database by a function, atomically.

    ::

        update_row(engine, Product, 12, lambda row: {"stock": row["stock"] - 1})

    The table needs an integer column that every program increases when it changes a row.

    Args:
        source: An `Engine` or a `sessionmaker`.
        table: A `Table` or a mapped class.
        key: Value of the primary key; a tuple if it has several columns.
        fn: Gets the row, as a mapping, or None if there is none; returns the new values of columns, `DELETE`, or None
            to change nothing. Values for a row that does not exist insert it, with version 1. **It may be called
            several times.**
        version: Name of the version column.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: See `transact`.
        BackendUnavailable: See `transact`.
        ConfigurationError: An argument is wrong, or `fn` returned a value of another type.
    """
    update = load("sql.update", "lockkit.optimistic").RowUpdate(
        BlockingRuntime(), source, fn, table=table, key=key, version=version
    )
    return cast("R", drive(update.run(attempts, timeout)))


async def update_row_async(
    source: AsyncEngine | async_sessionmaker[Any],
    table: Table | type[Any],
    key: Any,  # noqa: ANN401 - of any type that a database has
    fn: Callable[[RowMapping | None], R | Awaitable[R]],
    *,
    version: str = "version",
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> R:
    """
    Change a row of a SQL database by a function, atomically; with asyncio.

    The same as `update_row`, and `fn` may be ``async def``.
    """
    update = load("sql.update", "lockkit.optimistic").RowUpdate(
        AsyncioRuntime(), source, fn, table=table, key=key, version=version
    )
    return cast("R", await update.run(attempts, timeout))


def update_node(
    client: KazooClient,
    path: str,
    fn: Callable[[bytes | None], N],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> N:
    """
    Change the data of a ZooKeeper node by a function, atomically.

    ::

        update_node(kazoo_client, "/stock/12", lambda now: str(int(now or 0) - 1))

    Args:
        client: A started ``KazooClient``.
        path: The path of the node; its parent must exist.
        fn: Gets the data, or None if there is no such node; returns the new data (a str is encoded as UTF-8),
            `DELETE`, or None to change nothing. Data for a node that does not exist create it. **It may be called
            several times.**
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: Another writer was faster each time. Nothing was changed.
        BackendUnavailable: ZooKeeper gave no usable answer. The message says so if the change may have been made:
            lockkit then does *not* try again, because a second try could make it twice.
        ConfigurationError: An argument is wrong, the parent is missing, or the node to delete has children.
    """
    update = load("zookeeper", "lockkit.optimistic").NodeUpdate(BlockingRuntime(), client, path, fn)
    return cast("N", drive(update.run(attempts, timeout)))


async def update_node_async(
    client: KazooClient,
    path: str,
    fn: Callable[[bytes | None], N | Awaitable[N]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | timedelta | None = TIMEOUT,
) -> N:
    """
    Change the data of a ZooKeeper node by a function, atomically; with asyncio.

    The same as `update_node`, with the same ``KazooClient``, and `fn` may be ``async def``.
    """
    update = load("zookeeper", "lockkit.optimistic").NodeUpdate(AsyncioRuntime(), client, path, fn)
    return cast("N", await update.run(attempts, timeout))


def versioned(statement: S, expected: int | None, *, version: ColumnElement[int] | None = None) -> S:
    """
    Restrict an UPDATE or DELETE to the version that was read; an UPDATE increases the version.

    ::

        changed = connection.execute(versioned(update(product).where(...).values(stock=stock - 1), row.version))
        if changed.rowcount == 0:
            ...  # another writer has changed the row since

    No I/O.

    Args:
        statement: Of one table, for Core or the ORM.
        expected: The version that was read. None, of a row from before the table had the column, counts as 0.
        version: The version column; None: the column ``version`` of the table.

    Raises:
        ConfigurationError: There is no such column, or it is another kind of statement.
    """
    guarded: S = load("sql.update", "lockkit.optimistic").versioned(statement, expected, version=version)
    return guarded
