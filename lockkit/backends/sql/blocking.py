"""Connections of drivers that block their thread: see `lockkit.backends.sql.connection`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lockkit.backends.sql import quirks
from lockkit.backends.sql.connection import (
    NO_ANSWER,
    Connection,
    SessionConnection,
    cut,
    end_quietly,
    readable,
    until_readable,
)
from lockkit.backends.sql.errors import is_mysql_session_end
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant

T = TypeVar("T")


class DbapiConnection(Connection):
    """
    A driver in the form of PEP 249.

    As it is for SQLite, which waits for nothing but other writers: see `lockkit.backends.sql.dialect`.
    """

    def __init__(self, dbapi: Any, paramstyle: str, keep: object = None) -> None:  # noqa: ANN401 - any driver's
        """Take over a connection in autocommit."""
        self.dbapi = dbapi
        self._paramstyle = paramstyle
        self._keep = keep
        self._cursor: Any = None
        self._fd = quirks.file_descriptor(self._driver_connection)

    @property
    def _driver_connection(self) -> Any:  # noqa: ANN401 - any driver's
        """The driver's own; SQLAlchemy's form of one for asyncio has it."""
        return getattr(self.dbapi, "driver_connection", self.dbapi)

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        del seconds
        return self._run(statement, parameters)

    def _run(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        if self.prepared is not None and statement.frequent:
            return self.prepared.run(statement, parameters, self._run_text)
        if self.transactional:
            return self._run_in_transaction(statement, parameters)
        return self._run_text(statement, parameters)

    def _run_in_transaction(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        """
        Run a statement in a transaction of its own, on a connection that is not in autocommit.

        Some drivers send a statement and its values in two messages. Outside a transaction a pooler may bring the
        second to another session, where it meets a statement of another client, which then gets these values.
        """
        dbapi = self.dbapi  # `terminate` forgets it, perhaps meanwhile
        try:
            result = self._run_text(statement, parameters)
            dbapi.commit()
        except BaseException:
            end_quietly(dbapi.rollback)
            raise
        return result

    def _run_text(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        text, order = statement.spelled(self._paramstyle)
        cursor = self._cursor
        if cursor is None:
            cursor = self._cursor = self.dbapi.cursor()
        cursor.execute(text, order(parameters))
        rows = cursor.fetchall() if cursor.description else ()
        return Result(rows, cursor.rowcount, getattr(cursor, "lastrowid", 0) or 0)

    async def finish(self, seconds: float) -> None:
        """See `Connection.finish`. After Ctrl-C lockkit cannot know how much of the answer the driver has read."""
        del seconds
        message = "interrupted in the middle of an answer"
        raise ConnectionAbortedError(message)

    @property
    def stale(self) -> bool:
        return self._fd >= 0 and readable(self._fd)

    @property
    def server_pid(self) -> int:
        return server_pid(self._driver_connection)

    def fileno(self) -> int:
        return self._fd

    def ended_by_server(self, error: BaseException) -> bool:
        return is_mysql_session_end(error)

    def terminate(self) -> None:
        """
        See `Connection.terminate`.

        First the cursor: the traceback of an interrupt may refer to it, and while it is open SQLite keeps the lock of a
        statement whose rows were not read, although the connection was closed (sqlite3_close_v2).
        """
        dbapi, self.dbapi = self.dbapi, None
        cursor, self._cursor = self._cursor, None
        if dbapi is not None:
            self._fd = -1
            if cursor is not None:
                end_quietly(cursor.close)
            end_quietly(dbapi.close)


class PyMysqlConnection(DbapiConnection, SessionConnection):
    """PyMySQL. Its time limit ends the connection, so `send` and `answer` wait for the socket themselves."""

    def __init__(self, dbapi: Any, paramstyle: str, seconds: float, runtime: Runtime, keep: object = None) -> None:  # noqa: ANN401 - PyMySQL's
        """Take over a connection; `seconds` is its limit if it has none. See `DbapiConnection`."""
        super().__init__(dbapi, paramstyle, keep)
        self._runtime = runtime
        self._limit: float = quirks.pymysql_limit(dbapi) or seconds
        self._set_limit(self._limit)

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        if seconds >= self._limit:
            return self._run(statement, parameters)
        self._set_limit(seconds)
        try:
            return self._run(statement, parameters)
        finally:
            self._set_limit(self._limit)

    def _run_text(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        try:
            self.send(statement, parameters)
        except BaseException:
            self.broken = True
            raise
        return self._read()

    def _read(self) -> Result:
        try:
            return quirks.pymysql_answer(self.dbapi)
        except BaseException as error:
            self.broken = not isinstance(error, Exception)  # Ctrl-C: how much of the answer was read is unknown
            raise

    def _set_limit(self, seconds: float) -> None:
        if self.dbapi is not None:
            quirks.set_pymysql_limit(self.dbapi, seconds)

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        text, order = statement.spelled("format")
        escape = self.dbapi.escape
        text %= tuple([escape(value) for value in order(parameters)])
        quirks.pymysql_send(self.dbapi, text.encode())

    async def answer(self, seconds: float) -> Result:
        if not await self._runtime.readable(self._fd, seconds):
            raise TimeoutError(NO_ANSWER)
        # The server has begun to answer: the rest must come in the same time.
        self._set_limit(seconds)
        try:
            return self._read()
        finally:
            self._set_limit(self._limit)

    @property
    def answered(self) -> bool:
        return self._fd < 0 or readable(self._fd)

    async def until_answer(self, wake: Event, until: Instant) -> None:
        await until_readable(self._runtime, self._fd, wake, until)


class ThreadConnection(DbapiConnection):
    """Any other blocking driver: drivers share no way to limit a statement's time, so each one has a thread."""

    _running = False

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        dbapi = self.dbapi

        def work() -> Result:
            self._running = True
            try:
                return self._run(statement, parameters)
            finally:
                self._running = False

        return in_time(work, seconds, lambda _: end_quietly(dbapi.close))

    def terminate(self) -> None:
        """See `Connection.terminate`. A driver's close() waits for the statement under way: its thread closes then."""
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is None:
            return
        fd, self._fd = self._fd, -1
        if not self._running:
            end_quietly(dbapi.close)
        elif fd >= 0:
            cut(fd)


