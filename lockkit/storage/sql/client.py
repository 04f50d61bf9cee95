"""
An application's own SQLAlchemy session or connection, for what works inside its transactions.

`lockkit.sql`, `lockkit.fencing` and `lockkit.optimistic` use it. Connections, pools and transactions stay the
application's: nothing here commits or rolls back a transaction of its. Driver exceptions become lockkit's.

What is done to a connection is written once, against SQLAlchemy's blocking interface. A `Place` runs it: at once for a
`Session` or `Connection`, and in SQLAlchemy's own greenlet (``run_sync``) for their asyncio forms.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from lockkit.backends.sql import errors as sql_errors
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockTimeout
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.url import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.runtime import Runtime

__all__ = [
    "Asynchronous",
    "Blocking",
    "Place",
    "Problem",
    "StartAgain",
    "code_of",
    "data_error",
    "label_of",
    "problem_of",
    "refuse_autocommit",
    "spare",
    "transaction_of",
    "translating",
]

T = TypeVar("T")

Blocking: TypeAlias = "Session | scoped_session[Any] | Connection"
Asynchronous: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"


class StartAgain(LockTimeout):
    """
    The transaction cannot go on, but the same work in a new one can.

    Users see a `LockTimeout`. `lockkit.optimistic` tries again.
    """


class Place:
    """
    Where an application's transaction is, and how to work there.

    Attributes:
        runtime: Of its face.
    """

    def __init__(self, target: object) -> None:
        """
        Take what the application gave. No I/O.

        Raises:
            ConfigurationError: It has no transaction of its own.
        """
        self.runtime: Runtime
        if isinstance(target, (scoped_session, async_scoped_session)):
            target = target()
        self._target = target
        if isinstance(target, (Session, Connection)):
            self.runtime = BlockingRuntime()
        elif isinstance(target, (AsyncSession, AsyncConnection)):
            self.runtime = AsyncioRuntime()
        else:
            hint = ": it has no transaction; use `with engine.begin() as connection` and give that"
            message = (
                "give a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection, not "
                f"{type(target).__name__}{hint if isinstance(target, (Engine, AsyncEngine)) else ''}"
            )
            raise ConfigurationError(message)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """
        Do something with the connection of the transaction; the transaction begins if it has not yet.

        Raises:
            ConfigurationError: The session has several databases, or it commits each statement by itself.
            LockError: The connection cannot be had, or what the database says to `work`.
        """
        return await self.run_with(lambda _, connection: work(connection))

    async def run_with(self, work: Callable[[Session | Connection, Connection], T]) -> T:
        """Do the same with what the application gave, too, in its blocking form: the session or the connection."""
        target = self._target
        if isinstance(target, AsyncSession):
            return await target.run_sync(lambda session: work(session, refuse_autocommit(_of_session(session))))
        if isinstance(target, AsyncConnection):
            return await target.run_sync(lambda connection: work(connection, refuse_autocommit(connection)))
        if isinstance(target, Session):
            return work(target, refuse_autocommit(_of_session(target)))
        connection = cast("Connection", target)
        return work(connection, refuse_autocommit(connection))

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> T | Awaitable[T]:
        """Drive a coroutine to its end here, or give it to be awaited, as the face wants it."""
        return drive(coroutine) if self.runtime.kind == "blocking" else coroutine


def _of_session(session: Session) -> Connection:
    try:
        return session.connection()
    except exc.UnboundExecutionError as error:
        message = f"the session has several databases or none: give it session.connection(…) of the right one ({error})"
        raise ConfigurationError(message) from error
    except exc.PendingRollbackError as error:
        message = f"the session's transaction has failed before: roll it back first ({error})"
        raise ConfigurationError(message) from error
    except (exc.DBAPIError, exc.TimeoutError) as error:
        bind = session.bind
        raise data_error(error, bind if isinstance(bind, Engine) else None) from error


def refuse_autocommit(connection: Connection) -> Connection:
    """
    Refuse a connection that commits each statement by itself: a lock would end with its own statement.

    The driver is asked, which knows it from the server: SQLAlchemy knows only what was set through it. On SQLite the
    transaction begins here if it has not begun yet: applications may send BEGIN themselves, by an event.

    Returns:
        The same.

    Raises:
        ConfigurationError: It does.
    """
    engine_wide = getattr(connection.dialect, "_on_connect_isolation_level", None)
    chosen = connection.get_execution_options().get("isolation_level", engine_wide)
    try:
        if connection.dialect.name == "sqlite":
            refused = not _sqlite_begins(connection)
        else:
            refused = chosen == "AUTOCOMMIT" or _driver_commits(connection)
    except exc.PendingRollbackError as error:
        message = f"this connection to {label_of(connection)} was lost before: roll its transaction back first"
        raise ConfigurationError(message, backend=label_of(connection)) from error
    if refused:
        message = (
            f"this connection to {label_of(connection)} is in autocommit, so there is no transaction to be in: "
            "take one without isolation_level='AUTOCOMMIT' and without the driver's own; on SQLite BEGIN will do, too"
        )
        raise ConfigurationError(message, backend=label_of(connection))
    return connection


def _driver_commits(connection: Connection) -> bool:
    """Ask the driver, by the names that drivers have for it, or else the server."""
    pooled = connection.connection
    for driver in (pooled.dbapi_connection, pooled.driver_connection):
        ask = getattr(driver, "get_autocommit", None)  # PyMySQL and its kin: what the server's last answer said
        if ask is not None:
            return bool(ask())
        switch = getattr(driver, "autocommit", None)
        if switch is not None and not callable(switch):
            return bool(switch)
    if connection.dialect.name == "postgresql":
        return False
    return bool(connection.exec_driver_sql("SELECT @@autocommit").scalar_one())


def _sqlite_begins(connection: Connection) -> bool:
    """Tell whether a transaction is open, or the driver opens one before it writes."""
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    if driver.in_transaction:
        return True
    # Python 3.12 has a second switch: sqlite3, "Transaction control".
    return getattr(driver, "autocommit", None) is not True and driver.isolation_level is not None


_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def transaction_of(connection: Connection, runtime: Runtime) -> str:
    """
    Give the random id of the transaction that a connection is in, begun if it was not yet.

    It is the same for savepoints within. Two transactions never have the same, also in different processes.
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
    Give a connection of our own, beside the application's pool and closed afterwards.

    From the pool it could wait for a connection that its caller holds, for ever.
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


