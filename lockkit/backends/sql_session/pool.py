"""
The sessions of one client: as many as locks are held or waited for, and a few kept for the next.

Each is one connection to the server, for as long as the lock is held. An application's engine says by the size of its
pool how many connections it may have, so that number is kept to there; elsewhere ``pool_size`` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import cast

from lockkit.backends.sql.connection import SessionConnection, take_last
from lockkit.backends.sql.database import TRUSTED_SECONDS, Database
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.session import Claim, Session
from lockkit.backends.sql_session.watch import Held, SessionWatch
from lockkit.errors import BackendUnavailable
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

KEPT_MAX = 10
"""Sessions kept for the next locks. More take places of the server's from others; with fewer, a client that takes
several locks at once connects again each time."""

SWEEP_SECONDS = 1.0
"""How often sessions of lost leases are looked for, at most. Longer keeps their sockets open for longer."""


class Sessions:
    """Opens, keeps and counts them. Used by several threads at once."""

    def __init__(
        self,
        database: Database,
        runtime: Runtime,
        size: int | None,
        locking: Locking,
        *,
        ended: Callable[[str], None],
    ) -> None:
        """Open none yet."""
        self._database = database
        self._runtime = runtime
        self._size = size
        self._locking = locking
        self._ended = ended
        self._watch = SessionWatch(runtime, database.keepalive, self._hung_up, self._keep_alive)
        self._mutex = runtime.mutex()
        self._idle: list[Session] = []
        self._all: set[Session] = set()
        self._opening = 0
        self._sweep_at = 0.0
        self._closed = False

    async def take(self, answer_by: float) -> Session:
        """Give a session for the caller alone: a kept one, or a new one by then (client monotonic time)."""
        now = self._runtime.now()
        if now >= self._sweep_at:
            self._sweep(now)
        while (session := take_last(self._idle)) is not None:
            idle = now - session.connection.used
            if idle < TRUSTED_SECONDS:
                return session
            # The server ends a session that has been idle for longer than its limit.
            if idle < self._locking.kept_seconds(session) and not session.ended:
                return session
            self.drop(session)
        return await self._open(answer_by)

    def _sweep(self, now: float) -> None:
        """Close sessions of leases that expired without a renewal: the server has ended them, or does so now."""
        self._sweep_at = now + SWEEP_SECONDS
        with self._mutex:
            lost = [session for session in self._all if session.valid_until < now]
        for session in lost:
            self._drop_unused(session)

    def _drop_unused(self, session: Session) -> None:
        """Close a session that is of no more use, unless a renewal is under way, which will find that out itself."""
        if session.turn.take_now():
            try:
                self.drop(session)
            finally:
                session.turn.give()

    def hold(self, claim: Claim, session: Session, owner: str, ttl: Seconds) -> None:
        """Watch a session that has become a lock, and call `ended` with its owner if the server closes it."""
        self._watch.add(claim, session, owner, ttl)

    async def _keep_alive(self, held: Sequence[Held]) -> None:
        """Send a statement on sessions that are locks; all are sent before the first answer is read."""
        asked: list[Held] = []
        lost: list[Held] = []
        until = self._runtime.now() + STATEMENT_SECONDS
        try:
            for each in held:
                if each.session.turn.take_now():
                    asked.append(each)
                    self._send_keep(each, until)
            for each in asked:
                try:
                    if each.session.unanswered:
                        await each.session.answer()
                except self._database.driver_errors:
                    if not each.session.unanswered:  # else a renewal reads the answer
                        lost.append(each)
        finally:
            for each in asked:
                each.session.turn.give()
        for each in lost:
            self._hung_up(each.session, each.owner)

    def _send_keep(self, held: Held, until: Instant) -> None:
        """Send a statement that lets the server keep the lock for as long as the lease is valid, and no longer."""
        session = held.session
        left = session.valid_until - self._runtime.now()
        if held.claim.session is session and not session.unanswered and left > 0:
            session.answer_by = until
            with suppress(*self._database.driver_errors):  # then it is closed, and a renewal or the watch says so
                self._locking.keep(session, self._locking.limit(left))

    def _hung_up(self, session: Session, owner: str) -> None:
        self._ended(owner)
        self._drop_unused(session)

    async def _open(self, answer_by: float) -> Session:
        if self._size is not None:
            self._sweep(self._runtime.now())
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
        except self._database.driver_errors as error:
            self.drop(session)
            raise self._database.translate(error) from error
        except BaseException:
            self.drop(session)
            raise
        return session

    async def give_back(self, session: Session) -> None:
        """Keep a session that holds nothing and has nothing under way, or close it."""
        if session.dropped:
            self.drop(session)
            return
        self._watch.forget(session)
        session.valid_until = inf
        session.connection.used = self._runtime.now()
        if len(self._idle) < KEPT_MAX and not self._closed:
            self._idle.append(session)
            return
        self._forget(session)
        await self._close(session)

    def drop_idle(self) -> None:
        """Close what is kept for the next locks."""
        while (session := take_last(self._idle)) is not None:
            self.drop(session)

    def drop(self, session: Session) -> None:
        """Close a session at once, from any state: the server ends its transaction."""
        self._watch.forget(session)
        self._forget(session)
        session.drop()

    def _forget(self, session: Session) -> None:
        with self._mutex:
            self._all.discard(session)

    async def _close(self, session: Session) -> None:
        try:
            await session.close()
        except self._database.driver_errors:
            session.drop()

    async def close(self) -> None:
        """Close what is kept, and what is given back from now on."""
        self._closed = True
        self._watch.close()
        while (session := take_last(self._idle)) is not None:
            self._forget(session)
            await self._close(session)
        # Sessions that were lost, or dropped by an interrupt.
        for session in list(self._all):
            self.drop(session)