def server_pid(driver_connection: Any) -> int:  # noqa: ANN401 - any driver's
    """See `Connection.server_pid`."""
    for name in ("get_backend_pid", "get_server_pid", "thread_id"):  # psycopg2; asyncpg; PyMySQL and aiomysql
        ask = getattr(driver_connection, name, None)
        if ask is not None:
            return int(ask())
    return 0


def in_time(function: Callable[[], T], seconds: float, late: Callable[[T | None], None]) -> T:
    """Call a function that may block for longer than its caller may wait, in a thread that is then left alone."""
    # The traceback of an error holds these frames, and those of the driver with its socket. No frame keeps the error:
    # only the garbage collector would free them.
    outcome: list[tuple[T | None, BaseException | None]] = []
    fate: dict[str, str] = {}  # dict.setdefault is atomic: the first of the two threads decides
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            outcome.append((None, error))
        if fate.setdefault("end", "in time") == "in time":
            done.release()
        else:
            late(outcome.pop()[0])

    try:
        threading.Thread(target=work, name="lockkit-sql-call", daemon=True).start()
    except RuntimeError:  # Python 3.12 and later start no thread once the interpreter is finalizing
        return function()
    try:
        done.acquire(timeout=max(0.0, seconds))
    finally:
        gave_up = fate.setdefault("end", "late") == "late"
    if gave_up:
        raise TimeoutError(NO_ANSWER)
    result, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return result  # type: ignore[return-value] # there was no error
    finally:
        del error