class Problem(Enum):
    """What an application or a retry can do something about."""

    BUSY = auto()
    DEADLOCK = auto()
    STALE = auto()
    MISSING = auto()


_PROBLEMS = {
    # PostgreSQL: SQLSTATE (appendix A of its manual).
    "55P03": Problem.BUSY,
    "40P01": Problem.DEADLOCK,
    "40001": Problem.STALE,
    "42P01": Problem.MISSING,
    # MariaDB and MySQL: error numbers. SQLSTATE 40001 is their deadlock.
    "1205": Problem.BUSY,
    "3572": Problem.BUSY,
    "1213": Problem.DEADLOCK,
    "1020": Problem.STALE,
    "1146": Problem.MISSING,
    # SQLite.
    "SQLITE_BUSY": Problem.BUSY,
    "SQLITE_BUSY_SNAPSHOT": Problem.STALE,
}


def code_of(error: BaseException) -> str:
    """Tell what a database said: SQLSTATE, error number, or SQLite's name; empty if it said nothing."""
    said = error.orig if isinstance(error, exc.DBAPIError) else error
    arguments = getattr(said, "args", ())
    # Drivers for MySQL give the number first; some know its SQLSTATE too, which says less.
    for number in (getattr(said, "errno", None), arguments[0] if arguments else None):
        if isinstance(number, int):
            return str(number)
    for attribute in ("sqlstate", "pgcode", "sqlite_errorname"):
        code = getattr(said, attribute, None)
        if isinstance(code, str):
            return code
    return ""


