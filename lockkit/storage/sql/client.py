"""
An application's own SQLAlchemy session or connection, as `lockkit.sql`, `lockkit.fencing` and others use it.

The application owns connections, pools and transactions: nothing here commits its transactions or rolls them back.
Driver exceptions become lockkit's.

All work on a connection is written once, against SQLAlchemy's blocking interface. An `ApplicationTransaction` runs it:
directly for a `Session` or `Connection`, and in SQLAlchemy's own greenlet (``run_sync``) for their asyncio forms.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Delete, Engine, Update, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from lockkit.backends.sql import dialect as sql_errors
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockTimeout
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.url import HIDDEN
from lockkit.validation import shown

S = TypeVar("S", bound="Update | Delete")
T = TypeVar("T")

# SQLAlchemy leaves an OSError of asyncpg's as it is when it cannot connect.
DRIVER_ERRORS = (exc.DBAPIError, exc.TimeoutError, OSError)

Blocking: TypeAlias = "Session | scoped_session[Any] | Connection"
Asynchronous: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"


class StartAgain(LockTimeout):
    """
    The transaction cannot go on, but the same work in a new one can.

    Users see a `LockTimeout`. `lockkit.optimistic` tries again.
    """


class ApplicationTransaction:
    """
    The transaction of an application's session or connection.

    Attributes:
        runtime: Blocking or asyncio, as the session or connection is.
    """

    def __init__(self, target: object) -> None:
        """Keep the session or connection. No I/O."""
        if isinstance(target, (scoped_session, async_scoped_session)):
            target = target()
        if not isinstance(target, (Session, Connection, AsyncSession, AsyncConnection)):
            hint = ": it has no transaction; use `with engine.begin() as connection` and give that"
            message = (
                "give a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection, not "
                f"{type(target).__name__}{hint if isinstance(target, (Engine, AsyncEngine)) else ''}"
            )
            raise ConfigurationError(message)
        blocking = isinstance(target, (Session, Connection))
        self.runtime: Runtime = BlockingRuntime() if blocking else AsyncioRuntime()
        self._target: Any = target

    async def run(self, work: Callable[[Session | Connection, Connection], T]) -> T:
        """
        Call `work` with the session or connection in its blocking form, and with the connection of its transaction.

        The transaction begins if it has not begun yet.
        """

        def inside(executor: Session | Connection) -> T:
            connection = _of_session(executor) if isinstance(executor, Session) else executor
            return work(executor, refuse_autocommit(connection))

        if self.runtime.kind == "blocking":
            return inside(self._target)
        found: T = await self._target.run_sync(inside)
        return found

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> T | Awaitable[T]:
        """Run a coroutine to its end, or return it to be awaited if the transaction is asyncio's."""
        return drive(coroutine) if self.runtime.kind == "blocking" else coroutine


def _of_session(session: Session) -> Connection:
    try:
        return session.connection()
    except exc.UnboundExecutionError as error:
        message = f"the session has several databases or none: give it session.connection(…) of the right one ({error})"
        raise ConfigurationError(message) from error
    except exc.PendingRollbackError as error:
        raise ConfigurationError(f"the session's transaction has failed: roll it back first ({error})") from error
    except LockError:  # of a handler of the application's: some are an OSError
        raise
    except DRIVER_ERRORS as error:
        raise data_error(error, session.bind if isinstance(session.bind, Engine) else None) from error


def refuse_autocommit(connection: Connection) -> Connection:
    """
    Refuse a connection that commits each statement by itself: a lock would end with its own statement.

    This asks the driver, which knows it from the server: SQLAlchemy knows only what was set through SQLAlchemy. On
    SQLite the transaction begins here if it has not begun yet: applications may send BEGIN themselves, in an event
    handler.
    """
    label = label_of(connection)
    try:
        refused = _sqlite_commits(connection) if connection.dialect.name == "sqlite" else _driver_commits(connection)
    except exc.PendingRollbackError as error:
        message = f"this connection to {label} was lost: roll its transaction back first"
        raise ConfigurationError(message, backend=label) from error
    if refused:
        message = (
            f"this connection to {label} is in autocommit, so it has no transaction: use one without "
            "isolation_level='AUTOCOMMIT' and without the driver's autocommit; on SQLite you can also send BEGIN"
        )
        raise ConfigurationError(message, backend=label)
    return connection


