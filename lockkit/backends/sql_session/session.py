"""
One session of a database, whose open transaction (or user lock) is the lock; and a client's `Claim` on a lock.

::

    result = await session.run(statement, parameters)  # raises the driver's errors; TimeoutError: no answer yet
    session.send(statement, parameters)  # a statement that waits for a lock of the database
    await session.until_answer(wake, until)  # it is answered, `wake` was set, or it is late
    result = await session.answer()  # also after a TimeoutError or a cancelled `run`

A renewal whose answer is late is no reason to give up the connection that is the lock, so unlike
`lockkit.backends.sql.connection.Connection.run` a session survives an answer that does not come in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, TypeAlias

from lockkit.backends.sql.connection import Connection, Parameter, Result, Statement
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant, Seconds

_CLOSED = "the connection is closed"


class Turn:
    """A lock for the users of one session: the renewer may be there when the holder releases."""

    __slots__ = ("_free", "_mutex", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._free = runtime.event()
        self._free.set()

    def take_now(self) -> bool:
        """Take it if it is free; return whether the caller has it."""
        with self._mutex:
            if not self._free.is_set():
                return False
            self._free.clear()
            return True

    async def take(self, until: float) -> bool:
        """Wait for it, at most until then (client monotonic time); return whether the caller has it."""
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


class Session:
    """One session."""

    def __init__(self, connection: Connection, runtime: Runtime) -> None:
        self.connection = connection
        self.pid = 0  # the server's number for it, as KILL takes it; 0 until known
        self.started = 0  # when it began by the server's clock, to tell it from a later one of that `pid`; 0: unknown
        self.limit: int | None = None  # MariaDB and MySQL: how long it may idle, seconds; None: lockkit has to set it
        self.planned = False  # PostgreSQL: the statements that lock were prepared
        self.unanswered = False  # a statement was sent whose answer was not read
        self.renewing: int | None = None  # the limit in that statement, if it is a renewal
        # Before a statement was sent last, client monotonic clock: from then on the ttl of a renewal counts, however
        # late its answer is read.
        self.sent_at = runtime.now()
        self.dropped = False  # lockkit closed it, in whatever state it was
        self.answer_by = inf  # when the current call must end, client monotonic clock; set by each call that uses it
        self.turn = Turn(runtime)
        self._runtime = runtime

    @property
    def pooled(self) -> bool:
        return self.connection.pooled

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> Result:
        """Send a statement and read its answer."""
        self.send(statement, parameters)
        return await self.answer()

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        """Send a statement. Nothing may be `unanswered`."""
        assert not self.unanswered
        if self.dropped:
            raise ConnectionAbortedError(_CLOSED)
        self.unanswered, self.renewing = True, None
        self.sent_at = self._runtime.now()
        try:
            self.connection.send(statement, parameters)
        except BaseException:
            self.drop()
            raise

    async def answer(self) -> Result:
        """Read the answer to what was sent, by `answer_by`. Raises like `run`."""
        if self.dropped:
            raise ConnectionAbortedError(_CLOSED)
        try:
            result = await self.connection.answer(self._seconds())
        except BaseException as error:
            # A caller that was cancelled or interrupted leaves it unanswered, too.
            self.unanswered = isinstance(error, TimeoutError) or not isinstance(error, Exception)
            if self.connection.broken:
                self.drop()
            raise
        self.unanswered = False
        return result

    def _seconds(self) -> float:
        return max(0.0, min(STATEMENT_SECONDS, self.answer_by - self._runtime.now()))

    @property
    def answered(self) -> bool:
        """Whether `answer` returns or raises without waiting: the answer has come, or the connection has ended."""
        return self.connection.answered

    async def until_answer(self, wake: Event, until: float) -> None:
        """Return when `answered`, when `wake` was set, or at `until` (client monotonic time)."""
        if not self.dropped:
            await self.connection.until_answer(wake, until)

    @property
    def ended(self) -> bool:
        """Whether it is closed, as far as lockkit knows without asking."""
        return self.dropped or (not self.unanswered and self.connection.stale)

    def drop(self) -> None:
        """Close it at once, from any state: the server ends the transaction. May be called twice."""
        self.unanswered = False
        self.dropped = True
        self.connection.terminate()


class Key(NamedTuple):
    """A lock as the database knows it."""

    name: str  # as the tables have it
    number: int  # 64 bits of a hash, signed, for PostgreSQL's advisory locks
    text: str  # the same for MariaDB and MySQL: more bits of it, in hexadecimal digits
    shared: bool = False  # the read side of the lock is meant


Taken: TypeAlias = tuple[int, int | None]
"""
What the database has granted: the holder's identity, for `Locking.write_lease`, and the token, if the lease was written
in the same statement; None: it is to be written; 0: it was written, and the server did not say under which token.
"""


class Claim:
    """One client's claim on a lock: it waits in the database's queue, and then holds the lock."""

    __slots__ = ("key", "look_at", "owner", "queued", "sent", "session", "ttl", "valid_until")

    key: Key  # set before `sent`
    owner: str  # of the lease; set when the lock is held, as are `ttl` and `valid_until`
    ttl: Seconds
    valid_until: Instant  # when it loses its lock unless renewed before, client monotonic clock

    def __init__(self) -> None:
        self.session: Session | None = None  # that waits or holds; None: there is none (any more)
        self.queued = False  # the statement that waits was sent, and its answer was not read
        self.sent = False  # a session was asked for the lock, this one or one that has ended since
        self.look_at = 0.0  # when to look whether waiting in the queue is still of use, client monotonic clock
