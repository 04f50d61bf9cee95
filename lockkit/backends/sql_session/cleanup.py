"""
Gives up claims: leaves the database's queue, releases a lock that the caller does not want any more.

A server that waits for a lock does not check whether its client is still there, and no ttl ends a waiter. So a session
whose end the server did not confirm is remembered, and ended later.
"""

from __future__ import annotations

import logging

from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.pool import Sessions
from lockkit.backends.sql_session.session import Claim, Session
from lockkit.errors import LockError
from lockkit.runtime import Runtime

log = logging.getLogger("lockkit")

CANCEL_PAUSE = 0.02
"""How long to wait before a statement that goes on though it was cancelled is cancelled once more, seconds; then twice
as long."""


class ClaimCleanup:
    """Gives up the claims of one client."""

    def __init__(self, database: Database, runtime: Runtime, locking: Locking, sessions: Sessions) -> None:
        """Remember nothing yet."""
        self._database = database
        self._runtime = runtime
        self._locking = locking
        self._sessions = sessions
        self._failures: tuple[type[BaseException], ...] = (LockError, *database.driver_errors)
        self._left_waiting: set[Claim] = set()

    async def give_up(self, claim: Claim, answer_by: float) -> None:
        """Leave the queue, or release the lock; keep the session for others if it can be of use."""
        session = claim.session
        if session is None:
            return
        session.answer_by = answer_by
        try:
            if session.dropped:
                await self._end_dropped(claim, session, answer_by)
                self.lose(claim)
                return
            if claim.queued:
                await self._end_wait(session, answer_by)
            await self.discard_answer(session)
            if claim.has_key:
                await self._locking.leave(session, claim.key)
        except self._failures as error:
            if self._may_wait(claim, session):
                self._leave_waiting(claim, session)
                raise error if isinstance(error, LockError) else self._database.translate(error) from error
            # The server frees what a closed connection held.
            self.lose(claim)
        except BaseException:
            if self._may_wait(claim, session):
                self._leave_waiting(claim, session)
            else:
                self.lose(claim)
            raise
        else:
            claim.session, claim.queued = None, False
            await self._sessions.give_back(session)

    def _may_wait(self, claim: Claim, session: Session) -> bool:
        """Whether the server may have this session wait in a queue, as far as lockkit knows."""
        return claim.queued and (session.dropped or not session.answered)

    def _leave_waiting(self, claim: Claim, session: Session) -> None:
        """Close the connection of a session that waits, and remember it until the server confirms its end."""
        self._sessions.drop(session)
        self._left_waiting.add(claim)

    async def end_left_waiting(self, answer_by: float) -> None:
        """End the sessions that were left waiting. The engine tries that for a ttl only, and no ttl ends a waiter."""
        for claim in list(self._left_waiting):
            try:
                await self.give_up(claim, answer_by)
            except self._failures as error:
                log.debug("ending a session that was left waiting at %s: %s", self._database.url, error)
                return

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

    async def _end_dropped(self, claim: Claim, session: Session, answer_by: float) -> None:
        """
        Have the server end a session whose connection lockkit closed while it waited, or joined the queue.

        The session and not its statement: a cancel is forgotten if the statement has not begun.
        """
        if claim.queued and session.pid and not session.pooled:  # a pooler lends that process to others
            await self._locking.end_waiter(session, claim.key, answer_by)
        self._left_waiting.discard(claim)

    async def discard_answer(self, session: Session) -> None:
        """Read what is still unanswered; what the answer says does not matter, only that it came."""
        if not session.unanswered:
            return
        try:
            await session.answer()
        except self._database.driver_errors as error:
            if isinstance(error, TimeoutError) or self._database.kind(error) == "connection":
                raise

    def lose(self, claim: Claim) -> None:
        """Close the connection of a claim, which frees what it held."""
        session, claim.session, claim.queued = claim.session, None, False
        self._left_waiting.discard(claim)
        if session is not None:
            self._sessions.drop(session)
