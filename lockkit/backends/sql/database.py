"""
A database, as the SQL backends use it, with the sync and async APIs.

::

    database = open_database(url, options, host)  # or adopt_database(engine, ...), see `lockkit.backends.sql.options`
    result = await database.run(statement, [...])  # one statement, committed; raises LockError
    result = await database.run(statement, [...], again=True)  # a statement that may run twice
    result = await database.run(statement, [...], answer_by=answer_by)  # raises BackendUnavailable by then

    connection = await database.connect()  # a connection of the caller's own
    result = await connection.run(Statement("BEGIN"))  # raises the driver's errors, see `driver_errors` and `translate`
    connection.terminate()  # or await connection.close()

- Statements run on a few kept connections (`Dialect.connections_max`), each in autocommit at READ COMMITTED, without a
  pool of SQLAlchemy's. A connection that is given back goes to the caller that has waited longest; renewals are urgent
  and go first. With an application's engine lockkit makes connections as the engine's pool makes them, but outside the
  pool: a release must never wait for a connection that the application holds.
- A statement that the database gave up for another one (deadlock, serialization, a wait for a lock) is retried until
  the caller's time is up; one that was not answered in time is not.
- lockkit checks before and after each statement whether a SQLite file was removed or replaced: other clients do not see
  what is written to a file without a name.
- Once the event loop has ended (`sys.exit` in it), statements run without one, on a blocking connection.
- A connection that the server has closed meanwhile is replaced before it is used.
- In a forked child the connections of the parent are left alone: closing them would end the parent's sessions.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import greenlet_spawn

from lockkit.backend import seconds_left
from lockkit.backends.sql import quirks
from lockkit.backends.sql.adapted import AdaptedConnection, close_later, until_closed
from lockkit.backends.sql.blocking import DbapiConnection, PyMysqlConnection, ThreadConnection, in_time
from lockkit.backends.sql.connection import NO_ANSWER, Connection, end_quietly, keep_alive, take_last
from lockkit.backends.sql.dialect import KEEPALIVE_SECONDS, STATEMENT_SECONDS, Dialect, dialect_named
from lockkit.backends.sql.errors import CONFLICTS, Kind, translate
from lockkit.backends.sql.file import SqliteFile, identity, prepare
from lockkit.backends.sql.mysql import Guard
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import BlockingRuntime, Event, Runtime
from lockkit.units import Instant
from lockkit.url import HIDDEN

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine


TRUSTED_SECONDS = 0.005
"""A connection that was used longer ago is checked before it is used again: the server may have closed it. Longer
finds fewer closed ones, shorter checks (a system call) more often."""

CONFLICT_PAUSE_MAX = 0.1
"""Longest pause before a statement that met a conflict is run again, seconds. Longer delays it, shorter meets the same
conflict again."""

LOCKED_PAUSE_MAX = 0.01
"""The same for one that waited in vain for locks of others: it has waited at the server. An urgent statement waits for
a tenth of that, and so goes before those of other processes, too."""

WAIT_CHECK_SECONDS = 0.5
"""How long a caller waits for a connection before it checks whether an interrupt lost one, seconds."""

HUNG_MAX = 8
"""How many attempts to connect may hang. Each is a thread or task until its driver gives up, and an application's
engine may not have set a limit for that. With more of them, callers are refused at once."""

OPENINGS_MAX = 4
"""How often lockkit opens a SQLite file until it is the one that was there before. A new file takes two attempts."""

_BLOCKING_DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        "psycopg": "psycopg",
        "psycopg_async": "psycopg",
        "aiomysql": "pymysql",
        "asyncmy": "pymysql",
        "aiosqlite": "pysqlite",
    }
)


_SENDS_APART = {"asyncpg", "pg8000"}
"""Drivers for PostgreSQL that need transactions behind a pooler, see `DbapiConnection`. lockkit sees it with asyncpg;
pg8000 does not tell the server's process, so it has transactions everywhere."""


