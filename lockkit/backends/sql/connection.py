"""
One connection to a database: logged in, and in autocommit.

::

    result = await connection.run(statement, parameters, seconds)  # raises the driver's errors, or TimeoutError
    await connection.finish(seconds)  # after a cancelled `run`: read and discard its answer
    connection.stale  # the server has closed it, as far as lockkit knows
    await connection.close() / connection.terminate()

lockkit has one driver for each kind of database, and both APIs use it:

- `lockkit.backends.sql.postgresql`: psycopg, through its libpq wrapper. One non-blocking socket, the runtime waits.
- `lockkit.backends.sql.mysql`: PyMySQL. After `send` the runtime waits for the answer; `run` blocks.
- `lockkit.backends.sql.sqlite`: Python's sqlite3.

PyMySQL and sqlite3 block the thread that calls them. Under asyncio a `Worker` calls them, the thread of one connection.
psycopg and PyMySQL connect in a thread, because neither limits all that connecting may wait for.

A connection has one user at a time. BEGIN and COMMIT are statements like others, for callers with a connection of their
own.

A statement that waits for a lock of the database may wait for hours, so a connection to a server can also send a
statement now and read its answer later::

    connection.send(statement, parameters)
    await connection.until_answer(wake, until)  # it is answered, `wake` was set, or it is late
    result = await connection.answer(seconds)  # can be called again after a TimeoutError
"""

from __future__ import annotations

import os
import queue
import re
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from lockkit.runtime import Event, Runtime

T = TypeVar("T")

NO_ANSWER = "no answer within the time limit"

WAKE_CHECK_SECONDS = 0.1
"""How often a waiter checks whether its wait was ended (`lockkit.Client.close`). That sends nothing to the server.
Longer delays close(), shorter wakes idle waiters more often."""


Parameter: TypeAlias = "str | bytes | int | list[str] | None"

_PARAMETER = re.compile(r"(?<!\$)\$([1-9][0-9]*)")


class Result(NamedTuple):
    """What a statement returned."""

    rows: Sequence[tuple[Any, ...]]  # all; numbers as int, text as str (as bytes from a column of bytes), NULL as None
    changed: int  # how many rows it changed, or returned
    last_id: int  # what ``LAST_INSERT_ID(value)`` was set to, on MariaDB and MySQL


class Statement:
    """One statement. Made once and used often: connections keep what they prepared by its identity."""

    def __init__(self, text: str) -> None:
        # With parameters ``$1``, ``$2``, … in any number and order. ``$$1`` is sent as ``$1``: a parameter of what
        # PREPARE prepares. It has no other ``$``.
        self.text = text
        self.packed = text.encode()

    @cached_property
    def numbered(self) -> str:
        """The text with parameters as SQLite has them."""
        return self.text.replace("$", "?")

    @cached_property
    def _format(self) -> tuple[str, list[int]]:
        places = [int(number) - 1 for number in _PARAMETER.findall(self.text)]
        return _PARAMETER.sub("%s", self.text.replace("%", "%%")).replace("$$", "$"), places

    def filled(self, spell: Callable[[Any], object], parameters: Sequence[Any]) -> bytes:
        """Write the values that it has into it, each as `spell` spells it."""
        text, places = self._format
        return (text % tuple([spell(parameters[place]) for place in places])).encode()


