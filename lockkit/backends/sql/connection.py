"""
One connection to a database that is logged in, in autocommit.

::

    result = await link.run(statement, parameters, seconds)  # raises the driver's errors, or TimeoutError
    await link.finish(seconds)  # after a cancelled `run`: hear its answer out
    link.stale  # the server has closed it, as far as is known
    await link.close() / link.terminate()

- `PqLink` (`lockkit.backends.sql.postgresql`): psycopg 3 on both faces, through its libpq wrapper.
- `DbapiLink`: SQLite's blocking driver, through PEP 249; `PyMysqlLink` and `ThreadLink`: other blocking drivers.
- `AdaptedLink`: any asyncio driver that SQLAlchemy knows, through SQLAlchemy's PEP 249 form of it.

A link is for one caller at a time. BEGIN and COMMIT are statements like others, for whoever has a link for himself.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.util import greenlet_spawn

from lockkit.backends.sql.statement import Result

if TYPE_CHECKING:
    from lockkit.backends.sql.statement import Parameter, Statement

__all__ = ["AdaptedLink", "DbapiLink", "Link", "OpenFile", "PyMysqlLink", "ThreadLink", "close_later", "in_time"]

T = TypeVar("T")

NO_ANSWER = "no answer within the time limit"

CLOSE_SECONDS = 0.2
"""What a good-bye to a server may take, seconds. Longer delays `Client.close` when the server hangs; shorter leaves
the server to notice the end by itself."""


class OpenFile:
    """
    The file behind a connection of SQLite's, which may be removed or replaced while it is open.

    SQLite goes on in a file that has no name any more, and another client locks in the new one. In the modes with a
    rollback journal it looks before it writes, in WAL it does not.
    """

    def __init__(self, path: str) -> None:
        """Look at the file that is there now."""
        self._path = path
        self.identity = identity(path)

    @property
    def moved(self) -> bool:
        """Whether the path leads to another file now, or to none."""
        return identity(self._path) != self.identity

    def check(self) -> None:
        """
        See that what was read or written there is what others see.

        Raises:
            ConnectionAbortedError: It is another file.
        """
        if self.moved:
            message = f"{self._path} was removed or replaced while it was in use"
            raise ConnectionAbortedError(message)


def identity(path: str) -> tuple[int, int] | None:
    """Tell which file a path leads to; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - before and after each statement: a Path would cost more than the call
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Link(ABC):
    """
    One connection.

    Attributes:
        used: Client monotonic time of its last use, for whoever keeps it.
        pooled: Statements may each reach another session of the server (pgbouncer's transaction mode): nothing may be
            set for the session, and LISTEN is of no use.
        product: What the server calls itself, with its version; empty where nobody asked.
        file: Of SQLite.
    """

    used: float = 0.0
    pooled: bool = False
    product: str = ""
    file: OpenFile | None = None

    @abstractmethod
    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """
        Run one statement.

        Args:
            statement: What to run.
            parameters: Values for ``$1``, ``$2``, …
            seconds: For the answer.

        Raises:
            TimeoutError: None came. Of no more use: `terminate` it.
            Exception: The driver's.
            asyncio.CancelledError: The statement is still under way: `finish` it, or `terminate`.
        """

    @abstractmethod
    async def finish(self, seconds: float) -> None:
        """Hear out a statement whose caller was cancelled or interrupted. Raises if that cannot be."""

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the server has closed it, as far as is known without asking."""

    @property
    @abstractmethod
    def server_pid(self) -> int:
        """Which process or thread the server told us that it serves this with; 0 if unknown."""

    @abstractmethod
    def terminate(self) -> None:
        """Drop it at once, from any state. May be called twice."""

    async def close(self) -> None:
        """Close it in good order."""
        self.terminate()


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class DbapiLink(Link):
    """A blocking driver of SQLite's, which waits for nothing but other writers: see `lockkit.backends.sql.dialect`."""

    def __init__(self, dbapi: Any, paramstyle: str, keep: object = None) -> None:  # noqa: ANN401 - any driver's
        """
        Take over a connection in autocommit.

        Args:
            dbapi: The connection.
            paramstyle: Of the driver.
            keep: What must live as long as it.
        """
        self.dbapi = dbapi
        self._paramstyle = paramstyle
        self._keep = keep
        self._cursor = dbapi.cursor()
        self._execute = self._cursor.execute
        self._fd = _file_descriptor(dbapi)

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Link.run`."""
        del seconds
        return self._run(statement, parameters)

    def _run(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        text, order = statement.spelled(self._paramstyle)
        cursor = self._cursor
        self._execute(text, order(parameters))
        rows = cursor.fetchall() if cursor.description else ()
        return Result(rows, cursor.rowcount, getattr(cursor, "lastrowid", 0) or 0)

    async def finish(self, seconds: float) -> None:
        """See `Link.finish`. After Ctrl-C nobody knows how much of the answer the driver has read."""
        del seconds
        message = "interrupted in the middle of an answer"
        raise ConnectionAbortedError(message)

    @property
    def stale(self) -> bool:
        """See `Link.stale`."""
        return self._fd >= 0 and _readable(self._fd)

    @property
    def server_pid(self) -> int:
        """See `Link.server_pid`."""
        return _server_pid(self.dbapi)

    def terminate(self) -> None:
        """See `Link.terminate`."""
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is not None:
            self._fd = -1
            # PyMySQL says good-bye to the server in close(), which may hang; this only closes the socket.
            getattr(dbapi, "_force_close", dbapi.close)()


class PyMysqlLink(DbapiLink):
    """PyMySQL, whose limit for each read of the socket can be set for each statement."""

    def __init__(self, dbapi: Any, paramstyle: str, seconds: float, keep: object = None) -> None:  # noqa: ANN401 - PyMySQL's
        """Take over a connection; `seconds` is its limit if it has none. See `DbapiLink`."""
        super().__init__(dbapi, paramstyle, keep)
        self._limit: float = dbapi._read_timeout or seconds  # noqa: SLF001 - PyMySQL has no public name for it
        self._set_limit(self._limit)

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Link.run`."""
        if seconds >= self._limit:
            return self._run(statement, parameters)
        self._set_limit(seconds)
        try:
            return self._run(statement, parameters)
        finally:
            self._set_limit(self._limit)

    def _set_limit(self, seconds: float) -> None:
        if self.dbapi is not None:
            self.dbapi._read_timeout = self.dbapi._write_timeout = seconds  # noqa: SLF001 - as above


class ThreadLink(DbapiLink):
    """Any other blocking driver: there is no limit of time that all have, so each statement has a thread."""

    _running = False

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Link.run`."""
        dbapi = self.dbapi

        def work() -> Result:
            self._running = True
            try:
                return self._run(statement, parameters)
            finally:
                self._running = False

        return in_time(work, seconds, lambda _: _close_cut(dbapi))

    def terminate(self) -> None:
        """See `Link.terminate`. A driver's close() waits for the statement under way: its thread does that then."""
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is None:
            return
        fd, self._fd = self._fd, -1
        if not self._running:
            _close_cut(dbapi)
        elif fd >= 0:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:  # OSError: the server was faster
                copy.shutdown(socket.SHUT_RDWR)


