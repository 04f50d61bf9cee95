"""
The sessions of one client, from their connection to their end: kept for the next lock, waiting, or a lock that is held.

Each is one connection to the server, for as long as the lock is held. An application's engine says by the size of its
pool how many connections it may have, so that number is kept to there; elsewhere ``pool_size`` says it.

- A held session is watched: without that, the holder learns that it was ended (``pg_terminate_backend``, ``KILL``, a
  server that stops) by its next renewal, a third of its ttl later. A server that hangs, or is cut off, closes nothing:
  for that there is the deadline.
- A load balancer or a NAT may close an idle connection, often after a minute, and with it the lock. Renewals are sent
  only after a third of the ttl, and with ``renew=False`` never, so a session that is silent for too long is kept alive.
- A server that waits for a lock does not check whether its client is still there, and no ttl ends a waiter. So a
  session whose end the server did not confirm is remembered, and ended later.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import cast

from lockkit.backends.sql.connection import SessionConnection, take_last
from lockkit.backends.sql.database import TRUSTED_SECONDS, Database
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.session import Claim, Session
from lockkit.background import Background
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

KEPT_MAX = 10
"""Sessions kept for the next locks. More take places of the server's from others; with fewer, a client that takes
several locks at once connects again each time."""

WATCH_SECONDS = 0.25
"""How often to look for closed connections. Longer tells holders later; shorter wakes an idle holder more often."""

LINGER_SECONDS = 2.0
"""For how long to go on when nothing is held any more. Shorter starts a thread or task more often."""

CANCEL_PAUSE = 0.02
"""How long to wait before a statement that goes on though it was cancelled is cancelled once more, seconds; then twice
as long."""

_CLOSED: int = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The server has closed its side: so an answer that was not read wakes nobody. gevent's poll does not report it."""


