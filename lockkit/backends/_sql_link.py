"""
One connection to a database that is logged in, in autocommit.

::

    result = await link.run(statement, parameters, seconds)  # raises the driver's errors, or TimeoutError
    await link.finish(seconds)  # after a cancelled `run`: hear its answer out
    link.stale  # the server has closed it, as far as is known
    await link.close() / link.terminate()

- `PqLink` (`lockkit.backends._sql_pq`): psycopg 3 on both faces, through its libpq wrapper.
- `DbapiLink`: any blocking driver, through PEP 249.
- `AdaptedLink`: any asyncio driver that SQLAlchemy knows, through SQLAlchemy's PEP 249 form of it.

A link is for one caller at a time. BEGIN and COMMIT are statements like others, for whoever has a link for himself.
"""

from __future__ import annotations

import asyncio
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.util import greenlet_spawn

from lockkit.backends._sql_statement import Result

if TYPE_CHECKING:
    from lockkit.backends._sql_statement import Parameter, Statement

__all__ = ["AdaptedLink", "DbapiLink", "Link", "close_later"]

NO_ANSWER = "no answer within the time limit"


class Link(ABC):
    """
    One connection.

    Attributes:
        used: Client monotonic time of its last use, for whoever keeps it.
        pooled: Statements may each reach another session of the server (pgbouncer's transaction mode): nothing may be
            set for the session, and LISTEN is of no use.
    """

    used: float = 0.0
    pooled: bool = False

    @abstractmethod
    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """
        Run one statement.

        Args:
            statement: What to run.
            parameters: Values for ``$1``, ``$2``, …
            seconds: For the answer. A blocking driver other than psycopg has a limit of its own.

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
    """Any blocking driver. Limits of time are the driver's own: see `lockkit.backends._sql_dialect`."""

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
            await greenlet_spawn(dbapi.close)


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
    """Find the socket of a connection: of PyMySQL, mysql-connector, aiomysql, asyncmy; -1 for others."""
    sock = getattr(driver_connection, "_sock", None)
    if sock is None:
        transport = getattr(getattr(driver_connection, "_writer", None), "transport", None)
        sock = None if transport is None else transport.get_extra_info("socket")
    try:
        return int(sock.fileno()) if sock is not None else -1
    except OSError:  # pg8000 calls a file so that it has made of its socket
        return -1


def _server_pid(driver_connection: Any) -> int:  # noqa: ANN401 - any driver's
    for name in ("get_backend_pid", "get_server_pid", "thread_id"):  # psycopg2; asyncpg; PyMySQL and aiomysql
        ask = getattr(driver_connection, name, None)
        if ask is not None:
            return int(ask())
    return 0
