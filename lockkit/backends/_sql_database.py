"""
A database, as the SQL backends use it, on both faces.

::

    database = open_database(url, options, host)  # or adopt_database(engine, ...); see _sql_options. No I/O
    result = await database.run(statement, [...])  # one statement, committed; raises LockError
    result = await database.run(statement, [...], again=True)  # it does no harm to run it twice

    link = await database.connect()  # a connection for oneself: nobody else gets it
    result = await link.run(Statement("BEGIN"))  # raises the driver's errors, see `driver_errors` and `translate`
    link.terminate()  # or await link.close()

- Statements run on a few kept connections (`connections_max`), each in autocommit at READ COMMITTED; no pool of
  SQLAlchemy's is in between. With an engine of the application's, connections are made as its pool makes them, but are
  not counted there: a release must never wait for a connection that the application holds.
- What the database gave up for others (deadlock, serialization) is run again; what it did not answer in time is not.
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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from lockkit.backends._sql_dialect import STATEMENT_SECONDS, Dialect, dialect_named
from lockkit.backends._sql_errors import Kind, translate
from lockkit.backends._sql_link import AdaptedLink, DbapiLink, Link, close_later
from lockkit.errors import BackendUnavailable, LockError
from lockkit.url import HIDDEN

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from lockkit.backends._sql_statement import Parameter, Result, Statement
    from lockkit.runtime import Event, Runtime

__all__ = ["CONNECTIONS_MAX", "Database"]

CONNECTIONS_MAX = 4
"""Connections kept for statements. A statement takes a millisecond, so few carry many threads; more would take places
of the server's from others."""

CALL_SECONDS = 5.0
"""What one call may take, with waiting for a connection, connecting and repeating."""

TRUSTED_SECONDS = 0.005
"""A connection that was used so long ago is looked at before it is used again: the server may have closed it. Longer
finds fewer closed ones, shorter looks (a system call) more often."""

CONFLICT_PAUSE_MAX = 0.1
"""Longest pause before a statement that met a conflict is run again, seconds. Longer delays it, shorter meets the same
conflict again."""