class Database:
    """
    One database and lockkit's connections to it.

    Attributes:
        dialect: What differs between databases.
        engine: SQLAlchemy's, own or the application's; of an ``AsyncEngine`` its ``sync_engine``.
        url: Where it is, without a password: for messages.
        label: The same, shorter: ``host:port/name``, or a path.
        pooled: A pooler gives each statement another session; known after the first connection.
        group: A SQLite file is shared with the group.
        keepalive: See `lockkit.backends.sql.dialect.KEEPALIVE_SECONDS`, seconds.
        driver_errors: What a `Connection` may raise.
        guard: See there.
    """

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        url: str,
        *,
        adopted: bool,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        guard: Guard | None = None,
    ) -> None:
        """Connect to nothing yet."""
        self.engine = engine
        self.dialect: Dialect = dialect_named(self.engine.dialect.name)
        self.url = url
        self.label = _label(self.engine.url)
        self.pooled = False
        self.group = False
        self.keepalive = KEEPALIVE_SECONDS
        self._adopted = adopted
        self._runtime = runtime
        self._is_asyncio = runtime.kind == "asyncio"
        self._password = self.engine.url.password or ""
        errors: type[BaseException] = self.engine.dialect.loaded_dbapi.Error
        self.driver_errors: tuple[type[BaseException], ...] = (errors, SQLAlchemyError, OSError, EOFError)
        self._arguments = arguments
        self.guard = guard
        self._mutex = runtime.mutex()
        self._idle: list[Connection] = []
        self._waiting: deque[_Waiter] = deque()
        self._opening = 0
        # By weak references: one that an interrupt dropped between two lines is not counted any more.
        self._counted: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._tries: dict[object, float] = {}
        self._path = _sqlite_path(self.engine.url) if self.dialect.name == "sqlite" else ""
        self._blocking: Database | None = None
        self._closed = False
        _databases.add(self)

    # -- statements ------------------------------------------------------------------------------------------------

    async def run(
        self,
        statement: Statement,
        parameters: Sequence[Parameter] = (),
        *,
        again: bool = False,
        answer_by: float = inf,
        urgent: bool = False,
    ) -> Result:
        """Run one statement in a transaction of its own."""
        if self._runtime.loop_has_ended():
            self.drop_idle()
            return await self._without_loop().run(statement, parameters, again=again, answer_by=answer_by)
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        attempt, uncertain = 0, False
        while True:
            connection = self._kept()
            if connection is None:
                try:
                    connection = await self._take(until, urgent=urgent)
                except BackendUnavailable as error:
                    error.sent = uncertain
                    raise
            fresh = not connection.used
            try:
                result = await self._run_on(connection, statement, parameters, until)
            except self.driver_errors as error:
                kind = self.kind(error)
                attempt += 1
                yielded = kind in CONFLICTS or kind == "locked"
                # Nothing was done, perhaps by a demoted primary: a new connection finds the one that took over.
                refused = kind == "read-only" and not fresh
                repeat = yielded or refused or (kind == "connection" and again and not fresh)
                again = again and (yielded or refused)
                uncertain = uncertain or not (yielded or refused)
                if yielded:
                    longest = LOCKED_PAUSE_MAX if kind == "locked" else min(CONFLICT_PAUSE_MAX, 0.002 * 2.0**attempt)
                    pause = longest * self._runtime.random.uniform(0.5, 1.0) * (0.1 if urgent else 1.0)
                    await self._runtime.sleep(max(0.0, min(pause, until - self._runtime.now())))
                if not repeat or self._runtime.now() >= until:
                    raise self.translate(error) from error
            else:
                return result

    async def _run_on(
        self, connection: Connection, statement: Statement, parameters: Sequence[Parameter], until: Instant
    ) -> Result:
        """Run it on a taken connection, and give that back or drop it."""
        left = until - self._runtime.now()
        if left <= 0:
            self._give_back(connection)
            raise TimeoutError(NO_ANSWER)
        try:
            result = await connection.run(statement, parameters, min(left, STATEMENT_SECONDS))
            if connection.file is not None:
                connection.file.check()
        except self.driver_errors as error:
            kind = self.kind(error)
            if kind not in {"connection", "timeout", "read-only", "no transaction", "other"}:
                self._give_back(connection)
                raise
            self._drop(connection)
            if kind in {"connection", "timeout", "read-only"}:
                self.drop_idle()
            raise
        except BaseException:
            # Cancelled or interrupted. What undoes the statement must not overtake it: read its answer first.
            await self._until_answered(connection)
            raise
        self._give_back(connection)
        return result

    async def _until_answered(self, connection: Connection) -> None:
        """Read and discard an answer; also if the caller is cancelled again meanwhile, as anyio does until it ends."""
        done = self._runtime.event()
        until = self._runtime.now() + STATEMENT_SECONDS + 1.0
        try:
            with suppress(TimeoutError):  # then it has been dropped, or soon will be
                await self._runtime.settle(self._discard_answer(connection, done), until - self._runtime.now())
        except asyncio.CancelledError:
            while not done.is_set() and (left := until - self._runtime.now()) > 0:
                with suppress(asyncio.CancelledError):
                    await done.wait(left)
            raise

    async def _discard_answer(self, connection: Connection, done: Event) -> None:
        try:
            await connection.finish(STATEMENT_SECONDS)
        except self.driver_errors:
            self._drop(connection)
        except BaseException:
            self._drop(connection)
            raise
        else:
            self._give_back(connection)
        finally:
            done.set()

    # -- connections -----------------------------------------------------------------------------------------------

    def _kept(self) -> Connection | None:
        """Take a kept connection, if one is still open. There is none while a caller waits for one."""
        while (connection := take_last(self._idle)) is not None:
            if self._usable(connection):
                return connection
            self._drop(connection)
        return None

    def _usable(self, connection: Connection) -> bool:
        if connection.file is not None and connection.file.moved:
            return False
        return self._runtime.now() <= connection.used + TRUSTED_SECONDS or not connection.stale

    async def _take(self, until: Instant, *, urgent: bool) -> Connection:
        """Connect anew, or wait for a connection that another caller gives back."""
        while True:
            waiter: _Waiter | None = None
            with self._mutex:
                opening = not self._idle and self._has_room()
                if opening:
                    self._opening += 1
                elif not self._idle:
                    waiter = _Waiter(self._runtime.event())
                    self._waiting.insert(0 if urgent else len(self._waiting), waiter)
            if opening:
                return await self._open_counted(until)
            connection = self._kept() if waiter is None else await self._wait_for(waiter, until)
            if connection is not None:
                return connection
            if self._runtime.now() >= until:
                message = (
                    f"no connection to {self.url} became free in time: is it overloaded, stopped, or locked by another "
                    "transaction?"
                )
                raise BackendUnavailable(message)
            urgent = True  # it was woken as the first, and keeps its place

    def _has_room(self) -> bool:
        """Tell whether another connection may be opened. Under the mutex."""
        return len(self._counted) + self._opening < self.dialect.connections_max

    async def _wait_for(self, waiter: _Waiter, until: Instant) -> Connection | None:
        """Wait until another caller hands over a connection; None: try again."""
        try:
            while not waiter.event.is_set() and not self._has_room() and (now := self._runtime.now()) < until:
                await waiter.event.wait(min(WAIT_CHECK_SECONDS, until - now))
        except BaseException:
            connection = self._leave(waiter)
            if connection is not None:
                self._give_back(connection)
            elif waiter.event.is_set():
                self._wake_one()
            raise
        connection = self._leave(waiter)
        if connection is None or self._usable(connection):
            return connection
        self._drop(connection)
        return None

    def _leave(self, waiter: _Waiter) -> Connection | None:
        with self._mutex:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            return waiter.connection

    async def _open_counted(self, until: Instant) -> Connection:
        """Connect; `_opening` was counted up before."""
        connection: Connection | None = None
        try:
            connection = await self.connect(until)
            connection.used = 0.0
        finally:
            with self._mutex:
                self._opening -= 1
                if connection is not None:
                    self._counted.add(connection)
            if connection is None:
                self._wake_one()
        return connection

    def _give_back(self, connection: Connection) -> None:
        connection.used = self._runtime.now()
        if self._closed:
            self._drop(connection)
            return
        with self._mutex:
            if not self._waiting:
                self._idle.append(connection)
                return
            # Handed over, not put back: its giver would take it again before the other is awake.
            waiter = self._waiting.popleft()
            waiter.connection = connection
        waiter.event.set()

    def _drop(self, connection: Connection) -> None:
        connection.terminate()
        with self._mutex:
            self._counted.discard(connection)
        self._wake_one()

    def drop_idle(self) -> None:
        """
        Drop the kept connections.

        Where one did not answer, each of the others would cost its caller a wait. And when the event loop ends they are
        of no more use: aiomysql complains if they are left to the garbage collector then.
        """
        while (connection := take_last(self._idle)) is not None:
            self._drop(connection)

    def _wake_one(self) -> None:
        """Let the first waiting caller connect."""
        with self._mutex:
            waiter = self._waiting.popleft() if self._waiting else None
        if waiter is not None:
            waiter.event.set()

    async def connect(self, answer_by: float = inf) -> Connection:
        """Open a connection for the caller alone: in autocommit, at READ COMMITTED, and with time limits."""
        try:
            return await self._connect(answer_by)
        except BackendUnavailable as error:
            error.sent = False
            raise

    async def _connect(self, answer_by: float) -> Connection:
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        try:
            connection = await self._open(min(until - now, STATEMENT_SECONDS))
        except self.driver_errors as error:
            raise self.translate(error) from error
        try:
            if connection.fileno() >= 0:
                keep_alive(connection.fileno(), self.keepalive)
            await self.dialect.set_up(
                connection, self.label, max(0.0, min(until - self._runtime.now(), STATEMENT_SECONDS))
            )
        except self.driver_errors as error:
            connection.terminate()
            raise self.translate(error) from error
        except BaseException:
            connection.terminate()
            raise
        self.pooled = connection.pooled
        if isinstance(connection, AdaptedConnection) and self.engine.dialect.driver == "asyncpg":
            if connection.pooled:
                quirks.keep_nothing_prepared(connection.dbapi)
            else:
                self.engine.dialect.set_isolation_level(connection.dbapi, "AUTOCOMMIT")
                connection.transactional = False
        self._connections.add(connection)
        return connection

    async def _open(self, seconds: float) -> Connection:
        """Connect, in a thread or task of its own: drivers do not limit all that connecting may wait for."""
        now = self._runtime.now()
        hung = sum(now - began > STATEMENT_SECONDS for began in list(self._tries.values()))
        if seconds <= 0 or hung >= HUNG_MAX:
            raise TimeoutError(NO_ANSWER)
        if self._is_asyncio:
            return await self._open_in_task(seconds)
        if self.dialect.name == "sqlite":  # a file: and other threads may not use what some engines make
            return self._wrap(*self._open_dbapi())
        return self._wrap(*in_time(self._open_dbapi, seconds, self._close_late))

    async def _open_in_task(self, seconds: float) -> Connection:
        # Not cancelled: drivers differ in what a cancellation leaves behind.
        import asyncio  # noqa: PLC0415 - a blocking client does without

        task = asyncio.ensure_future(self._open_asyncio())

        def drop(done: asyncio.Task[Connection]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().terminate()

        try:
            await asyncio.wait([task], timeout=seconds)
        except BaseException:
            task.add_done_callback(drop)
            raise
        if not task.done():
            task.add_done_callback(drop)
            raise TimeoutError(NO_ANSWER)
        return task.result()

    async def _open_asyncio(self) -> Connection:
        return self._wrap(*await greenlet_spawn(self._open_dbapi))

    def _close_late(self, opened: tuple[Any, object, SqliteFile | None] | None) -> None:
        """Close a connection that came too late."""
        if opened is not None:
            end_quietly(opened[0].close)

    def _wrap(self, dbapi: Any, keep: object, file: SqliteFile | None) -> Connection:  # noqa: ANN401 - any driver's
        dialect = self.engine.dialect
        if dialect.driver in {"psycopg", "psycopg_async"}:
            from lockkit.backends.sql.postgresql import PsycopgConnection  # noqa: PLC0415 - other databases need no psycopg

            return PsycopgConnection(dialect.get_driver_connection(dbapi), self._runtime, (keep, dbapi))
        connection: Connection
        if dialect.is_async:
            # aiosqlite can terminate, but then nobody could wait for its thread: see `close`.
            can_terminate = dialect.has_terminate and dialect.driver != "aiosqlite"
            terminate = dialect.do_terminate if can_terminate else close_later
            connection = AdaptedConnection(dbapi, dialect.paramstyle, terminate, self._runtime, keep)
        elif self.dialect.name == "sqlite":
            connection = DbapiConnection(dbapi, dialect.paramstyle, keep)
        elif dialect.driver == "pymysql":
            connection = PyMysqlConnection(dbapi, dialect.paramstyle, STATEMENT_SECONDS, self._runtime, keep)
        else:
            connection = ThreadConnection(dbapi, dialect.paramstyle, keep)
        connection.file = file
        connection.transactional = dialect.driver in _SENDS_APART or self._begins_by_itself(dbapi)
        return connection

    def _begins_by_itself(self, dbapi: Any) -> bool:  # noqa: ANN401 - any driver's
        """Tell whether SQLite is in a transaction already: with ``autocommit=False``, sqlite3 then always is."""
        driver = getattr(dbapi, "driver_connection", dbapi)
        return self.dialect.name == "sqlite" and bool(getattr(driver, "in_transaction", False))

    def _open_dbapi(self) -> tuple[Any, object, SqliteFile | None]:
        """Connect, in autocommit; return the connection, what must live as long as it, and the file of SQLite."""
        mark = object()
        self._tries[mark] = self._runtime.now()
        try:
            if self.dialect.name == "sqlite":
                return self._open_file()
            return *self._open_once(), None
        except BaseException as error:
            if self.engine.dialect.driver == "pg8000":
                quirks.close_pg8000_socket(error)
            raise
        finally:
            del self._tries[mark]

    def _open_file(self) -> tuple[Any, object, SqliteFile | None]:
        for _ in range(OPENINGS_MAX):
            if self._path and not self._adopted:
                prepare(self._path, group=self.group)
            before = identity(self._path) if self._path else None
            dbapi, keep = self._open_once()
            self._path = self._path or _main_file(dbapi)
            if not self._path:  # in memory, shared under a name
                return dbapi, keep, None
            file = SqliteFile(self._path)
            if before is not None and file.identity == before:
                return dbapi, keep, file
            # Made just now, or replaced: lockkit cannot tell whether this connection leads to what is there now.
            dbapi.close()
        message = f"{self._path} was replaced again and again while it was opened"
        raise ConnectionAbortedError(message)

    def _open_once(self) -> tuple[Any, object]:
        dialect = self.engine.dialect
        keep: Any = None
        if self._adopted:
            # As the application's pool makes them, but its size is for the application alone. By a pool for each: some
            # are for one user at a time, and two threads that connect at once would have one connection.
            keep = self.engine.pool.recreate().connect()
            keep.detach()
            dbapi: Any = keep.dbapi_connection
        else:
            positional, named = dialect.create_connect_args(self.engine.url)
            named.update(self._arguments)
            dbapi = self.guard.connect(dialect, named) if self.guard else dialect.connect(*positional, **named)
        if self._adopted or not self._arguments.keys() & {"autocommit", "isolation_level"}:
            # Only the server says whether there is a pooler; in these drivers neither of the two sends anything.
            if dialect.driver == "asyncpg":
                dialect.set_isolation_level(dbapi, "READ COMMITTED")
            elif dialect.driver == "pg8000":
                dbapi.autocommit = False
            else:
                dialect.set_isolation_level(dbapi, "AUTOCOMMIT")
            # psycopg2 must do this itself, or it would go on in the old encoding.
            set_encoding = getattr(dbapi, "set_client_encoding", None)
            if set_encoding is not None:
                set_encoding("UTF8")
        return dbapi, keep

    # -- without an event loop -------------------------------------------------------------------------------------

    def _without_loop(self) -> Database:
        """Return the same database for what is left to do once the event loop has ended: to release what is held."""
        if self._blocking is None:
            driver = _BLOCKING_DRIVERS.get(self.engine.dialect.driver)
            is_file = self.dialect.name == "sqlite"
            if driver is None or (self._adopted and not is_file):
                message = f"{self.url} cannot be reached any more: the event loop has ended"
                raise BackendUnavailable(message)
            arguments = self.dialect.arguments[driver] if is_file else self._arguments
            target = self.engine.url.set(drivername=f"{self.engine.dialect.name}+{driver}")
            try:
                engine = create_engine(target, poolclass=NullPool, connect_args={**arguments})
            except ImportError as error:
                message = f"{self.url} cannot be reached without an event loop, and that has ended: {error}"
                raise BackendUnavailable(message) from error
            runtime = BlockingRuntime()
            self._blocking = Database(engine, runtime, self.url, adopted=False, arguments=arguments, guard=self.guard)
            self._blocking.group = self.group
        return self._blocking

    # -- errors ----------------------------------------------------------------------------------------------------

    def kind(self, error: BaseException) -> Kind:
        """Tell what a driver's error is about."""
        return self.dialect.kind(getattr(error, "orig", None) or error)

    def translate(self, error: BaseException) -> LockError:
        """Make a `LockError` of a driver's error, without passwords. To be raised ``from`` that."""
        text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        if isinstance(error.__cause__, OSError) and str(error.__cause__) not in text:  # aiomysql keeps the reason there
            text = f"{text}: {error.__cause__}"
        if self._password:
            text = text.replace(str(self._password), HIDDEN)
        return translate(self.kind(error), " ".join(text.split()), self.label)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close lockkit's connections. Statements that are under way keep theirs to their end."""
        self._closed = True
        if self._blocking is not None:
            await self._blocking.close()
        while (connection := take_last(self._idle)) is not None:
            self._counted.discard(connection)
            try:
                await connection.close()
            except self.driver_errors:
                connection.terminate()
        if self._is_asyncio and self.dialect.name == "sqlite" and not self._runtime.loop_has_ended():
            await until_closed()

    def connections(self) -> list[object]:
        """Return everything that must not be garbage-collected in a forked child: see the module."""
        return list(self._connections)


class _Waiter:
    """One caller that waits for a connection, and then has `connection`."""

    __slots__ = ("connection", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.connection: Connection | None = None


def _sqlite_path(url: URL) -> str:
    """Return the path of a file as SQLAlchemy opens it; empty where only SQLite knows it (a URI)."""
    database = url.database or ""
    return "" if database.startswith("file:") else str(Path(database).absolute())


def _main_file(dbapi: Any) -> str:  # noqa: ANN401 - any driver's
    cursor = dbapi.cursor()
    cursor.execute("PRAGMA database_list")
    rows = cursor.fetchall()
    cursor.close()
    return next((file or "" for _, name, file in rows if name == "main"), "")


def _label(url: URL) -> str:
    host = f"[{url.host}]" if url.host and ":" in url.host else url.host or ""
    port = "" if url.port is None else f":{url.port}"
    name = url.database or ""
    return f"{host}{port}/{name}" if host else name or url.get_backend_name()


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_parents: list[object] = []


def _before_fork() -> None:
    # Before, because what the child does first is to drop its parent's clients. Garbage-collecting a connection closes
    # it, and a transport of asyncio even leaves the event loop's selector, which parent and child share.
    _parents.append([database.connections() for database in list(_databases)])


def _after_fork_in_parent() -> None:
    _parents.pop()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
