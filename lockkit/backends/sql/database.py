"""
A database, as the SQL backends use it, with the sync and async APIs.

::

    database = open_database(url, ...)  # or adopt_database(engine, ...), see options.py
    result = await database.run(statement, [...])  # one statement, committed; raises LockError
    result = await database.run(statement, [...], again=True)  # a statement that may run twice
    result = await database.run(statement, [...], answer_by=answer_by)  # raises BackendUnavailable by then

    connection = await database.connect()  # a connection of the caller's own
    result = await connection.run(Statement("BEGIN"))  # raises the driver's errors, see `driver_errors` and `translate`
    connection.terminate()  # or await connection.close()

- Statements run on a few kept connections (`Dialect.connections_max`), each in autocommit at READ COMMITTED. There are
  as many places for statements; one that is left goes to the caller that has waited longest, or to a renewal, which
  is urgent. With an application's engine, too, the connections are lockkit's own: a release must never wait for one
  that the application holds.
- A statement that the database gave up for another one (deadlock, serialization, a wait for a lock) is retried until
  the caller's time is up; one that was not answered in time is not.
- Once the event loop has ended (`sys.exit` in it), statements run without one, on a blocking connection.
- A connection that the server has closed meanwhile is replaced before it is used.
- In a forked child the connections of the parent are left alone: closing them would end the parent's sessions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from weakref import WeakSet

from lockkit.backend import seconds_left
from lockkit.backends.sql.connection import NO_ANSWER, Connection, Driver, Parameter, Result, Statement, take_last
from lockkit.backends.sql.dialect import CONFLICTS, KEEPALIVE_SECONDS, STATEMENT_SECONDS, Dialect, translate
from lockkit.drivers import in_thread
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import BlockingRuntime, Event, Runtime
from lockkit.units import Instant
from lockkit.url import HIDDEN

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
"""How long a caller waits for a place before it checks whether an interrupt lost one, seconds."""


class Database:
    """One database and lockkit's connections to it."""

    def __init__(
        self, driver: Driver, dialect: Dialect, runtime: Runtime, *, url: str, label: str, pool_size: int | None = None
    ) -> None:
        self.driver = driver
        self.dialect = dialect
        self.url = url  # where it is, without a password: for messages
        self.label = label  # the same, shorter: ``host:port/name``, or a path
        self.pool_size = pool_size  # how many connections the pool of an application's engine may have; None: any
        self.pooled = False  # a pooler gives each statement another session; known after the first connection
        self.keepalive = KEEPALIVE_SECONDS
        self.driver_errors = driver.errors
        self.kind = dialect.kind
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._idle: list[Connection] = []
        self._waiting: deque[_Place] = deque()
        # Weak: one that an interrupt dropped between two lines does not count any more.
        self._taken: WeakSet[_Place] = WeakSet()
        self._blocking: Database | None = None
        self._closed = False

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
            if self._blocking is None:
                self._blocking = Database(self.driver, self.dialect, BlockingRuntime(), url=self.url, label=self.label)
            return await self._blocking.run(statement, parameters, again=again, answer_by=answer_by)
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        attempt, uncertain = 0, False
        while True:
            fresh = True
            failure: BaseException
            place = _Place()
            try:
                try:
                    await self._enter(place, until, urgent=urgent)
                    connection = self._kept()
                    fresh = connection is None
                    return await self._run_on(connection or await self.connect(until), statement, parameters, until)
                finally:
                    self._leave(place)
            except BackendUnavailable as error:
                error.sent = uncertain
                raise
            except self.driver_errors as error:
                failure = error
            kind = self.kind(failure)
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
                try:
                    raise self.translate(failure) from failure
                finally:
                    del failure  # its traceback refers to this frame

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
        except self.driver_errors as error:
            kind = self.kind(error)
            if kind not in {"connection", "timeout", "read-only", "no transaction", "other"}:
                self._give_back(connection)
                raise
            connection.terminate()
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

        async def discard() -> None:
            try:
                await connection.finish(STATEMENT_SECONDS)
                self._give_back(connection)
            except BaseException as error:
                connection.terminate()
                if not isinstance(error, self.driver_errors):
                    raise
            finally:
                done.set()

        try:
            with suppress(TimeoutError):  # then it has been dropped, or soon will be
                await self._runtime.settle(discard(), until - self._runtime.now())
        except asyncio.CancelledError:
            while not done.is_set() and (left := until - self._runtime.now()) > 0:
                with suppress(asyncio.CancelledError):
                    await done.wait(left)
            raise

    # -- connections -----------------------------------------------------------------------------------------------

    def _kept(self) -> Connection | None:
        """Take a kept connection, if one is still open."""
        while (connection := take_last(self._idle)) is not None:
            if self._usable(connection):
                return connection
            connection.terminate()
        return None

    def _usable(self, connection: Connection) -> bool:
        # A look at a file is cheap, and nobody may lock in one that was replaced just now.
        trusted = connection.fd >= 0 and self._runtime.now() <= connection.used + TRUSTED_SECONDS
        return trusted or not connection.stale

    async def _enter(self, place: _Place, until: Instant, *, urgent: bool) -> None:
        """Take a place for one statement, or wait until another caller leaves one."""
        with self._mutex:
            if not self._waiting and self._has_room():
                self._taken.add(place)
                return
            place.free = self._runtime.event()
            self._waiting.insert(0 if urgent else len(self._waiting), place)
        while not place.free.is_set():
            left = until - self._runtime.now()
            if left <= 0:
                message = (
                    f"no connection to {self.url} became free in time: is it overloaded, stopped, or locked by another "
                    "transaction?"
                )
                raise BackendUnavailable(message)
            await place.free.wait(min(WAIT_CHECK_SECONDS, left))
            self._let_in()

    def _leave(self, place: _Place) -> None:
        """Leave a place, or the queue for one."""
        with self._mutex:
            self._taken.discard(place)
            if place in self._waiting:
                self._waiting.remove(place)
        self._let_in()

    def _let_in(self) -> None:
        """Give free places to those that have waited longest."""
        while self._waiting:
            with self._mutex:
                if not self._waiting or not self._has_room():
                    return
                place = self._waiting.popleft()
                self._taken.add(place)
            place.free.set()

    def _has_room(self) -> bool:
        return len(self._taken) < self.dialect.connections_max

    def _give_back(self, connection: Connection) -> None:
        connection.used = self._runtime.now()
        if self._closed:
            connection.terminate()
        else:
            self._idle.append(connection)

    def drop_idle(self) -> None:
        """
        Drop the kept connections.

        Where one did not answer, each of the others would cost its caller a wait. And when the event loop ends they are
        of no more use.
        """
        while (connection := take_last(self._idle)) is not None:
            connection.terminate()

    async def connect(self, answer_by: float = inf) -> Connection:
        """Open a connection for the caller alone: in autocommit, at READ COMMITTED, and with time limits."""
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now)
        connection: Connection | None = None
        try:
            connection = await self._open(min(until - now, STATEMENT_SECONDS))
            if connection.fd >= 0:
                connection.keep_alive(self.keepalive)
            left = max(0.0, min(until - self._runtime.now(), STATEMENT_SECONDS))
            await self.dialect.set_up(connection, self.label, left)
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if not isinstance(error, self.driver_errors):
                raise
            failure = self.translate(error)
            if isinstance(failure, BackendUnavailable):
                failure.sent = False
            raise failure from error
        self.pooled = connection.pooled
        return connection

    async def _open(self, seconds: float) -> Connection:
        if seconds <= 0:
            raise TimeoutError(NO_ANSWER)
        if self.dialect.name == "sqlite" and self._runtime.kind == "blocking":  # a file
            return self.driver.open(self._runtime)
        late: list[bool] = []

        def connect() -> Connection:
            connection = self.driver.open(self._runtime)
            if late:
                connection.terminate()
            return connection

        try:
            return await in_thread(self._runtime, connect, seconds)
        except BaseException:
            late.append(True)
            raise

    # -- errors ----------------------------------------------------------------------------------------------------

    def translate(self, error: BaseException) -> LockError:
        """Make a `LockError` of a driver's error, without passwords. To be raised ``from`` that."""
        text = str(error).strip() or type(error).__name__
        if self.driver.password:
            text = text.replace(self.driver.password, HIDDEN)
        return translate(self.kind(error), " ".join(text.split()), self.label)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close lockkit's connections. Statements that are under way keep theirs to their end."""
        self._closed = True
        if self._blocking is not None:
            await self._blocking.close()
        while (connection := take_last(self._idle)) is not None:
            try:
                await connection.close()
            except self.driver_errors:
                connection.terminate()


class _Place:
    """The right to run one statement; `free` is set when a caller that had to wait has it."""

    __slots__ = ("__weakref__", "free")

    free: Event