def _driver_commits(connection: Connection) -> bool:
    """Ask the driver, by the names that drivers use for it, or else the server."""
    pooled = connection.connection
    for driver in (pooled.dbapi_connection, pooled.driver_connection):
        ask = getattr(driver, "get_autocommit", None)  # PyMySQL and similar: from the server's last answer
        if ask is not None:
            return bool(ask())
        switch = getattr(driver, "autocommit", None)
        if switch is not None and not callable(switch):
            return bool(switch)
    if connection.dialect.name == "postgresql":
        return False
    return bool(connection.exec_driver_sql("SELECT @@autocommit").scalar_one())


def _sqlite_commits(connection: Connection) -> bool:
    """Return whether no transaction is open, and the driver opens none before it writes."""
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    # Python 3.12 has a second switch: sqlite3, "Transaction control".
    automatic = getattr(driver, "autocommit", None) is True or driver.isolation_level is None
    return not driver.in_transaction and automatic


_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def transaction_of(connection: Connection, runtime: Runtime) -> str:
    """
    Return the random id of a connection's transaction, which begins if it has not begun yet.

    Savepoints share the id of their transaction. No two transactions have the same id, not even in two processes.
    """
    if not connection.in_transaction():
        connection.begin()  # as any statement would
    transaction = connection.get_transaction()
    owner = _owners.get(transaction)
    if owner is None:
        owner = _owners[transaction] = runtime.owner()
    return owner


@contextmanager
def spare(engine: Engine) -> Iterator[Connection]:
    """
    Open a separate connection, outside the application's pool, and close it afterwards.

    The pool could be empty because of the very connection that the caller holds: waiting for it would never end.
    """
    own = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)
    try:
        with own.connect() as connection:
            yield connection
    finally:
        own.dispose()


def label_of(source: Connection | Engine | None) -> str:
    """Name the database for messages, without a password."""
    if source is None:
        return "the database"
    url = (source.engine if isinstance(source, Connection) else source).url
    # A driver may be given its password in the query, too.
    return url.set(query={}).render_as_string(hide_password=True)


def kind_of(error: BaseException) -> sql_errors.Kind:
    """Return what an error of a database is about. The driver's error shows which database that is."""
    said = _said(error)
    if isinstance(said, sqlite3.Error):
        return sql_errors.sqlite_kind(said)
    # The number first: some drivers for MySQL also have an SQLSTATE, which says less.
    return sql_errors.mysql_kind(said) if sql_errors.mysql_number(said) else sql_errors.postgresql_kind(said)


def _said(error: BaseException) -> BaseException:
    """Return the driver's own error."""
    return (error.orig if isinstance(error, exc.DBAPIError) else None) or error


STALE = (
    "this transaction reads {label} as it was before the last holder of {name!r} committed: roll back and run it "
    "again. Take the lock before you read anything, or use READ COMMITTED"
)

_DEADLOCK = (
    "a deadlock at {label}: another transaction holds {what} and waits for what this one holds. Roll back and run the "
    "transaction again; take locks in the same order everywhere"
)
_NEW_TABLE = (
    "this transaction reads {label} as it was before a table was created or altered: roll back and run it again"
)
_LOCKED = (
    "another transaction at {label} held {what} for longer than the connection's own limit: roll back and run the "
    "transaction again, or raise that limit"
)
_ENDED = (
    "{label} ended a statement of this transaction, which took longer than allowed or was cancelled: roll back and "
    "run the transaction again, or raise statement_timeout (PostgreSQL) or max_statement_time (MariaDB)"
)
_DENIED = (
    "{label} denies this user a right: SELECT, INSERT, UPDATE and DELETE on lockkit's tables are needed, on PostgreSQL "
    "also UPDATE on the sequence of tokens; and CREATE, or lockkit.sql.create_tables(engine) by another user"
)
_POOL = (
    "the connection pool for {label} is exhausted: each open transaction uses one connection. Raise pool_size, or end "
    "transactions sooner"
)
_MEANINGS: dict[str, tuple[type[LockError], str]] = {
    "deadlock": (StartAgain, _DEADLOCK),
    "stale": (StartAgain, STALE),
    "new table": (StartAgain, _NEW_TABLE),
    "locked": (StartAgain, _LOCKED),
    "ended": (StartAgain, _ENDED),
    "denied": (ConfigurationError, _DENIED),
    "no table": (ConfigurationError, "a table of lockkit is missing at {label}: run lockkit.sql.create_tables(engine)"),
    "pool": (BackendUnavailable, _POOL),
    "aborted": (ConfigurationError, "{label} has aborted this transaction after an earlier error: roll it back first"),
    "lost": (BackendUnavailable, "the connection to {label} was lost, and the transaction with it: run it again"),
}
"""What an application or a retry can handle."""