def _close_cut(dbapi: Any) -> None:  # noqa: ANN401 - any driver's
    with suppress(Exception):  # any driver's complaint that the connection is cut, or closed already
        dbapi.close()


def in_time(function: Callable[[], T], seconds: float, late: Callable[[T | None], None]) -> T:
    """
    Run what may block for longer than its caller may wait, in a thread that is then left alone.

    Args:
        function: What.
        seconds: For the result.
        late: Called by that thread with a result that came too late, None if it was an error.

    Raises:
        TimeoutError: There was none in time.
        BaseException: What `function` raised.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    fate: dict[str, str] = {}  # dict.setdefault is atomic: whoever comes first decides
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            outcome.append((None, error))
        if fate.setdefault("end", "heard") == "heard":
            done.release()
        else:
            late(outcome[0][0])

    try:
        threading.Thread(target=work, name="lockkit-sql-call", daemon=True).start()
    except RuntimeError:  # Python 3.12 and later start no thread once the interpreter is finalizing
        return function()
    try:
        done.acquire(timeout=max(0.0, seconds))
    finally:
        mine = fate.setdefault("end", "late") == "late"
    if mine:
        raise TimeoutError(NO_ANSWER)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value] # there was no error


class AdaptedLink(Link):
    """Any asyncio driver, as SQLAlchemy presents it: its blocking look is carried by a greenlet."""

    def __init__(self, dbapi: Any, paramstyle: str, terminate: Any, keep: object = None) -> None:  # noqa: ANN401 - any driver's
        """
        Take over a connection in autocommit.

        Args:
            dbapi: SQLAlchemy's form of the connection.
            paramstyle: Of the driver.
            terminate: Drops such a connection without waiting.
            keep: What must live as long as it.
        """
        self.dbapi = dbapi
        self._paramstyle = paramstyle
        self._terminate = terminate
        self._keep = keep
        self._task: asyncio.Task[Result] | None = None
        self._fd = _file_descriptor(getattr(dbapi, "driver_connection", dbapi))

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Link.run`. In a task of its own: drivers differ in what a cancellation leaves of a connection."""
        self.send(statement, parameters)
        return await self.answer(seconds)

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> asyncio.Task[Result]:
        """Start a statement, whose `answer` is heard later; the task is done when it is there."""
        self._task = asyncio.create_task(self._run(statement, parameters))
        return self._task

    async def answer(self, seconds: float) -> Result:
        """Hear what was sent. After a TimeoutError it can be called again."""
        assert self._task is not None
        await asyncio.wait([self._task], timeout=seconds)
        return self._result()

    def _result(self) -> Result:
        task, self._task = self._task, None
        assert task is not None
        if task.done():
            return task.result()
        self._task = task
        raise TimeoutError(NO_ANSWER)

    async def _run(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        return await greenlet_spawn(self._run_adapted, statement, parameters)

    def _run_adapted(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        text, order = statement.spelled(self._paramstyle)
        cursor = self.dbapi.cursor()
        try:
            cursor.execute(text, order(parameters))
            rows = list(cursor.fetchall()) if cursor.description else ()
            return Result(rows, cursor.rowcount, getattr(cursor, "lastrowid", 0) or 0)
        finally:
            cursor.close()

    async def finish(self, seconds: float) -> None:
        """See `Link.finish`. What the statement gave, an error too, is nobody's any more."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
            task = self._task
            if not task.done():
                raise TimeoutError(NO_ANSWER)
            self._task = None
            task.result()

    @property
    def stale(self) -> bool:
        """See `Link.stale`."""
        return self._fd >= 0 and _readable(self._fd)

    @property
    def server_pid(self) -> int:
        """See `Link.server_pid`."""
        return _server_pid(getattr(self.dbapi, "driver_connection", self.dbapi))

    def terminate(self) -> None:
        """See `Link.terminate`."""
        if self._task is not None:
            self._task.cancel()
            self._task.add_done_callback(_heard)
            self._task = None
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is not None:
            self._fd = -1
            self._terminate(dbapi)

    async def close(self) -> None:
        """See `Link.close`. Drivers with a thread of their own (aiosqlite) end it in good order only."""
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is not None:
            self._fd = -1
            task = asyncio.ensure_future(greenlet_spawn(dbapi.close))
            task.add_done_callback(_heard)
            _closing.add(task)
            task.add_done_callback(_closing.discard)
            await asyncio.wait([task], timeout=CLOSE_SECONDS)


def _heard(task: asyncio.Task[Any]) -> None:
    """See that asyncio does not complain of an error that nobody asked for."""
    if not task.cancelled():
        task.exception()


_closing: set[asyncio.Task[None]] = set()
"""asyncio itself keeps tasks that nobody waits for by weak references only."""


def close_later(dbapi: Any) -> None:  # noqa: ANN401 - any driver's
    """Terminate a connection of a driver that cannot do so without waiting, as aiosqlite before 0.22."""
    task: asyncio.Task[None] = asyncio.ensure_future(greenlet_spawn(dbapi.close))
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    task.add_done_callback(_heard)


def _file_descriptor(driver_connection: Any) -> int:  # noqa: ANN401 - any driver's
    """Find the socket of a connection: of psycopg2, PyMySQL, aiomysql, asyncmy, pg8000; -1 for others."""
    sock = driver_connection if hasattr(driver_connection, "fileno") else None
    for name in ("_usock", "_sock"):
        sock = sock or getattr(driver_connection, name, None)
    if sock is None:
        transport = getattr(getattr(driver_connection, "_writer", None), "transport", None)
        sock = None if transport is None else transport.get_extra_info("socket")
    try:
        return int(sock.fileno()) if sock is not None else -1
    except OSError:  # closed
        return -1


def _server_pid(driver_connection: Any) -> int:  # noqa: ANN401 - any driver's
    for name in ("get_backend_pid", "get_server_pid", "thread_id"):  # psycopg2; asyncpg; PyMySQL and aiomysql
        ask = getattr(driver_connection, name, None)
        if ask is not None:
            return int(ask())
    return 0
