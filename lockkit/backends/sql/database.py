"""
A database, as the SQL backends use it, on both faces.

::

    database = open_database(url, options, host)  # or adopt_database(engine, ...); see _sql_options. No I/O
    result = await database.run(statement, [...])  # one statement, committed; raises LockError
    result = await database.run(statement, [...], again=True)  # it does no harm to run it twice
    result = await database.run(statement, [...], answer_by=answer_by)  # raises BackendUnavailable by then

    link = await database.connect()  # a connection for oneself: nobody else gets it
    result = await link.run(Statement("BEGIN"))  # raises the driver's errors, see `driver_errors` and `translate`
    link.terminate()  # or await link.close()

- Statements run on a few kept connections (`Dialect.connections_max`), each in autocommit at READ COMMITTED; no pool of
  SQLAlchemy's is in between. A connection that is given back goes to the caller that has waited longest; renewals are
  urgent, and go first. With an engine of the application's, connections are made as its pool makes them, but are
  not counted there: a release must never wait for a connection that the application holds.
- What the database gave up for others (deadlock, serialization, a wait for a lock) is run again until the caller's time
  is up; what it did not answer in time is not.
- A SQLite file that was removed or replaced is noticed before and after each statement: what is written to a file
  without a name, nobody else sees.
- Once the event loop has ended (`sys.exit` in it), statements run without one, on a blocking connection.
- A connection that the server has closed meanwhile is replaced before it is used.
- In a forked child the connections of the parent are left alone: closing them would end the parent's sessions.

Beside it: `_sql_statement` (text and parameters), `_sql_link` and `_sql_pq` (one connection), `_sql_dialect` (what
differs), `_sql_errors` (tables of errors), `_sql_schema` (tables, DDL), `_sql_options` (URLs, engines).
"""

from __future__ import annotations

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
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from lockkit.backend import seconds_left
from lockkit.backends.sql.connection import (
    NO_ANSWER,
    AdaptedLink,
    DbapiLink,
    Link,
    OpenFile,
    PyMysqlLink,
    ThreadLink,
    close_later,
    identity,
    in_time,
)
from lockkit.backends.sql.dialect import STATEMENT_SECONDS, Dialect, dialect_named
from lockkit.backends.sql.errors import Kind, translate
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import BlockingRuntime
from lockkit.url import HIDDEN

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from lockkit.backends.sql.statement import Parameter, Result, Statement
    from lockkit.runtime import Event, Runtime

__all__ = ["Database"]

TRUSTED_SECONDS = 0.005
"""A connection that was used so long ago is looked at before it is used again: the server may have closed it. Longer
finds fewer closed ones, shorter looks (a system call) more often."""

CONFLICT_PAUSE_MAX = 0.1
"""Longest pause before a statement that met a conflict is run again, seconds. Longer delays it, shorter meets the same
conflict again."""

LOCKED_PAUSE_MAX = 0.01
"""The same for one that waited in vain for others' locks: it has waited at the server. An urgent one takes a tenth, and
so goes before those of other processes, too."""

TURN_SECONDS = 0.5
"""How long a caller waits for a connection before it looks whether one was lost by an interrupt, seconds."""

HUNG_MAX = 8
"""How many tries to connect may hang. Each is a thread or task until its driver gives up, which an application's engine
may not have told it to do. With more than that, callers are refused at once."""

OPENINGS_MAX = 4
"""How often a SQLite file is opened until it is the one that was there before. One that is not there yet takes two."""

_BLOCKING_DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        "psycopg": "psycopg",
        "psycopg_async": "psycopg",
        "aiomysql": "pymysql",
        "asyncmy": "pymysql",
        "aiosqlite": "pysqlite",
    }
)


