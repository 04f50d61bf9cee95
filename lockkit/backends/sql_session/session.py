"""
One session at a database, whose open transaction (or user lock) is the lock: what is sent there, and heard later.

::

    result = await session.run(statement, parameters)  # raises the driver's errors; TimeoutError: no answer yet
    session.send(statement, parameters)  # a statement that waits for a lock of the database
    await session.until_answer(wake, until)  # its answer has come, or `wake` was set, or it is late
    result = await session.answer(seconds)  # hear it; also after a TimeoutError or a cancelled `run`

A statement that waits for a lock may wait for hours, so it must be possible to send it, do other things, and look for
its answer now and then; and a renewal whose answer is late is no reason to give up the connection that is the lock.
A `lockkit.backends.sql.connection.Link` hears each answer before it returns; this does not.

- `lockkit.backends.sql_session.postgresql.PqSession`: psycopg 3, sync and async. Several statements in one text are one
  round trip.
- `lockkit.backends.sql_session.mysql`: PyMySQL, aiomysql and asyncmy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from lockkit.backends.sql.connection import Link
    from lockkit.backends.sql.database import Database
    from lockkit.backends.sql.statement import Parameter, Result, Statement
    from lockkit.runtime import Event, Runtime

__all__ = ["GLANCE_SECONDS", "Session", "Turn", "open_session", "until_readable"]

GLANCE_SECONDS = 0.1
"""How often a waiting thread looks whether its wait was ended from elsewhere (`lockkit.Client.close`). That costs no
message to the server. Longer delays close(), shorter wakes idle threads more often."""


class Turn:
    """A lock for the users of one session: the renewer may be there when the holder releases."""

    __slots__ = ("_free", "_mutex", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        """Be free."""
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._free = runtime.event()
        self._free.set()

    def take_now(self) -> bool:
        """Take it if it is free; tell whether we have it."""
        with self._mutex:
            if not self._free.is_set():
                return False
            self._free.clear()
            return True

    async def take(self, until: float) -> bool:
        """Wait for it, at most until then (client monotonic time); tell whether we have it."""
        while True:
            if self.take_now():
                return True
            left = until - self._runtime.now()
            if left <= 0:
                return False
            await self._free.wait(left)

    def give(self) -> None:
        """Let the next one in."""
        self._free.set()


class Session(ABC):
    """
    One session.

    Attributes:
        link: Its connection.
        pid: What the server calls it, for KILL and its kind; 0 until known.
        started: When it began, as the server says it, to tell it from a later one of the same `pid`; 0 if not known.
        limit: How long the server was told to let it idle, in the server's unit; None: it is to be told.
        planned: The statement that locks was prepared.
        unheard: A statement was sent whose answer was not heard.
        useful_until: When what it holds will be lost unless it is renewed before, client monotonic clock.
        dropped: It was closed by us, in whatever state it was.
        answer_by: When the call under way must have ended, client monotonic clock; whoever uses it sets it.
        watched: The number under which `lockkit.backends.sql_session.watch` has its connection; -1: it has not.
        turn: Whose it is to use the session.
    """

    link: Link

    def __init__(self, runtime: Runtime) -> None:
        """Have nothing under way."""
        self.pid = 0
        self.started = 0
        self.limit: int | None = None
        self.planned = False
        self.unheard = False
        self.useful_until = inf
        self.dropped = False
        self.answer_by = inf
        self.watched = -1
        self.turn = Turn(runtime)
        self._runtime = runtime

    @property
    def pooled(self) -> bool:
        """See `lockkit.backends.sql.connection.Link.pooled`."""
        return self.link.pooled

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> Result:
        """
        Send, and hear the answer.

        Raises:
            TimeoutError: None came in time. It is still `unheard`: call `answer`, or `drop` the session.
            Exception: The driver's.
        """
        self.send(statement, parameters)
        return await self.answer()

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        """Send a statement. Nothing may be `unheard`."""
        assert not self.unheard
        if self.dropped:
            raise ConnectionAbortedError("the connection is closed")
        self.unheard = True
        try:
            self._send(statement, parameters)
        except BaseException:
            self.drop()
            raise

    async def answer(self) -> Result:
        """Hear what was sent, by `answer_by`. Raises as `run`."""
        seconds = max(0.0, min(STATEMENT_SECONDS, self.answer_by - self._runtime.now()))
        try:
            result = await self._answer(seconds)
        except Exception as error:
            # A caller that was cancelled or interrupted leaves it unheard, too.
            self.unheard = isinstance(error, TimeoutError)
            raise
        self.unheard = False
        return result

    @abstractmethod
    def _send(self, statement: Statement, parameters: Sequence[Parameter]) -> None: ...

    @abstractmethod
    async def _answer(self, seconds: float) -> Result: ...

    @abstractmethod
    def fileno(self) -> int:
        """Number of its socket."""

    @property
    @abstractmethod
    def answered(self) -> bool:
        """Whether what is unheard can be heard without waiting: an answer, or the end of the connection."""

    @abstractmethod
    async def until_answer(self, wake: Event, until: float) -> None:
        """Return when `answered`, when `wake` was set, or at `until` (client monotonic time)."""

    @property
    def ended(self) -> bool:
        """Whether it is closed, as far as is known without asking."""
        return self.dropped or (not self.unheard and self.link.stale)

    @abstractmethod
    def told(self, error: BaseException) -> bool:
        """Whether it was the server that told us, by this error, that it has ended the session: before it was asked."""

    def drop(self) -> None:
        """Close it at once, from any state: the server ends the transaction. May be called twice."""
        self.unheard = False
        self.dropped = True
        self.link.terminate()

    async def close(self) -> None:
        """Close it in good order. Nothing may be unheard."""
        await self.link.close()


async def open_session(database: Database, runtime: Runtime, answer_by: float) -> Session:
    """
    Connect, by then (client monotonic time).

    Raises:
        LockError: It cannot be had.
        ConfigurationError: Its driver cannot leave an answer unheard.
    """
    driver = database.engine.dialect.driver
    if database.dialect.name == "postgresql":
        if driver not in {"psycopg", "psycopg_async"}:
            raise _other_driver(database, driver, "psycopg")
        from lockkit.backends.sql_session.postgresql import PqSession  # noqa: PLC0415 - MariaDB needs no psycopg

        return PqSession(await database.connect(answer_by), runtime)
    from lockkit.backends.sql_session.mysql import PyMysqlSession, TaskSession  # noqa: PLC0415 - as above

    if runtime.kind == "asyncio":
        return TaskSession(await database.connect(answer_by), runtime)
    if driver != "pymysql":
        raise _other_driver(database, driver, "pymysql")
    return PyMysqlSession(await database.connect(answer_by), runtime)


def _other_driver(database: Database, driver: str, wanted: str) -> ConfigurationError:
    message = (
        f"{database.url}: mode=row and mode=advisory wait in the database's own queue, for which they need the driver "
        f"{wanted}, not {driver}. Use that one, or mode=table"
    )
    return ConfigurationError(message, backend=database.url)


async def until_readable(runtime: Runtime, fd: int, wake: Event, until: float) -> None:
    """Return when a socket can be read, when `wake` was set, or at `until` (client monotonic time)."""
    if runtime.kind == "asyncio":
        await _until_readable_asyncio(runtime, fd, wake, until)
        return
    while not wake.is_set():
        left = until - runtime.now()
        if left <= 0 or await runtime.readable(fd, min(left, GLANCE_SECONDS)):
            return
    wake.clear()


async def _until_readable_asyncio(runtime: Runtime, fd: int, wake: Event, until: float) -> None:
    import asyncio  # noqa: PLC0415 - a blocking client does without

    loop = asyncio.get_running_loop()
    loop.add_reader(fd, wake.set)
    try:
        await wake.wait(max(0.0, until - runtime.now()))
    finally:
        loop.remove_reader(fd)
    wake.clear()
