"""
One connection to a database: logged in, and in autocommit.

::

    result = await connection.run(statement, parameters, seconds)  # raises the driver's errors, or TimeoutError
    await connection.finish(seconds)  # after a cancelled `run`: read and discard its answer
    connection.stale  # the server has closed it, as far as lockkit knows
    await connection.close() / connection.terminate()

- `PsycopgConnection` (`lockkit.backends.sql.postgresql`): psycopg 3, sync and async, through its libpq wrapper.
- `DbapiConnection` (`lockkit.backends.sql.blocking`): any driver through PEP 249; as it is, for SQLite.
  `PyMysqlConnection` and `ThreadConnection`: other blocking drivers.
- `AdaptedConnection` (`lockkit.backends.sql.adapted`): any asyncio driver that SQLAlchemy knows, through SQLAlchemy's
  PEP 249 form of it.

A connection has one user at a time. BEGIN and COMMIT are statements like others, for callers with a connection of their
own.

A statement that waits for a lock of the database may wait for hours, so a `SessionConnection` can also send a statement
now and read its answer later::

    connection.send(statement, parameters)
    await connection.until_answer(wake, until)  # it is answered, `wake` was set, or it is late
    result = await connection.answer(seconds)  # can be called again after a TimeoutError
"""

from __future__ import annotations

import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lockkit.backends.sql.file import SqliteFile
from lockkit.backends.sql.prepared import PreparedStatements
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant

T = TypeVar("T")

NO_ANSWER = "no answer within the time limit"

WAKE_CHECK_SECONDS = 0.1
"""How often a waiting thread checks whether another thread ended its wait (`lockkit.Client.close`). That sends nothing
to the server. Longer delays close(), shorter wakes idle threads more often."""


class Connection(ABC):
    """
    One connection.

    Attributes:
        used: Client monotonic time of its last use, set by its pool.
        pooled: Statements may each reach another session of the server (pgbouncer's transaction mode): lockkit must
            set nothing for the session, and LISTEN does not work.
        transactional: Each statement is in a transaction that the driver begins, see `DbapiConnection`.
        file: The file of a SQLite database; None for others.
        prepared: What the session has prepared, where lockkit does that by SQL; None elsewhere.
    """

    used: float = 0.0
    pooled: bool = False
    transactional: bool = False
    file: SqliteFile | None = None
    prepared: PreparedStatements | None = None

    @abstractmethod
    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """Run one statement."""

    @abstractmethod
    async def finish(self, seconds: float) -> None:
        """Read and discard the answer of a statement that was cancelled or interrupted. Raises if that fails."""

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the server has closed it, as far as lockkit knows without asking. Nothing may be under way."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor of its socket; -1 if there is none, or it is not known."""

    @property
    @abstractmethod
    def server_pid(self) -> int:
        """The process or thread at the server that serves this connection; 0 if unknown."""

    @abstractmethod
    def terminate(self) -> None:
        """Drop it at once, from any state. May be called twice."""

    async def close(self) -> None:
        """Close it in good order."""
        self.terminate()


class SessionConnection(Connection):
    """
    A connection that can be the session of a lock.

    Attributes:
        broken: An interrupt left it in an unknown state: `terminate` it.
    """

    broken: bool = False

    @abstractmethod
    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        """Send a statement without waiting. Every earlier one must be answered."""

    @abstractmethod
    async def answer(self, seconds: float) -> Result:
        """Read the answer to what was sent."""

    @property
    @abstractmethod
    def answered(self) -> bool:
        """Whether `answer` returns or raises without waiting: the answer has come, or the connection has ended."""

    @abstractmethod
    async def until_answer(self, wake: Event, until: float) -> None:
        """Return when `answered`, when `wake` was set, or at `until` (client monotonic time)."""

    @abstractmethod
    def ended_by_server(self, error: BaseException) -> bool:
        """Whether this error is the server's announcement that it ended the session before the last statement."""


def end_quietly(end: Callable[[], object]) -> None:
    """Have a driver roll back or close a connection that is given up, and may be cut or closed already."""
    with suppress(Exception):  # whatever a driver says of that, the error that gave the connection up is the caller's
        end()


def take_last(idle: list[T]) -> T | None:
    """Take what was kept last; None if there is none, or other threads have taken all."""
    try:
        return idle.pop()
    except IndexError:
        return None


def cut(fd: int) -> None:
    """End the stream of a socket that another thread reads, or that only a driver may close."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:  # the server closed it first
        copy.shutdown(socket.SHUT_RDWR)


def keep_alive(fd: int, seconds: float) -> None:
    """
    Have the system notice within so many seconds that a TCP connection is dead.

    By probes while it is idle, and otherwise by missing acknowledgements (tcp(7)). Shorter times that the driver or the
    application has set stay.
    """
    wanted = {
        "TCP_KEEPIDLE": max(1, round(seconds / 2)),
        "TCP_KEEPINTVL": max(1, round(seconds / 6)),
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(seconds * 1000),
    }
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:  # it ends just now
        if copy.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            option = getattr(socket, name, None)  # not each system has all of them
            if option is not None and not 0 < copy.getsockopt(socket.IPPROTO_TCP, option) <= value:
                copy.setsockopt(socket.IPPROTO_TCP, option, value)


def readable(fd: int) -> bool:
    """Tell whether a socket has something to read, the end of the connection included."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


async def until_readable(runtime: Runtime, fd: int, wake: Event, until: float) -> None:
    """Return when a socket can be read, when `wake` was set, or at `until` (client monotonic time)."""
    if runtime.kind == "asyncio":
        await _until_readable_asyncio(runtime, fd, wake, until)
        return
    while not wake.is_set():
        left = until - runtime.now()
        if left <= 0 or await runtime.readable(fd, min(left, WAKE_CHECK_SECONDS)):
            return
    wake.clear()


async def _until_readable_asyncio(runtime: Runtime, fd: int, wake: Event, until: Instant) -> None:
    import asyncio  # noqa: PLC0415 - a sync client does without

    loop = asyncio.get_running_loop()
    loop.add_reader(fd, wake.set)
    try:
        await wake.wait(max(0.0, until - runtime.now()))
    finally:
        loop.remove_reader(fd)
    wake.clear()
