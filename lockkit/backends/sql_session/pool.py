"""The sessions of one client, from their connection to their end."""

from __future__ import annotations

from contextlib import suppress

from lockkit.backends.sql.connection import take_last
from lockkit.backends.sql.database import TRUSTED_SECONDS, Database
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.session import Claim, Session
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Runtime

KEPT_MAX = 10
"""Sessions kept for the next locks. More take places of the server's from others; with fewer, a client that takes
several locks at once connects again each time."""

KEPT_SHARE = 0.8
"""For what share of its limit a session that holds nothing may idle and be used again. Larger meets sessions that the
server has just ended, smaller connects more often."""

CANCEL_PAUSE = 0.02
"""How long to wait before a statement that goes on though it was cancelled is cancelled once more, seconds; then twice
as long."""


class Sessions:
    """
    The sessions of one client: kept for the next lock, waiting, or a lock that is held. Several threads use them.

    Each is one connection to the server. An application's engine says by the size of its pool how many connections it
    may have, so that number is kept to there; elsewhere ``pool_size`` says it.
    """

    def __init__(self, database: Database, runtime: Runtime, size: int | None, locking: Locking) -> None:
        self._database = database
        self._runtime = runtime
        self._size = size
        self._locking = locking
        self._mutex = runtime.mutex()
        self._idle: list[Session] = []
        self._all: set[Session | object] = set()
        self.closed = False  # nothing is kept any more

    async def take(self, answer_by: float) -> Session:
        """Give a session for the caller alone: a kept one, or a new one by then (client monotonic time)."""
        while (session := take_last(self._idle)) is not None:
            idle = self._runtime.now() - session.connection.used
            # Well before the server ends it, by another clock, and with the time that the first statement takes.
            kept = session.limit is None or idle < KEPT_SHARE * session.limit
            if idle < TRUSTED_SECONDS or (kept and not session.ended):
                return session
            self.drop(session)
        return await self._open(answer_by)

    async def _open(self, answer_by: float) -> Session:
        place = object()
        with self._mutex:
            if self._size is not None and len(self._all) >= self._size:
                message = (
                    f"the pool of {self._size} connections to {self._database.url} is used up: in mode=row and "
                    "mode=advisory each lock that is held or waited for takes one. Give a larger pool_size, or "
                    "mode=table, where locks take none"
                )
                raise BackendUnavailable(message)
            self._all.add(place)
        try:
            session = Session(await self._database.connect(answer_by), self._runtime)
            session.answer_by = answer_by
            with self._mutex:  # the two are one connection
                self._all.discard(place)
                self._all.add(session)
        finally:
            self._all.discard(place)
        try:
            await self._locking.set_up(session)
        except BaseException as error:
            self.drop(session)
            if isinstance(error, self._database.driver_errors):
                raise self._database.translate(error) from error
            raise
        return session

    async def give_back(self, session: Session) -> None:
        """Keep a session that holds nothing and has nothing under way, or close it."""
        session.connection.used = self._runtime.now()
        if session.dropped:
            self.drop(session)
        elif len(self._idle) < KEPT_MAX and not self.closed:
            self._idle.append(session)
        else:
            await self._close(session)

    async def _close(self, session: Session) -> None:
        with suppress(*self._database.driver_errors):
            await session.connection.close()
        self.drop(session)

    def drop(self, session: Session) -> None:
        """Close a session at once, from any state: the server ends its transaction."""
        self._all.discard(session)
        session.drop()

    def drop_idle(self) -> None:
        """Close what is kept for the next locks."""
        while (session := take_last(self._idle)) is not None:
            self.drop(session)

    async def close(self) -> None:
        """Close what is kept, and what is given back from now on."""
        self.closed = True
        while (session := take_last(self._idle)) is not None:
            await self._close(session)
        # Those of locks that are still held or waited for, and what an interrupt has left.
        for each in list(self._all):
            if isinstance(each, Session):
                self.drop(each)

    # -- end a claim -----------------------------------------------------------------------------------------------

    def detach(self, claim: Claim) -> Session | None:
        """Take the session from a claim."""
        session, claim.session, claim.queued = claim.session, None, False
        return session

    def lose(self, claim: Claim) -> None:
        """Close the connection of a claim, which frees what it held."""
        session = self.detach(claim)
        if session is not None:
            self.drop(session)

    async def give_up(self, claim: Claim, answer_by: float) -> None:
        """Leave the queue, or release the lock; keep the session for others if it can be of use."""
        session = claim.session
        if session is None:
            return
        session.answer_by = answer_by
        try:
            await self._leave(claim, session, answer_by)
        except BaseException as error:
            failed = isinstance(error, (LockError, *self._database.driver_errors))
            if claim.queued and (session.dropped or not session.answered):
                # A server that waits for a lock may not check whether its client is still there: the claim keeps the
                # session, for another call that has its end confirmed.
                self.drop(session)
                if failed and not isinstance(error, LockError):
                    raise self._database.translate(error) from error
                raise
            self.lose(claim)  # the server frees what a closed connection held
            if not failed:
                raise
        else:
            self.detach(claim)
            await self.give_back(session)

    async def _leave(self, claim: Claim, session: Session, answer_by: float) -> None:
        if session.dropped:
            # The session and not its statement: a cancel is forgotten if the statement has not begun.
            if claim.queued and session.pid and not session.pooled:  # a pooler lends that process to others
                await self._locking.end_waiter(session, claim.key, answer_by)
            return
        if claim.queued:
            await self._end_wait(session, answer_by)
        await self.discard_answer(session)
        if claim.sent:
            await self._locking.leave(session)

    async def _end_wait(self, session: Session, answer_by: float) -> None:
        """
        Have the server end the statement that waits for the lock.

        Repeatedly: a server that has not begun with the statement yet forgets that it was to be cancelled.
        """
        pause, until = CANCEL_PAUSE, min(answer_by, self._runtime.now() + STATEMENT_SECONDS)
        never = self._runtime.event()
        while not session.answered and self._runtime.now() < until:
            await self._database.run(self._locking.cancel, [session.pid], again=True, answer_by=answer_by)
            await session.until_answer(never, min(until, self._runtime.now() + pause))
            pause *= 2

    async def discard_answer(self, session: Session) -> None:
        """Read what is still unanswered; what the answer says does not matter, only that it came."""
        if not session.unanswered:
            return
        try:
            await session.answer()
        except self._database.driver_errors as error:
            if isinstance(error, TimeoutError) or self._database.kind(error) == "connection":
                raise
