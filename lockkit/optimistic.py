"""
Optimistic locking: change a value without a lock, and do it again if another writer was quicker.

Where changes are short and collisions rare this is faster than a lock, and nobody can be kept waiting by a holder that
hangs. Where changes are long, or have effects elsewhere, take a lock.

`with_retry` and `with_retry_async` work on a string key of Redis or Valkey: ``WATCH`` and ``GET``, then ``MULTI``,
``SET`` and ``EXEC``, which does nothing if anybody touched the key in between (Redis manual, "Transactions"). The
``transaction()`` of redis-py tries without end and without a pause.

In a SQL database, through SQLAlchemy, `transact` and `transact_async` run a function in a transaction, and again if the
database, or the count of versions that SQLAlchemy keeps (``version_id_col``), gave it up for another transaction.
`update_row` and `update_row_async` change one row by a function, as above. `versioned` is the condition alone.

In etcd, `update_key` and `update_key_async` read a key, and write it in a transaction that compares its
``mod_revision``, which every change counts up.

In ZooKeeper, through kazoo, `update_node` and `update_node_async` change the data of a node by a function, if it still
has the version that was read.

All are bounded:

- at most `attempts` tries, and no new one after `timeout` seconds;
- between two tries a random pause of up to twice, four times, eight times … what the try took. A try collides with
  those that overlap it, so the time of a try is the right unit, whether it is 200 µs or, with a slow `fn`, a second.
  It is at most `PAUSE_MAX`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive

if TYPE_CHECKING:
    from datetime import timedelta

    from kazoo.client import KazooClient
    from sqlalchemy import ColumnElement, Engine, RowMapping, Table
    from sqlalchemy import Delete as DeleteStatement
    from sqlalchemy import Update as UpdateStatement
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from lockkit.storage.redis.client import AsyncClient, Key, Seconds, SyncClient

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

ATTEMPTS = 100
"""Tries, unless told otherwise. More hold a caller up for longer where it has no chance, fewer give up under bursts."""

TIMEOUT = 10.0
"""Seconds after which no new try begins, unless told otherwise."""

PAUSE_MAX = 0.25
"""Longest pause between two tries, seconds. Longer wastes time after a burst, shorter lets the losers collide again."""


class Delete(Enum):
    """The type of `DELETE`."""

    DELETE = "DELETE"

    def __repr__(self) -> str:
        return "lockkit.optimistic.DELETE"


DELETE: Final = Delete.DELETE
"""What a function returns to have the key deleted."""

Value: TypeAlias = str | bytes | int | float
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
    timeout: Seconds | None = TIMEOUT,
    ttl: Seconds | None = None,
) -> V:
    """
    Change the value of a key by a function, as if nobody else were there.

    ::

        stock = with_retry(redis.Redis(), "stock:12", lambda now: int(now or 0) - 1)

    Args:
        client: A `redis.Redis` or `redis.RedisCluster`.
        key: A key that holds a string, or nothing.
        fn: Gets the value (bytes, or str with ``decode_responses``; None if there is none) and returns the new one,
            `DELETE`, or None to leave it as it is. **It may be called several times**, so it should have no effects
            elsewhere. What it raises ends the attempt and is raised here; nothing is changed.
        attempts: How many tries there are at most; None sets no bound.
        timeout: Seconds after which no new try begins; 0 tries once, None sets no bound. One of the two must be set.
        ttl: Seconds after which the key goes away; None keeps the expiry that it has, if it has one.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: Others were quicker each time: also a `TimeoutError`, as for a lock that stayed busy, because the
            same helps: try later, or give up. Nothing was changed.
        BackendUnavailable: Redis gave no usable answer. The message says so if the change may have been made: then it
            is *not* tried again, as a second try could make it twice.
        ConfigurationError: The key holds something else than a string, or an argument is wrong.
    """
    from lockkit.storage.redis.update import Update  # noqa: PLC0415 - loads the driver

    result: V = drive(Update(BlockingRuntime(), client, key, fn, ttl).run(attempts, timeout))
    return result


async def with_retry_async(
    client: AsyncClient,
    key: Key,
    fn: Callable[[Any], V | Awaitable[V]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | None = TIMEOUT,
    ttl: Seconds | None = None,
) -> V:
    """
    Change the value of a key by a function, as if nobody else were there; with asyncio.

    The same as `with_retry`, and `fn` may be ``async def``.

    Raises:
        Unsupported: The client is a `redis.asyncio.RedisCluster`: after a lost connection its transactions are sent
            again without their ``WATCH``, so that another writer's change could be lost.
        LockTimeout: See `with_retry`.
        BackendUnavailable: See `with_retry`.
        ConfigurationError: See `with_retry`.
    """
    from lockkit.storage.redis.update import Update  # noqa: PLC0415 - loads the driver

    result: V = await Update(AsyncioRuntime(), client, key, fn, ttl).run(attempts, timeout)
    return result


def transact(
    source: Engine | sessionmaker[Any],
    fn: Callable[[Any], T],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> T:
    """
    Run a function in a transaction of a SQL database, commit, and try again if it was given up for another one.

    ::

        def sell_one(session):
            product = session.get_one(Product, 12)  # has a version_id_col
            product.stock -= 1


        transact(sessionmaker(engine), sell_one)

    Tried again is what was rolled back because of others: a deadlock, a serialization failure, a lock of the
    database's that stayed busy, SQLAlchemy's `StaleDataError`, a snapshot that `lockkit.sql.lock_in` refused, a
    connection that was lost before the commit.
    **What is neither a version nor serializable is not protected**: at READ COMMITTED two transactions that read the
    same number and write it back lose one of the changes, and no error says so.

    Args:
        source: Gives each try its transaction: an `Engine`, and `fn` gets a `Connection`; or a `sessionmaker`, and
            `fn` gets a `Session`.
        fn: **It may be called several times**, so it should have no effects elsewhere. It does not commit. What it
            raises otherwise rolls back and is raised here.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that was committed.

    Raises:
        LockTimeout: Others were quicker each time. Nothing was changed.
        BackendUnavailable: The database cannot be reached. The message says so if the commit may have been made: then
            it is *not* tried again, as a second try could make the change twice.
        ConfigurationError: An argument is wrong.
    """
    from lockkit.storage.sql.update import Transactions  # noqa: PLC0415 - loads the driver

    result: T = drive(Transactions("blocking", source, fn).run(attempts, timeout))
    return result


async def transact_async(
    source: AsyncEngine | async_sessionmaker[Any],
    fn: Callable[[Any], Awaitable[T]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> T:
    """
    Run a coroutine function in a transaction of a SQL database; with asyncio.

    The same as `transact`, with an `AsyncEngine` or an `async_sessionmaker`.

    Raises:
        LockTimeout: See `transact`.
        BackendUnavailable: See `transact`.
        ConfigurationError: See `transact`.
    """
    from lockkit.storage.sql.update import Transactions  # noqa: PLC0415 - loads the driver

    result: T = await Transactions("asyncio", source, fn).run(attempts, timeout)
    return result


def update_key(
    client: Any,  # noqa: ANN401 - of one of several libraries
    key: Key,
    fn: Callable[[bytes | None], K],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | None = TIMEOUT,
) -> K:
    """
    Change the value of a key in etcd by a function, as if nobody else were there.

    ::

        stock = update_key(client, "stock/12", lambda now: str(int(now or 0) - 1))

    Args:
        client: A `lockkit.Client` on etcd, or what `lockkit.from_client` takes for etcd.
        key: A key.
        fn: Gets the value, or None if there is none; returns the new one, `DELETE`, or None to leave it as it is. **It
            may be called several times.** What it raises is raised here; nothing is changed.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: See `with_retry`.
        BackendUnavailable: etcd gave no usable answer. The message says so if the change may have been made: then it
            is *not* tried again.
        ConfigurationError: An argument is wrong, or `fn` returned something else.
    """
    from lockkit.storage.etcd.update import KeyUpdate  # noqa: PLC0415 - loads the driver

    result: K = drive(KeyUpdate(BlockingRuntime(), client, key, fn).run(attempts, timeout))
    return result


async def update_key_async(
    client: Any,  # noqa: ANN401 - of one of several libraries
    key: Key,
    fn: Callable[[bytes | None], K | Awaitable[K]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | None = TIMEOUT,
) -> K:
    """
    Change the value of a key in etcd by a function, as if nobody else were there; with asyncio.

    The same as `update_key`, and `fn` may be ``async def``.

    Raises:
        LockTimeout: See `with_retry`.
        BackendUnavailable: See `update_key`.
        ConfigurationError: See `update_key`.
    """
    from lockkit.storage.etcd.update import KeyUpdate  # noqa: PLC0415 - loads the driver

    result: K = await KeyUpdate(AsyncioRuntime(), client, key, fn).run(attempts, timeout)
    return result


def update_row(
    source: Engine | sessionmaker[Any],
    table: Table | type[Any],
    key: Any,  # noqa: ANN401 - of any type that a database has
    fn: Callable[[RowMapping | None], R],
    *,
    version: str = "version",
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> R:
    """
    Change a row of a SQL database by a function, as if nobody else were there.

    ::

        update_row(engine, Product, 12, lambda row: {"stock": row["stock"] - 1})

    The table has a column of whole numbers that everybody who changes a row counts up.

    Args:
        source: An `Engine` or a `sessionmaker`.
        table: A `Table` or a mapped class.
        key: Value of the primary key; a tuple if it has several columns.
        fn: Gets the row, as a mapping, or None if there is none; returns the new values of columns, `DELETE`, or None
            to leave it as it is. Values for a row that is not there insert it, with version 1. **It may be called
            several times.**
        version: Name of the column that counts.
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: See `transact`.
        BackendUnavailable: See `transact`.
        ConfigurationError: An argument is wrong, or `fn` returned something else.
    """
    from lockkit.storage.sql.update import RowUpdate  # noqa: PLC0415 - loads the driver

    result: R = drive(RowUpdate("blocking", source, fn, table=table, key=key, version=version).run(attempts, timeout))
    return result


async def update_row_async(
    source: AsyncEngine | async_sessionmaker[Any],
    table: Table | type[Any],
    key: Any,  # noqa: ANN401 - of any type that a database has
    fn: Callable[[RowMapping | None], R | Awaitable[R]],
    *,
    version: str = "version",
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> R:
    """
    Change a row of a SQL database by a function, as if nobody else were there; with asyncio.

    The same as `update_row`, and `fn` may be ``async def``.

    Raises:
        LockTimeout: See `transact`.
        BackendUnavailable: See `transact`.
        ConfigurationError: See `update_row`.
    """
    from lockkit.storage.sql.update import RowUpdate  # noqa: PLC0415 - loads the driver

    result: R = await RowUpdate("asyncio", source, fn, table=table, key=key, version=version).run(attempts, timeout)
    return result


def update_node(
    client: KazooClient,
    path: str,
    fn: Callable[[bytes | None], N],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> N:
    """
    Change the data of a ZooKeeper node by a function, as if nobody else were there.

    ::

        update_node(kazoo_client, "/stock/12", lambda now: str(int(now or 0) - 1))

    Args:
        client: A started ``KazooClient``.
        path: Of the node; the one above it must be there.
        fn: Gets the data, or None if there is no such node; returns the new data (a str is encoded as UTF-8),
            `DELETE`, or None to leave it as it is. Data for a node that is not there create it. **It may be called
            several times.**
        attempts: See `with_retry`.
        timeout: See `with_retry`.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: Others were quicker each time. Nothing was changed.
        BackendUnavailable: ZooKeeper gave no usable answer. The message says so if the change may have been made: then
            it is *not* tried again, as a second try could make it twice.
        ConfigurationError: An argument is wrong, the node above is missing, or the one to delete has children.
    """
    from lockkit.storage.zookeeper.update import NodeUpdate  # noqa: PLC0415 - loads the driver

    result: N = drive(NodeUpdate(BlockingRuntime(), client, path, fn).run(attempts, timeout))
    return result


async def update_node_async(
    client: KazooClient,
    path: str,
    fn: Callable[[bytes | None], N | Awaitable[N]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: float | timedelta | None = TIMEOUT,
) -> N:
    """
    Change the data of a ZooKeeper node by a function, as if nobody else were there; with asyncio.

    The same as `update_node`, with the same ``KazooClient``, and `fn` may be ``async def``.

    Raises:
        LockTimeout: See `update_node`.
        BackendUnavailable: See `update_node`.
        ConfigurationError: See `update_node`.
    """
    from lockkit.storage.zookeeper.update import NodeUpdate  # noqa: PLC0415 - loads the driver

    result: N = await NodeUpdate(AsyncioRuntime(), client, path, fn).run(attempts, timeout)
    return result


def versioned(statement: S, expected: int, *, version: ColumnElement[int] | None = None) -> S:
    """
    Let an UPDATE or DELETE touch a row only if it still has the version that was read; an UPDATE counts it up.

    ::

        changed = connection.execute(versioned(update(product).where(...).values(stock=stock - 1), row.version))
        if changed.rowcount == 0:
            ...  # another writer has changed it since

    No I/O.

    Args:
        statement: Of one table, for Core or the ORM.
        expected: The version that was read.
        version: The column that counts; None: the column ``version`` of the table.

    Raises:
        ConfigurationError: There is no such column, or it is another statement.
    """
    from lockkit.storage.sql.update import versioned as make  # noqa: PLC0415 - loads the driver

    return make(statement, expected, version=version)