def problem_of(error: BaseException) -> Problem | None:
    """Tell whether an error is one of the known problems."""
    if isinstance(error, exc.DBAPIError) and "no such table" in str(error.orig):
        return Problem.MISSING  # SQLite has no code for it
    return _PROBLEMS.get(code_of(error))


def data_error(error: BaseException, source: Connection | Engine | None, *, name: str | None = None) -> LockError:
    """
    Make our error of SQLAlchemy's, about the application's database.

    Args:
        error: A `sqlalchemy.exc.DBAPIError`, or the pool's `TimeoutError`. To be the ``__cause__``.
        source: Where it happened.
        name: What it was about.
    """
    label = label_of(source)
    said = error.orig if isinstance(error, exc.DBAPIError) else error
    text = _without_password(" ".join(str(said).split()) or type(error).__name__, source)
    make, message = _reading(error, label, name, text)
    if make is BackendUnavailable and source is not None and isinstance(said, Exception):
        general = sql_errors.translate(dialect_named(source.dialect.name).kind(said), text, label)
        if isinstance(general, ConfigurationError):
            make, message = ConfigurationError, str(general)
    return make(message, name=name, backend=label)


def _without_password(text: str, source: Connection | Engine | None) -> str:
    password = None if source is None else source.engine.url.password
    return text.replace(password, HIDDEN) if password else text


def _reading(error: BaseException, label: str, name: str | None, text: str) -> tuple[Callable[..., LockError], str]:
    """Tell which error of ours it is, and what to say."""
    problem = problem_of(error)
    if problem is not None:
        return _of_problem(problem, label, name, text)
    if isinstance(error, exc.TimeoutError):
        message = (
            f"the pool of connections to {label} is used up: each open transaction has one. Raise pool_size, or end "
            f"transactions sooner ({text})"
        )
        return BackendUnavailable, message
    if code_of(error) == "25P02":  # in_failed_sql_transaction
        message = f"{label} has given up this transaction after an earlier error: roll it back first ({text})"
        return ConfigurationError, message
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        message = f"the connection to {label} was lost, and the transaction with it: run it again ({text})"
        return BackendUnavailable, message
    return BackendUnavailable, f"{label} gave no usable answer: {text}"


def _of_problem(problem: Problem, label: str, name: str | None, text: str) -> tuple[Callable[..., LockError], str]:
    what = repr(name) if name else "what this one wants"
    if problem is Problem.DEADLOCK:
        message = (
            f"a deadlock at {label}: another transaction holds {what} and waits for what this one holds. "
            f"Roll back and run the transaction again; take locks in one order everywhere ({text})"
        )
        return StartAgain, message
    if problem is Problem.STALE:
        return StartAgain, stale_snapshot(label, name, text)
    if problem is Problem.MISSING:
        message = f"a table of lockkit's is missing at {label}: run lockkit.sql.create_tables(engine) ({text})"
        return ConfigurationError, message
    message = f"another transaction at {label} held {what} for longer than the connection's own limit: {text}"
    return LockTimeout, message


def stale_snapshot(label: str, name: str | None, text: str) -> str:
    """Say why a transaction that began too early must not go on."""
    return (
        f"this transaction reads {label} as it was before the last holder of {name!r} committed: roll back and run it "
        f"again. Take the lock before anything is read, or use READ COMMITTED ({text})"
    )


@contextmanager
def translating(connection: Connection, name: str | None = None) -> Iterator[None]:
    """
    Turn what the database says to lockkit's own statements into lockkit's errors.

    Raises:
        LockError: In place of an error of SQLAlchemy's.
    """
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError) as error:
        raise data_error(error, connection, name=name) from error
