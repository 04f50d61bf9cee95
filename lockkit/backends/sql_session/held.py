"""Locks that are held: how lockkit renews and releases them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from lockkit.backend import CALL_SECONDS, Gone, Grant, Host, Renewal, Renewed, Unknown
from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql_session.leases import LeaseTable
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.pool import Sessions
from lockkit.backends.sql_session.session import Claim, Session
from lockkit.errors import BackendUnavailable, Unsupported

RELEASE_ALL_SECONDS = 1.0
"""How long all sessions together have to answer that they have released when a client is closed. Longer delays the end
of a program whose server hangs; shorter closes the connection of one that is only slow, which releases as well, but
perhaps a little later."""

RENEW_SHARE = 1 / 3
"""For what share of the shortest ttl of this client's leases a round of renewals waits for answers. Longer, and one
session that hangs lets the leases of the others run out; shorter calls more renewals late that are answered."""

DELETE_CHANCE = 1 / 32
"""How often the release of a reader also deletes the leases of readers that have ended. More often costs a write each
time, less often leaves more rows."""


class HoldingBackend(SqlBackend):
    """What a backend does with the locks that a client holds: each is a session of its own."""

    _locking_class: ClassVar[type[Locking]]

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        """Use a database; nothing is sent."""
        super().__init__(database, options, host)
        self._locking = locking = self._locking_class(database, options["table"])
        self.tables = locking.tables
        database.keepalive = options["keepalive"]
        self._leases = LeaseTable(database, locking, auto_create=options["auto_create"])
        size = options["pool_size"] or database.pool_size
        self._sessions = Sessions(database, host.runtime, size, locking, lambda owner: host.lost(owner, "session"))
        self._ttl_min = inf  # of all leases of this client

    # -- renew -----------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """
        See `LockBackend.renew`. All renewals are sent before the first answer is read.

        An answer that does not come in time is read by the next renewal of that lease.
        """
        outcomes: dict[int, Renewal] = {}
        asked: list[tuple[int, Claim, Session]] = []
        self._ttl_min = min([self._ttl_min, *(grant.ttl for grant in grants)])
        until = self._runtime.now() + min(STATEMENT_SECONDS, self._ttl_min * RENEW_SHARE)
        try:
            for number, grant in enumerate(grants):
                claim: Claim = grant.state
                session = claim.session
                if session is None:
                    outcomes[number] = Gone("session")
                elif await session.turn.take(until):
                    asked.append((number, claim, session))
                    if claim.session is not session:
                        # Released while we waited for our turn: the session may be another lock's by now.
                        outcomes[number] = Gone("session")
                        continue
                    session.answer_by = until
                    failed = await self._send_renewal(claim, session, self._locking.limit(grant.ttl))
                    if failed is not None:
                        outcomes[number] = failed
                else:
                    outcomes[number] = Unknown(BackendUnavailable("another request of this lease is under way"))
            for number, claim, session in asked:
                if number not in outcomes:
                    outcomes[number] = await self._read_renewal(claim, session, grants[number])
        finally:
            for _, _, session in asked:
                session.turn.give()
        return [outcomes[number] for number in range(len(grants))]

    async def _send_renewal(self, claim: Claim, session: Session, limit: int) -> Renewal | None:
        """Send a renewal, unless the same one was sent before and is not answered; None if one is under way."""
        try:
            if session.unanswered:
                if session.renewing == limit:
                    return None
                if not session.answered:
                    return Unknown(BackendUnavailable("the last request of this lease is not answered yet"))
                await self._sessions.discard_answer(session)
            self._locking.keep(session, limit)
            session.renewing = limit
        except self.database.driver_errors as error:
            return self._failed(claim, error)
        return None

    async def _read_renewal(self, claim: Claim, session: Session, grant: Grant) -> Renewal:
        limit = session.renewing
        assert limit is not None, "sent before"
        try:
            await session.answer()
        except self.database.driver_errors as error:
            return self._failed(claim, error)
        ttl = self._locking.seconds(limit, grant.ttl)
        session.valid_until = session.sent_at + ttl
        return Renewed(session.sent_at, ttl)

    def _failed(self, claim: Claim, error: BaseException) -> Renewal:
        session = claim.session
        if session is not None and session.unanswered:
            return Unknown(self.database.translate(error))
        # The connection was the lock.
        self._sessions.lose(claim)
        return Gone("session")

    async def _take(self, claim: Claim, answer_by: float) -> Session | None:
        """Take the turn of the session that is a lease; None: it has ended, or is another lock's by now."""
        session = claim.session
        if session is None:
            return None
        if not await session.turn.take(answer_by):
            raise BackendUnavailable("a renewal of this lease is not answered")
        if claim.session is session and not session.ended:
            session.answer_by = answer_by
            return session
        self._sessions.lose(claim)
        session.turn.give()
        return None

    # -- downgrade -------------------------------------------------------------------------------------------------

    async def downgrade(self, grant: Grant) -> bool:
        if not self.capabilities.downgrade:
            return await super().downgrade(grant)
        answer_by = self._runtime.now() + CALL_SECONDS
        claim: Claim = grant.state
        if claim.session is not None and claim.session.pooled:
            message = (
                f"{self.database.url} is behind a pooler, where a write lease of {grant.name!r} cannot become a read "
                "lease: release it, and acquire a read lease"
            )
            raise Unsupported(message, name=grant.name, backend=self.database.url)
        session = await self._take(claim, answer_by)
        if session is None:
            return False
        try:
            await self._sessions.discard_answer(session)
            # Before the answer, which may be lost: from here on the session has the shared lock, the other, or both.
            claim.key = claim.key._replace(shared=True)
            await self._locking.downgrade(session, claim.key, self._locking.limit(grant.ttl), grant.owner)
        except self.database.driver_errors as error:
            if session.unanswered:
                raise self.database.translate(error) from error
            self._sessions.lose(claim)
            return False
        finally:
            session.turn.give()
        return True

    # -- release ---------------------------------------------------------------------------------------------------

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        answer_by = min(answer_by, self._runtime.now() + CALL_SECONDS)
        claim: Claim = grant.state
        session = await self._take(claim, answer_by)
        if session is None:
            return False
        try:
            await self._sessions.discard_answer(session)
            held = await self._locking.free(session, claim.key)
            # Before the turn is given: a renewal that waits for it must see that the session is not this lock's.
            self._sessions.detach(claim)
        except self.database.driver_errors as error:
            lost_before = not session.unanswered and session.connection.ended_by_server(error)
            self._sessions.lose(claim)  # that frees the lock, but nobody can tell whether it was held until then
            if lost_before:
                return False
            raise self.database.translate(error) from error
        finally:
            session.turn.give()
        await self._sessions.give_back(session)
        if claim.key.shared and self._runtime.random.random() < DELETE_CHANCE:
            await self._leases.delete_shares(claim.key, answer_by)
        return held

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. What is not released in time is when `close` closes its connection."""
        if not self._runtime.loop_has_ended():
            await super().release_all(grants, min(answer_by, self._runtime.now() + RELEASE_ALL_SECONDS))
            return
        # As when the interpreter exits: no answer can be read any more.
        for grant in grants:
            self._sessions.lose(grant.state)
        self.database.drop_idle()