def data_error(error: BaseException, source: Connection | Engine | None, *, name: str | None = None) -> LockError:
    """Make lockkit's error from one of `DRIVER_ERRORS`, at the application's database."""
    label, said = label_of(source), _said(error)
    text = " ".join(str(said).split()) or type(error).__name__
    password = None if source is None else source.engine.url.password
    text = text.replace(password, HIDDEN) if password else text
    kind: str = kind_of(error)
    if kind not in _MEANINGS:
        if source is not None and isinstance(said, Exception):
            general = sql_errors.translate(dialect_named(source.dialect.name).kind(said), text, label)
            if isinstance(general, ConfigurationError):
                return ConfigurationError(str(general), name=name, backend=label)
        if isinstance(error, exc.TimeoutError):
            kind = "pool"
        elif sql_errors.sqlstate(said) == "25P02":  # in_failed_sql_transaction
            kind = "aborted"
        elif isinstance(error, exc.DBAPIError) and error.connection_invalidated:
            kind = "lost"
        elif kind == "timeout" and isinstance(error, exc.DBAPIError) and error.statement:  # or it could not connect
            kind = "ended"
    make, message = _MEANINGS.get(kind, (BackendUnavailable, "{label} gave no usable answer"))
    what = repr(name) if name else "what this one needs"
    return make(f"{message.format(label=label, what=what, name=name)} ({text})", name=name, backend=label)


@contextmanager
def translating(source: Connection | Engine, name: str | None = None) -> Iterator[None]:
    """Convert SQLAlchemy's errors from lockkit's own statements to lockkit's."""
    try:
        yield
    except LockError:  # some are an OSError
        raise
    except DRIVER_ERRORS as error:
        raise data_error(error, source, name=name) from error


def column_of(statement: object, column: object, default: str, *, option: str) -> Any:  # noqa: ANN401 - a column, mapped or not
    """Return the column with the version or token: the given one, or the table's with the default name."""
    if not isinstance(statement, (Update, Delete)):
        raise ConfigurationError(f"statement must be an UPDATE or a DELETE of SQLAlchemy, not {shown(statement)}")
    if column is not None:
        return column
    table: Any = statement.table
    if default not in table.c:
        raise no_column(table, default, option=option)
    return table.c[default]


def with_value(statement: S, column: Any, value: object) -> S:  # noqa: ANN401 - a column, mapped or not
    """
    Have an UPDATE set a column, whatever value the statement itself gives to it. A DELETE stays as it is.

    Of two values for one column of a table, such as those of ``values(fence=0)`` and ``values({table.c.fence: 7})``,
    SQLAlchemy takes the first, so the value is given under both keys. It resolves the keys of a mapped class by itself.
    """
    if not isinstance(statement, Update):
        return statement
    values = {column: value}
    # `entity_description` says the same, but fails if a condition on a table names an attribute of a mapped class.
    if "parententity" not in statement.table._annotations:  # noqa: SLF001 - see above
        values[getattr(column, "expression", column).key] = value
    return cast("S", statement.values(values))


def no_column(table: object, name: object, *, option: str) -> ConfigurationError:
    """Make the error for a table without the column for its version or token."""
    message = f"{table} has no column {name!r}: add a BIGINT column of that name, or give another one with {option}="
    return ConfigurationError(message)