class Database:
    """
    One database and our connections to it.

    Attributes:
        dialect: What is different in it.
        engine: SQLAlchemy's, own or the application's: blocking, or behind an ``AsyncEngine`` its ``sync_engine``.
        url: Where it is, without a password: for messages.
        label: The same, shorter: ``host:port/name``, or a path.
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
        self.pooled = False
        self._adopted = adopted
        self._runtime = runtime
        self._password = self.engine.url.password or ""
        errors: type[BaseException] = self.engine.dialect.loaded_dbapi.Error
        self.driver_errors: tuple[type[BaseException], ...] = (errors, SQLAlchemyError, OSError, EOFError)
        self._arguments = arguments
        self._pool: Any = None
        self._mutex = runtime.mutex()
        self._idle: list[Link] = []
        self._count = 0
        self._waiting: deque[Event] = deque()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._closed = False
        _databases.add(self)

    # -- statements ------------------------------------------------------------------------------------------------

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), *, again: bool = False) -> Result:
        """
        Run one statement in a transaction of its own.

        Args:
            statement: What to run.
            parameters: Values for ``$1``, ``$2``, …
            again: It does no harm to run it twice, so one whose answer was lost with a kept connection is repeated.

        Raises:
            BackendUnavailable: No usable answer.
            MissingTable: See `lockkit.backends._sql_errors`.
            ConfigurationError: Wrong credentials, missing rights and the like.
        """
        until = self._runtime.now() + CALL_SECONDS
        attempt = 0
        while True:
            link = self._kept() or await self._take(until)
            fresh = not link.used
            try:
                result = await self._run_on(link, statement, parameters)
            except self.driver_errors as error:
                kind = self.kind(error)
                attempt += 1
                repeat = kind == "conflict" or (kind == "connection" and again and not fresh)
                if not repeat or self._runtime.now() >= until:
                    raise self.translate(error) from error
                again = again and kind == "conflict"
                if kind == "conflict":
                    pause = min(CONFLICT_PAUSE_MAX, 0.002 * 2.0**attempt)
                    await self._runtime.sleep(pause * self._runtime.random.uniform(0.5, 1.0))
            else:
                return result

    async def _run_on(self, link: Link, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        """Run it on a taken connection, which goes back or, where it is of no more use, away."""
        try:
            result = await link.run(statement, parameters, STATEMENT_SECONDS)
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
        """Take a kept connection, if one is still open."""
        idle = self._idle
        while idle:
            try:
                link = idle.pop()
            except IndexError:  # another thread took the last
                return None
            if self._runtime.now() <= link.used + TRUSTED_SECONDS or not link.stale:
                return link
            self._drop(link)
        return None

    async def _take(self, until: float) -> Link:
        """Connect anew, or wait for a connection that somebody gives back."""
        while True:
            event: Event | None = None
            with self._mutex:
                if self._count < CONNECTIONS_MAX:
                    self._count += 1
                else:
                    event = self._runtime.event()
                    self._waiting.append(event)
            if event is None:
                try:
                    return await self._connect_counted()
                except BaseException:
                    self._uncount()
                    raise
            # One may have come back between the look and the event.
            link = self._kept()
            if link is None:
                await event.wait(max(0.0, until - self._runtime.now()))
                link = self._kept()
            with self._mutex:
                if event in self._waiting:
                    self._waiting.remove(event)
                elif link is None:
                    self._wake_one()
            if link is not None:
                return link
            if self._runtime.now() >= until:
                message = f"all {CONNECTIONS_MAX} connections to {self.url} are busy: is it overloaded?"
                raise BackendUnavailable(message)

    async def _connect_counted(self) -> Link:
        link = await self.connect()
        link.used = 0.0
        return link

    def _give_back(self, link: Link) -> None:
        link.used = self._runtime.now()
        if self._closed:
            self._drop(link)
            return
        self._idle.append(link)
        if self._waiting:
            with self._mutex:
                self._wake_one()

    def _drop(self, link: Link) -> None:
        link.terminate()
        self._uncount()

    def _drop_idle(self) -> None:
        """Drop what is kept: where one connection led to nobody, each of the others would cost its caller a wait."""
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread took the last
                return
            self._drop(link)

    def _uncount(self) -> None:
        with self._mutex:
            self._count -= 1
            self._wake_one()

    def _wake_one(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()

    async def connect(self) -> Link:
        """
        Open a connection for the caller alone: in autocommit, at READ COMMITTED, and with limits of time.

        Raises:
            LockError: It cannot be had.
        """
        try:
            link = await self._open()
        except self.driver_errors as error:
            raise self.translate(error) from error
        try:
            await self.dialect.greet(link, self.label)
        except self.driver_errors as error:
            link.terminate()
            raise self.translate(error) from error
        except BaseException:
            link.terminate()
            raise
        self.pooled = link.pooled
        self._links.add(link)
        return link

    async def _open(self) -> Link:
        if not self.engine.dialect.is_async:
            return self._link(*self._open_dbapi())
        # In a task of its own: drivers differ in what a cancellation leaves behind.
        import asyncio  # noqa: PLC0415 - a blocking client does without

        task = asyncio.ensure_future(self._open_asyncio())

        def drop(done: asyncio.Task[Link]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().terminate()

        try:
            await asyncio.wait([task], timeout=STATEMENT_SECONDS)
        except BaseException:
            task.add_done_callback(drop)
            raise
        if not task.done():
            task.add_done_callback(drop)
            message = "no connection within the time limit"
            raise TimeoutError(message)
        return task.result()

    async def _open_asyncio(self) -> Link:
        return self._link(*await greenlet_spawn(self._open_dbapi))

    def _link(self, dbapi: Any, keep: object) -> Link:  # noqa: ANN401 - any driver's
        dialect = self.engine.dialect
        if dialect.driver in {"psycopg", "psycopg_async"}:
            from lockkit.backends._sql_pq import PqLink  # noqa: PLC0415 - other databases need no psycopg

            return PqLink(dialect.get_driver_connection(dbapi), self._runtime, (keep, dbapi))
        if dialect.is_async:
            terminate = dialect.do_terminate if dialect.has_terminate else close_later
            return AdaptedLink(dbapi, dialect.paramstyle, terminate, keep)
        return DbapiLink(dbapi, dialect.paramstyle, keep)

    def _open_dbapi(self) -> tuple[Any, object]:
        """Connect, in autocommit; give the connection, and what must live as long as it."""
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
            if getattr(dbapi, "_read_timeout", 0) is None:  # PyMySQL without a limit
                dbapi._read_timeout = dbapi._write_timeout = STATEMENT_SECONDS  # noqa: SLF001
        return dbapi, keep

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
        while self._idle:
            link = self._idle.pop()
            self._uncount()
            try:
                await link.close()
            except self.driver_errors:
                link.terminate()
        if self._pool is not None:
            self._pool.dispose()

    def connections(self) -> list[object]:
        """Give everything that must not be collected in a forked child: see the module."""
        return [*self._links, self._pool]


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