class Database:
    """
    One database and our connections to it.

    Attributes:
        dialect: What is different in it.
        engine: SQLAlchemy's, own or the application's: blocking, or behind an ``AsyncEngine`` its ``sync_engine``.
        url: Where it is, without a password: for messages.
        label: The same, shorter: ``host:port/name``, or a path.
        advisory: Advisory locks are to be taken here: servers where they do nothing are refused.
        pooled: Its connections lead to a pooler that gives each statement another session; known after the first one.
        driver_errors: What a `Link` may raise.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        runtime: Runtime,
        url: str,
        *,
        adopted: bool,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        Connect to nothing yet.

        Args:
            engine: In the form of the runtime's face.
            runtime: Of the face.
            url: For messages.
            adopted: The engine is the application's.
            arguments: For its driver, beside what is in the engine's URL. **May hold a password.**
        """
        self.engine: Engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self.dialect: Dialect = dialect_named(self.engine.dialect.name)
        self.url = url
        self.label = _label(self.engine.url)
        self.advisory = False
        self.pooled = False
        self._adopted = adopted
        self._runtime = runtime
        self._is_asyncio = runtime.kind == "asyncio"
        self._password = self.engine.url.password or ""
        errors: type[BaseException] = self.engine.dialect.loaded_dbapi.Error
        self.driver_errors: tuple[type[BaseException], ...] = (errors, SQLAlchemyError, OSError, EOFError)
        self._arguments = arguments
        self._pool: Any = None
        self._mutex = runtime.mutex()
        self._idle: list[Link] = []
        self._waiting: deque[_Turn] = deque()
        self._opening = 0
        # By weak references: one that an interrupt dropped between two lines is not counted any more.
        self._counted: weakref.WeakSet[Link] = weakref.WeakSet()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
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
        """
        Run one statement in a transaction of its own.

        Args:
            statement: What to run.
            parameters: Values for ``$1``, ``$2``, …
            again: It does no harm to run it twice, so one whose answer was lost with a kept connection is repeated.
            answer_by: When the caller must have an answer, client monotonic time.
            urgent: It goes before those that wait for a connection.

        Raises:
            BackendUnavailable: No usable answer.
            MissingTable: See `lockkit.backends.sql.errors`.
            ConfigurationError: Wrong credentials, missing rights and the like.
        """
        if self._runtime.loop_has_ended():
            return await self._without_loop().run(statement, parameters, again=again, answer_by=answer_by)
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        attempt = 0
        while True:
            link = self._kept() or await self._take(until, urgent=urgent)
            fresh = not link.used
            try:
                result = await self._run_on(link, statement, parameters, until)
            except self.driver_errors as error:
                kind = self.kind(error)
                attempt += 1
                yielded = kind in {"conflict", "locked"}
                repeat = yielded or (kind == "connection" and again and not fresh)
                again = again and yielded
                if yielded:
                    longest = min(CONFLICT_PAUSE_MAX, 0.002 * 2.0**attempt) if kind == "conflict" else LOCKED_PAUSE_MAX
                    pause = longest * self._runtime.random.uniform(0.5, 1.0) * (0.1 if urgent else 1.0)
                    await self._runtime.sleep(max(0.0, min(pause, until - self._runtime.now())))
                if not repeat or self._runtime.now() >= until:
                    raise self.translate(error) from error
            else:
                return result

    async def _run_on(self, link: Link, statement: Statement, parameters: Sequence[Parameter], until: float) -> Result:
        """Run it on a taken connection, which goes back or, where it is of no more use, away."""
        left = until - self._runtime.now()
        if left <= 0:
            self._give_back(link)
            raise TimeoutError(NO_ANSWER)
        try:
            result = await link.run(statement, parameters, min(left, STATEMENT_SECONDS))
            if link.file is not None:
                link.file.check()
        except self.driver_errors as error:
            # Read-only: perhaps a primary that was demoted, and a new connection finds the one that took over.
            kind = self.kind(error)
            if kind not in {"connection", "timeout", "read-only", "other"}:
                self._give_back(link)
                raise
            self._drop(link)
            if kind in {"connection", "timeout"}:
                self._drop_idle()
            raise
        except BaseException:
            # Cancelled or interrupted. Whoever undoes the statement must not overtake it: hear it out first.
            with suppress(TimeoutError):  # then it has been dropped, or soon will be
                await self._runtime.settle(self._hear_out(link), STATEMENT_SECONDS + 1.0)
            raise
        self._give_back(link)
        return result

    async def _hear_out(self, link: Link) -> None:
        try:
            await link.finish(STATEMENT_SECONDS)
        except self.driver_errors:
            self._drop(link)
        except BaseException:
            self._drop(link)
            raise
        else:
            self._give_back(link)

    # -- connections -----------------------------------------------------------------------------------------------

    def _kept(self) -> Link | None:
        """Take a kept connection, if one is still open. There is none while somebody waits for one."""
        idle = self._idle
        while idle:
            try:
                link = idle.pop()
            except IndexError:  # another thread took the last
                return None
            if self._usable(link):
                return link
            self._drop(link)
        return None

    def _usable(self, link: Link) -> bool:
        if link.file is not None and link.file.moved:
            return False
        return self._runtime.now() <= link.used + TRUSTED_SECONDS or not link.stale

    async def _take(self, until: float, *, urgent: bool) -> Link:
        """Connect anew, or wait for a connection that somebody gives back."""
        while True:
            turn: _Turn | None = None
            with self._mutex:
                if not self._idle:
                    if len(self._counted) + self._opening < self.dialect.connections_max:
                        self._opening += 1
                    else:
                        turn = _Turn(self._runtime.event())
                        self._waiting.insert(0 if urgent else len(self._waiting), turn)
                    opening = turn is None
                else:
                    opening = False
            if opening:
                return await self._open_counted(until)
            link = self._kept() if turn is None else await self._wait_for(turn, until)
            if link is not None:
                return link
            if self._runtime.now() >= until:
                count = self.dialect.connections_max
                message = f"all {count} connections to {self.url} are busy: is it overloaded, or stopped?"
                raise BackendUnavailable(message)
            urgent = True  # it has waited, and keeps its place

    async def _wait_for(self, turn: _Turn, until: float) -> Link | None:
        """Wait until a connection is given to us; None: look again."""
        try:
            await turn.event.wait(min(TURN_SECONDS, max(0.0, until - self._runtime.now())))
        except BaseException:
            link = self._leave(turn)
            if link is not None:
                self._give_back(link)
            elif turn.event.is_set():
                self._wake_one()
            raise
        link = self._leave(turn)
        if link is None or self._usable(link):
            return link
        self._drop(link)
        return None

    def _leave(self, turn: _Turn) -> Link | None:
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
            return turn.link

    async def _open_counted(self, until: float) -> Link:
        """Connect; the place was counted before."""
        link: Link | None = None
        try:
            link = await self.connect(until)
            link.used = 0.0
        finally:
            with self._mutex:
                self._opening -= 1
                if link is not None:
                    self._counted.add(link)
            if link is None:
                self._wake_one()
        return link

    def _give_back(self, link: Link) -> None:
        link.used = self._runtime.now()
        if self._closed:
            self._drop(link)
            return
        with self._mutex:
            if not self._waiting:
                self._idle.append(link)
                return
            # Handed over, not put back: its giver would take it again before the other is awake.
            turn = self._waiting.popleft()
            turn.link = link
        turn.event.set()

    def _drop(self, link: Link) -> None:
        link.terminate()
        with self._mutex:
            self._counted.discard(link)
        self._wake_one()

    def _drop_idle(self) -> None:
        """Drop what is kept: where one connection led to nobody, each of the others would cost its caller a wait."""
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread took the last
                return
            self._drop(link)

    def _wake_one(self) -> None:
        """Let the first of those that wait connect."""
        with self._mutex:
            turn = self._waiting.popleft() if self._waiting else None
        if turn is not None:
            turn.event.set()

    async def connect(self, answer_by: float = inf) -> Link:
        """
        Open a connection for the caller alone: in autocommit, at READ COMMITTED, and with limits of time.

        Args:
            answer_by: When the caller must have it, client monotonic time.

        Raises:
            LockError: It cannot be had.
        """
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        try:
            link = await self._open(min(until - now, STATEMENT_SECONDS))
        except self.driver_errors as error:
            raise self.translate(error) from error
        try:
            await self.dialect.greet(link, self.label, max(0.0, min(until - self._runtime.now(), STATEMENT_SECONDS)))
            if self.advisory:
                self._refuse_without_advisory_locks(link.product)
        except self.driver_errors as error:
            link.terminate()
            raise self.translate(error) from error
        except BaseException:
            link.terminate()
            raise
        self.pooled = link.pooled
        self._links.add(link)
        return link

    def _refuse_without_advisory_locks(self, product: str) -> None:
        # It speaks PostgreSQL's protocol, and its functions for advisory locks exist "for compatibility" and do nothing
        # ("Functions and Operators" in its documentation): everybody would be granted everything.
        if product.startswith("CockroachDB"):
            version = product.partition("(")[0].strip()
            message = f"{self.label} is {version}, whose advisory locks exclude nobody: use mode=table"
            raise ConfigurationError(message, backend=self.url)

    async def _open(self, seconds: float) -> Link:
        """Connect, in a thread or task of its own: drivers do not bound all that connecting may wait for."""
        now = self._runtime.now()
        hung = sum(now - began > STATEMENT_SECONDS for began in list(self._tries.values()))
        if seconds <= 0 or hung >= HUNG_MAX:
            raise TimeoutError(NO_ANSWER)
        if self._is_asyncio:
            return await self._open_in_task(seconds)
        if self.dialect.name == "sqlite":  # a file: and other threads may not use what some engines make
            return self._link(*self._open_dbapi())
        return self._link(*in_time(self._open_dbapi, seconds, self._close_late))

    async def _open_in_task(self, seconds: float) -> Link:
        # Not cancelled: drivers differ in what a cancellation leaves behind.
        import asyncio  # noqa: PLC0415 - a blocking client does without

        task = asyncio.ensure_future(self._open_asyncio())

        def drop(done: asyncio.Task[Link]) -> None:
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

    async def _open_asyncio(self) -> Link:
        return self._link(*await greenlet_spawn(self._open_dbapi))

    def _close_late(self, opened: tuple[Any, object, OpenFile | None] | None) -> None:
        """Close a connection for which nobody waits any more."""
        if opened is not None:
            with suppress(*self.driver_errors):  # it is of no use in any case
                opened[0].close()

    def _link(self, dbapi: Any, keep: object, file: OpenFile | None) -> Link:  # noqa: ANN401 - any driver's
        dialect = self.engine.dialect
        if dialect.driver in {"psycopg", "psycopg_async"}:
            from lockkit.backends.sql.postgresql import PqLink  # noqa: PLC0415 - other databases need no psycopg

            return PqLink(dialect.get_driver_connection(dbapi), self._runtime, (keep, dbapi))
        link: Link
        if dialect.is_async:
            terminate = dialect.do_terminate if dialect.has_terminate else close_later
            link = AdaptedLink(dbapi, dialect.paramstyle, terminate, keep)
        elif self.dialect.name == "sqlite":
            link = DbapiLink(dbapi, dialect.paramstyle, keep)
        elif dialect.driver == "pymysql":
            link = PyMysqlLink(dbapi, dialect.paramstyle, STATEMENT_SECONDS, keep)
        else:
            link = ThreadLink(dbapi, dialect.paramstyle, keep)
        link.file = file
        return link

    def _open_dbapi(self) -> tuple[Any, object, OpenFile | None]:
        """Connect, in autocommit; give the connection, what must live as long as it, and the file of SQLite."""
        mark = object()
        self._tries[mark] = self._runtime.now()
        try:
            if self.dialect.name == "sqlite":
                return self._open_file()
            return *self._open_once(), None
        finally:
            del self._tries[mark]

    def _open_file(self) -> tuple[Any, object, OpenFile | None]:
        for _ in range(OPENINGS_MAX):
            before = identity(self._path) if self._path else None
            dbapi, keep = self._open_once()
            self._path = self._path or _main_file(dbapi)
            if not self._path:  # in memory, shared under a name
                return dbapi, keep, None
            file = OpenFile(self._path)
            if before is not None and file.identity == before:
                return dbapi, keep, file
            # Made just now, or replaced: nobody can tell whether this connection leads to what is there now.
            dbapi.close()
        message = f"{self._path} was replaced again and again while it was opened"
        raise ConnectionAbortedError(message)

    def _open_once(self) -> tuple[Any, object]:
        dialect = self.engine.dialect
        keep: Any = None
        if self._adopted:
            if self._pool is None:
                # As the application's pool makes them, but its size is for the application alone.
                self._pool = self.engine.pool.recreate()
            keep = self._pool.connect()
            keep.detach()
            dbapi: Any = keep.dbapi_connection
        else:
            positional, named = dialect.create_connect_args(self.engine.url)
            dbapi = dialect.connect(*positional, **{**named, **self._arguments})
        if self._adopted or not self._arguments.keys() & {"autocommit", "isolation_level"}:
            dialect.set_isolation_level(dbapi, "AUTOCOMMIT")
            # psycopg2 must do this itself, or it would go on in the old encoding.
            set_encoding = getattr(dbapi, "set_client_encoding", None)
            if set_encoding is not None:
                set_encoding("UTF8")
        return dbapi, keep

    # -- without an event loop -------------------------------------------------------------------------------------

    def _without_loop(self) -> Database:
        """
        Give the same database for what is left to do once the event loop has ended: to release what is held.

        Raises:
            BackendUnavailable: Only the application's engine knows how to connect there, or there is no such driver.
        """
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
            self._blocking = Database(engine, BlockingRuntime(), self.url, adopted=False, arguments=arguments)
        return self._blocking

    # -- errors ----------------------------------------------------------------------------------------------------

    def kind(self, error: BaseException) -> Kind:
        """Tell what a driver's error is about."""
        return self.dialect.kind(getattr(error, "orig", None) or error)

    def translate(self, error: BaseException) -> LockError:
        """Make our error of a driver's, without passwords in its text. To be raised ``from`` it."""
        text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        if self._password:
            text = text.replace(str(self._password), HIDDEN)
        return translate(self.kind(error), " ".join(text.split()), self.label)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close our connections. Statements that are under way keep theirs to their end."""
        self._closed = True
        if self._blocking is not None:
            await self._blocking.close()
        while self._idle:
            link = self._idle.pop()
            self._counted.discard(link)
            try:
                await link.close()
            except self.driver_errors:
                link.terminate()
        if self._pool is not None:
            self._pool.dispose()

    def connections(self) -> list[object]:
        """Give everything that must not be collected in a forked child: see the module."""
        return [*self._links, self._pool]


class _Turn:
    """One caller that waits for a connection; `link` is what it is given."""

    __slots__ = ("event", "link")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.link: Link | None = None


def _sqlite_path(url: URL) -> str:
    """Give the path of a file as SQLAlchemy opens it; empty where only SQLite knows it (a URI)."""
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
    # Before, because what the child does first is to drop its parent's clients. Collecting a connection closes it, and
    # a transport of asyncio's even leaves the event loop's selector, which parent and child share.
    _parents.append([database.connections() for database in list(_databases)])


def _after_fork_in_parent() -> None:
    _parents.pop()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