class Connection:
    """One connection; a subclass for each driver."""

    used: float = 0.0  # client monotonic time of its last use, set by its pool
    # Statements may each reach another session of the server (pgbouncer's transaction mode): lockkit must set nothing
    # for the session, and LISTEN does not work.
    pooled: bool = False
    broken: bool = False  # an interrupt left it in an unknown state: `terminate` it
    _worker: Worker | None = None

    def __init__(self, runtime: Runtime, fd: int) -> None:
        self._runtime = runtime
        self._blocking = runtime.kind == "blocking"
        self.fd = fd  # file descriptor of its socket; -1 if there is none
        _connections[id(self)] = self

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """Run one statement."""
        raise NotImplementedError

    async def _call(self, function: Callable[[], T], seconds: float) -> T:
        """Call a driver that blocks: under asyncio in a thread."""
        if self._blocking:
            return function()
        self._worker = self._worker or Worker(self._runtime)
        return await self._worker.call(function, seconds)

    async def finish(self, seconds: float) -> None:
        """Read and discard the answer of a statement that was cancelled or interrupted. Raises if that fails."""
        if self._worker is None:
            # After Ctrl-C lockkit cannot know how much of the answer the driver has read.
            raise ConnectionAbortedError("interrupted in the middle of an answer")
        await self._worker.finish(seconds)

    @property
    def stale(self) -> bool:
        """Whether it cannot be used again, as far as lockkit knows without asking. Nothing may be under way."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Drop it at once, from any state. May be called twice."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it in good order."""
        self.terminate()

    # -- of a connection to a server -------------------------------------------------------------------------------

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        """Send a statement without waiting. Every earlier one must be answered."""
        raise NotImplementedError

    async def answer(self, seconds: float) -> Result:
        """Read the answer to what was sent."""
        raise NotImplementedError

    @property
    def answered(self) -> bool:
        """Whether `answer` returns or raises without waiting: the answer has come, or the connection has ended."""
        raise NotImplementedError

    async def until_answer(self, wake: Event, until: float) -> None:
        """Return when `answered`, when `wake` was set, or at `until` (client monotonic time)."""
        while not wake.is_set():
            left = until - self._runtime.now()
            if left <= 0 or await self._runtime.readable(self.fd, min(left, WAKE_CHECK_SECONDS)):
                return
        wake.clear()

    def keep_alive(self, seconds: float) -> None:
        """
        Have the system notice within so many seconds that a TCP connection is dead.

        By probes while it is idle, and otherwise by missing acknowledgements (tcp(7)). Shorter times that the driver
        has set stay.
        """
        wanted = {
            "TCP_KEEPIDLE": max(1, round(seconds / 2)),
            "TCP_KEEPINTVL": max(1, round(seconds / 6)),
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": round(seconds * 1000),
        }
        with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as copy:  # it ends just now
            if copy.family not in {socket.AF_INET, socket.AF_INET6}:
                return
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in wanted.items():
                option = getattr(socket, name, None)  # not each system has all of them
                if option is not None and not 0 < copy.getsockopt(socket.IPPROTO_TCP, option) <= value:
                    copy.setsockopt(socket.IPPROTO_TCP, option, value)


_connections: WeakValueDictionary[int, Connection] = WeakValueDictionary()
_parents: list[object] = []


def _before_fork() -> None:
    # Before, because what the child does first is to drop its parent's clients. Garbage-collecting a connection there
    # would close it, and with it the parent's session.
    _parents.append([reference() for reference in _connections.valuerefs()])


os.register_at_fork(before=_before_fork, after_in_parent=_parents.pop)


class Driver:
    """How lockkit connects to one database; a subclass for each kind."""

    errors: tuple[type[BaseException], ...]  # what a `Connection` and `open` may raise
    password: str = ""  # the one that was used last, to keep it out of messages

    def open(self, runtime: Runtime) -> Connection:
        """Connect, in autocommit. It may block for longer than its caller can wait."""
        raise NotImplementedError


class Worker:
    """The thread that calls the blocking driver of one connection, one call after the other."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: Event | None = None
        self._outcome: list[tuple[Any, BaseException | None]] = []
        # It refers to the queue alone, so that a connection nobody closed can be garbage-collected.
        threading.Thread(target=_work, args=(self._jobs,), name="lockkit-sql-driver", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether there is a call whose result nobody has taken."""
        return self._done is not None

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.is_set()

    async def call(self, function: Callable[[], T], seconds: float) -> T:
        """Call a function. After a TimeoutError or a cancellation it goes on, see `finish`."""
        self._done = self._put(function, self._outcome)
        result: T = await self.finish(seconds)
        return result

    def _put(self, function: Callable[[], object], outcome: list[tuple[Any, BaseException | None]]) -> Event:
        done = self._runtime.event()

        def work() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                outcome.append((None, error))
            done.set()

        self._jobs.put(work)
        return done

    async def until_done(self, seconds: float) -> bool:
        """Wait for the call that is under way, if there is one; return whether it is over."""
        return self._done is None or await self._done.wait(max(0.0, seconds))

    async def finish(self, seconds: float) -> Any:  # noqa: ANN401 - of any function
        """Take the result of the call that is under way; None if there is none."""
        if not await self.until_done(seconds):
            raise TimeoutError(NO_ANSWER)
        if self._done is None:
            return None
        self._done = None
        result, error = self._outcome.pop()
        if error is None:
            return result
        try:
            raise error
        finally:
            # Its traceback holds the frames of the driver, with its socket. If a frame kept it, only the garbage
            # collector would free them.
            del error

    def end(self, function: Callable[[], object]) -> Event:
        """Call this function last; return an event that is set afterwards."""
        done = self._put(function, [])
        self._jobs.put(None)
        return done

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def end_quietly(end: Callable[[], object]) -> None:
    """Have a driver close a connection that is given up, and may be cut or closed already."""
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


def readable(fd: int) -> bool:
    """Tell whether a socket has something to read, the end of the connection included."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