class Sessions:
    """Opens, watches and ends them. Used by several threads at once."""

    def __init__(
        self, database: Database, runtime: Runtime, size: int | None, locking: Locking, lost: Callable[[str], None]
    ) -> None:
        """Open none yet; `lost` gets the owner of a lease whose session the server has ended."""
        self._database = database
        self._runtime = runtime
        self._size = size
        self._locking = locking
        self._lost = lost
        self._mutex = runtime.mutex()
        self._idle: list[Session] = []
        self._held: set[Session] = set()
        self._left_waiting: set[Claim] = set()
        self._all: set[Session] = set()
        self._opening = 0
        self._closed = False
        self._watch = Background(runtime, "lockkit-sql-watch", self._watch_held)

    # -- open and close --------------------------------------------------------------------------------------------

    async def take(self, answer_by: float) -> Session:
        """Give a session for the caller alone: a kept one, or a new one by then (client monotonic time)."""
        while (session := take_last(self._idle)) is not None:
            idle = self._runtime.now() - session.connection.used
            # The server ends a session that has been idle for longer than its limit.
            if idle < TRUSTED_SECONDS or (idle < self._locking.kept_seconds(session) and not session.ended):
                return session
            self.drop(session)
        return await self._open(answer_by)

    async def _open(self, answer_by: float) -> Session:
        if self._size is not None:
            self._drop_expired()
        with self._mutex:
            if self._size is not None and len(self._all) + self._opening >= self._size:
                message = (
                    f"the pool of {self._size} connections to {self._database.url} is used up: in mode=row and "
                    "mode=advisory each lock that is held or waited for takes one. Give a larger pool_size, or "
                    "mode=table, where locks take none"
                )
                raise BackendUnavailable(message)
            self._opening += 1
        try:
            connection = cast("SessionConnection", await self._database.connect(answer_by))
            session = Session(connection, self._runtime)
            session.answer_by = answer_by
            with self._mutex:
                self._all.add(session)
        finally:
            with self._mutex:
                self._opening -= 1
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
        if session.dropped:
            self.drop(session)
            return
        session.connection.used = self._runtime.now()
        if len(self._idle) < KEPT_MAX and not self._closed:
            self._idle.append(session)
        else:
            await self._close(session)

    async def _close(self, session: Session) -> None:
        try:
            await session.close()
        except self._database.driver_errors:
            session.drop()
        with self._mutex:
            self._all.discard(session)

    def drop(self, session: Session) -> None:
        """Close a session at once, from any state: the server ends its transaction."""
        self._held.discard(session)
        with self._mutex:
            self._all.discard(session)
        session.drop()

    def drop_idle(self) -> None:
        """Close what is kept for the next locks."""
        while (session := take_last(self._idle)) is not None:
            self.drop(session)

    async def close(self) -> None:
        """Close what is kept, and what is given back from now on."""
        self._closed = True
        self._held.clear()
        self._watch.wake()
        while (session := take_last(self._idle)) is not None:
            await self._close(session)
        # Sessions that were lost, or dropped by an interrupt.
        for session in list(self._all):
            self.drop(session)

    # -- end a claim -----------------------------------------------------------------------------------------------

    def detach(self, claim: Claim) -> Session | None:
        """Take the session from a claim."""
        session, claim.session, claim.queued = claim.session, None, False
        self._left_waiting.discard(claim)
        if session is not None:
            self._held.discard(session)
            session.valid_until = inf
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
                self.drop(session)
                self._left_waiting.add(claim)
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
            await self._locking.leave(session, claim.key)

    async def end_left_waiting(self, answer_by: float) -> None:
        """End the sessions that were left waiting. The engine tries that for a ttl only, and no ttl ends a waiter."""
        for claim in list(self._left_waiting):
            try:
                await self.give_up(claim, answer_by)
            except LockError as error:
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

    async def discard_answer(self, session: Session) -> None:
        """Read what is still unanswered; what the answer says does not matter, only that it came."""
        if not session.unanswered:
            return
        try:
            await session.answer()
        except self._database.driver_errors as error:
            if isinstance(error, TimeoutError) or self._database.kind(error) == "connection":
                raise

    # -- watch -----------------------------------------------------------------------------------------------------

    def hold(self, session: Session, owner: str, ttl: Seconds, valid_until: Instant) -> None:
        """Watch a session that has become a lock, until its claim ends."""
        session.owner, session.ttl, session.valid_until = owner, ttl, valid_until
        self._held.add(session)
        try:
            self._watch.start()
        except RuntimeError as error:  # no more threads, or the event loop has ended
            log.warning("ended connections will be noticed by the next renewal only: %s", error)

    async def _watch_held(self) -> None:
        until = self._runtime.now() + LINGER_SECONDS
        while (now := self._runtime.now()) < until and not self._closed:
            self._watch.clear()
            held = list(self._held)
            if held:
                until = now + LINGER_SECONDS
            for session in _closed(held):
                self._end(session)
            self._drop_expired()
            # Half of the time: the answer, and the others that are due, come in the other half. And not where the ttl
            # ends before the session would be silent for too long.
            seconds = self._database.keepalive
            due = [each for each in held if each.ttl > seconds and each.sent_at + seconds / 2 <= now]
            if due:
                await self._keep_alive(due)
            await self._watch.wait(WATCH_SECONDS)

    def _end(self, session: Session) -> None:
        """Tell the holder that its session has ended."""
        self._held.discard(session)
        self._lost(session.owner)
        self._drop_unused(session)

    def _drop_expired(self) -> None:
        """Close sessions of leases that expired without a renewal: the server has ended them, or does so now."""
        now = self._runtime.now()
        for session in list(self._held):
            if session.valid_until < now:
                self._drop_unused(session)

    def _drop_unused(self, session: Session) -> None:
        """Close a session that is of no more use, unless a renewal is under way, which will find that out itself."""
        if session.turn.take_now():
            try:
                self.drop(session)
            finally:
                session.turn.give()

    async def _keep_alive(self, due: Sequence[Session]) -> None:
        """Send a statement on sessions that are locks; all are sent before the first answer is read."""
        asked: list[Session] = []
        lost: list[Session] = []
        until = self._runtime.now() + STATEMENT_SECONDS
        try:
            for session in due:
                if session.turn.take_now():
                    asked.append(session)
                    self._send_keep(session, until)
            for session in asked:
                try:
                    if session.unanswered:
                        await session.answer()
                except self._database.driver_errors:
                    if not session.unanswered:  # else a renewal reads the answer
                        lost.append(session)
        finally:
            for session in asked:
                session.turn.give()
        for session in lost:
            self._end(session)

    def _send_keep(self, session: Session, until: Instant) -> None:
        """Send a statement that lets the server keep the lock for as long as the lease is valid, and no longer."""
        left = session.valid_until - self._runtime.now()
        if session in self._held and not session.unanswered and left > 0:
            session.answer_by = until
            with suppress(*self._database.driver_errors):  # then it is closed, and a renewal or the watch says so
                self._locking.keep(session, self._locking.limit(left))


def _closed(held: Sequence[Session]) -> list[Session]:
    """Return those whose connections the server has closed."""
    poll = select.poll()
    by_fd = {session.connection.fileno(): session for session in held}
    by_fd.pop(-1, None)
    for fd in by_fd:
        poll.register(fd, _CLOSED)
    # A session that was dropped meanwhile has left its number to another file.
    return [by_fd[fd] for fd, events in poll.poll(0) if events & _CLOSED and not by_fd[fd].dropped]
