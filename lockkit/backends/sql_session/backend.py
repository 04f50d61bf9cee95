"""
The modes of the SQL backends in which an open session of the database is the lock: what ``row`` and ``advisory`` share.

::

    client (on a session of the lock's own)     database                          on a connection for statements
    ---------------------------------------     --------                          ------------------------------
    lock at once or not at all; if granted,
    write the lease, committed             ->   granted                           (mode=advisory)

    BEGIN, lock at once or not at all      ->   granted                           (mode=row, or behind a pooler)
                                                                              ->  the lease is written: owner, token,
                                                                                  session; committed at once
    a renewal: any statement               ->   idles anew, at most a ttl
    COMMIT                                 ->   the next in the queue has it

    BEGIN, lock at once or not at all      ->   another client holds it
    lock                                   ->   (waits in the database's queue)
                                           <-  granted, perhaps long ago
    a renewal, as proof that it still is   ->
                                                                              ->  the lease is written

- Before, the client has told the server to end a session that idles for longer than the ttl. The server counts from its
  last answer, which is later than the client's last request, so the client's deadline comes first. So the server ends
  the session of a holder that is stopped and, after half a ttl, that of a waiter that is stopped in the queue and
  granted the lock there.
- Each call has a time by which its caller must have an answer; all statements of a session keep it as
  `Session.answer_by`.
- A grant found in the queue may be old: this process may have been stopped. Only a statement that the session answers
  *after* the client has looked shows that the lock is still held, and the ttl counts from before that statement. Where
  the lease is written on another connection, both are under way at the same time.
- The lease is in a table, not in the session, for others to see; and the token is there, so that neither the end of a
  connection nor a rollback takes it back. It is written only while the session that it names holds the lock, or where
  that takes long to find out, not over the lease of a later grant; the statement that writes it checks that. Without
  the check: A is granted the lock, is stopped, and loses it; B is granted it and writes its lease; A wakes and writes
  over that. What a session writes in the statement that locks needs no check.
- A reader's lease is a row of its own beside that of the lock, which has the token that readers and writers count on.
  A release leaves it, as every lease: only while the session that it names reads does it count. Another reader's
  release deletes it later.
- A session that ends frees the lock, so a lease that lost its connection is lost: no other connection can confirm it.

`SessionBackend` acquires, and its base `HoldingBackend` renews and releases. Beside them: `Locking` (what the modes and
databases differ in), `LeaseTable`, `Sessions` (the pool; it also watches locks, and leaves the queue).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lockkit import validation
from lockkit.backend import (
    Busy,
    Capabilities,
    Grant,
    Holder,
    NamesPage,
    Option,
    Request,
)
from lockkit.backends.sql.dialect import KEEPALIVE_SECONDS
from lockkit.backends.sql.errors import CONFLICTS, Kind
from lockkit.backends.sql.options import mode_option
from lockkit.backends.sql.schema import parse_table
from lockkit.backends.sql_session.held import HoldingBackend
from lockkit.backends.sql_session.session import Claim, Session, Taken
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.units import Instant

log = logging.getLogger("lockkit")


ANSWER_SECONDS = 1.0
"""How long the answer to a statement that has ended at the server may take to arrive, seconds. Longer replaces a dead
connection later; shorter replaces one that is only slow, and loses a lock that was granted."""

ATTEMPTS_MAX = 3
"""How often one attempt begins anew: a table or row was made, the database gave the attempt up for others."""

RETRY_SECONDS = 1.0
"""After a waiter has made way for other work in the database, it checks again so soon whether it blocks any: such work
waits several times. Longer delays that work, shorter asks more often."""

BREAK_SECONDS = 5.0
"""How long `break_lock` waits for the end of the session that it has ended."""

BREAK_PAUSE = 0.005
"""Between two checks whether that session has ended, seconds."""

NAME_CHARS_MAX = 56
"""Of a table, so that the name of the one beside it, which is longer by seven, is short enough for PostgreSQL."""

_NOT_GRANTED = CONFLICTS | {"locked"}


def capabilities_of(*, fair: bool, caveat: str) -> Capabilities:
    """Return the capabilities of a mode on PostgreSQL."""
    return Capabilities(
        crash_release="connection",
        min_ttl=0.05,
        ttl_granularity=0.001,
        fair=fair,
        wakeup="push",
        token_source="max(last + 1, database time in µs), committed apart from the transaction that is the lock",  # noqa: S106
        survives_node_loss=False,
        survives_data_loss=True,
        shared_mode=True,
        fair_shared=True,
        clock_assumption="the database's clock runs at the rate of the clients' within 1 %; for tokens after a crash "
        "or a loss of data it is not set back by more than the outage",
        waiters_visible=True,
        scope="network",
        caveat=caveat,
        permits="slots",
    )


def options_of(mode: str, table: str) -> Mapping[str, Option]:
    """Give the options of a mode; `table` is the name of its table."""
    return MappingProxyType(
        {
            "mode": mode_option(mode),
            "table": Option(_parse_table, "Name of the table, also as schema.name.", table),
            "auto_create": Option(validation.parse_bool, "Make the tables when they are not there.", default=True),
            "keepalive": Option(
                validation.parse_at_least(1),
                "How long the connection of a lock that is held or waited for may be idle, seconds: less than load "
                "balancers and NATs on the network path allow.",
                KEEPALIVE_SECONDS,
            ),
            "pool_size": Option(
                validation.parse_int(1),
                "How many locks may be held or waited for at once: each takes a connection. Default: no limit; of an "
                "engine that was given, what its pool may have.",
            ),
        }
    )


def _parse_table(value: object) -> str:
    table = parse_table(value)
    if len(table.rpartition(".")[2]) > NAME_CHARS_MAX:
        message = f"it must be at most {NAME_CHARS_MAX} characters long"
        raise ValueError(message)
    return table


class SessionBackend(HoldingBackend):
    """What the modes share. Each subclass is one mode of one database."""

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        if request.state is None:
            request.state = Claim()
        try:
            return await self._try_to_lock(request, request.state)
        except BackendUnavailable as error:
            # What failed may be the connection for the lease, or for a second try.
            error.sent = error.sent or request.state.sent
            raise

    async def _try_to_lock(self, request: Request, claim: Claim) -> Grant | Busy:
        limit = self._locking.limit(request.ttl)
        ttl = self._locking.seconds(limit, request.ttl)
        self._ttl_min = min(self._ttl_min, ttl)
        retry_after: float | None = None
        for _ in range(ATTEMPTS_MAX):
            started = self._runtime.now()
            if claim.queued:
                assert claim.session is not None
                claim.session.answer_by = request.answer_by
                if not claim.session.answered:
                    retry_after = await self._left_queue(request, claim, claim.session)
                    if retry_after is None:
                        return Busy()
                    continue
                # Before the proof that the lock is still held: see the module.
                anchor = self._runtime.now()
                taken = await self._confirm_grant(request, claim, claim.session, limit)
            else:
                anchor = None
                taken = await self._first_attempt(request, claim, limit)
                if taken is None and claim.session is not None:
                    await self._enqueue(request, claim, claim.session, limit)
                    claim.check_at = started + (retry_after or request.ttl)
                    claim.ask_at = started + self.database.keepalive
                    return Busy(retry_after=retry_after)
            if taken is not None and claim.session is not None:
                token = await self._leases.token(request, claim.key, claim.session, taken)
                if claim.session.unanswered and not await self._proven(request, claim):
                    continue
                if token is not None:
                    # A lease that is not renewed is lost without a notice.
                    valid_until = (started if anchor is None else anchor) + ttl
                    self._sessions.hold(claim.session, request.owner, ttl, valid_until)
                    return Grant(request.name, request.owner, token, ttl, anchor, claim)
                # Ended between the grant and now: this process was stopped, or it was done by force.
                self._sessions.lose(claim)
        await self._sessions.give_up(claim, request.answer_by)
        return Busy(retry_after=0.0, poll=True)

    async def _first_attempt(self, request: Request, claim: Claim, limit: int) -> Taken | None:
        """Try at once, on a session of its own; None with a session: it is busy; None without: begin anew."""
        if claim.session is None:
            await self._sessions.end_left_waiting(request.answer_by)
            claim.session = await self._sessions.take(request.answer_by)
        session = claim.session
        session.answer_by = request.answer_by
        try:
            if not claim.sent:
                key = await self._leases.key(session.run, request.name)
                if key is None:
                    await self._sessions.give_up(claim, request.answer_by)
                    await self._leases.make_tables(None, request.answer_by)
                    return None
                claim.key = key._replace(shared=True) if request.mode == "shared" else key
            claim.sent = True
            return await self._locking.attempt(session, claim.key, limit, request)
        except LockError:  # of a statement on another connection; some are an OSError, as errors of drivers are
            await self._sessions.give_up(claim, request.answer_by)
            raise
        except self.database.driver_errors as error:
            kind = self.database.kind(error)
            if kind == "no table":
                await self._sessions.give_up(claim, request.answer_by)
                await self._leases.make_tables(error, request.answer_by)
                return None
            if kind in _NOT_GRANTED:
                await self._sessions.give_up(claim, request.answer_by)
                if kind != "locked":
                    return None
            elif self._close_outdated(claim, session, kind):
                return None
            raise self.database.translate(error) from error

    def _close_outdated(self, claim: Claim, session: Session, kind: Kind) -> bool:
        """Close a session after an error."""
        kept = session.connection.used > 0
        self._sessions.lose(claim)
        if kind == "read-only":
            self._sessions.drop_idle()
        return kept and kind in {"connection", "read-only"}

    async def _enqueue(self, request: Request, claim: Claim, session: Session, limit: int) -> None:
        """The lock is busy: join the queue, or leave."""
        if not request.queue:
            await self._sessions.give_up(claim, request.answer_by)
            return
        claim.queued = True
        try:
            await self._locking.enqueue(session, claim.key, limit)
        except self.database.driver_errors as error:
            self._sessions.lose(claim)
            raise self.database.translate(error) from error

    async def _left_queue(self, request: Request, claim: Claim, session: Session) -> float | None:
        """Leave the queue if waiting there is useless; return in how many seconds to look again, None if it stays."""
        if await self._lost_on_the_way(request, claim, session):
            return request.ttl
        return RETRY_SECONDS if await self._made_way(request, claim, session) else None

    async def _made_way(self, request: Request, claim: Claim, session: Session) -> bool:
        """
        Leave the queue if this wait blocks other work in the database; checked once in a ttl. Tell whether it did.

        The holder may, for example, build an index CONCURRENTLY under the lock, which waits for every statement that
        began before.
        """
        now = self._runtime.now()
        if now < claim.check_at:
            return False
        claim.check_at = now + request.ttl
        if not await self._locking.blocks_others(session, request.answer_by):
            return False
        await self._sessions.give_up(claim, request.answer_by)
        return True

    async def _lost_on_the_way(self, request: Request, claim: Claim, session: Session) -> bool:
        """
        Drop the connection if it is dead, by what the server says on another one; return whether it was.

        The server answers a waiting statement when it grants the lock, perhaps after hours. Until then no data crosses
        the connection, so a NAT or a firewall may forget it, and the answer never arrives.
        """
        if self._runtime.now() < claim.ask_at:
            return False
        waits = await self._locking.waits(session, claim.key, request.answer_by)
        claim.ask_at = self._runtime.now() + self.database.keepalive
        if waits:
            return False
        await session.until_answer(self._runtime.event(), self._runtime.now() + ANSWER_SECONDS)
        if session.answered:
            return False
        log.info("the connection that waited for lock %r is dead: lockkit joins the queue again", request.name)
        await self._locking.end_waiter(session, claim.key, request.answer_by)  # it may have the lock, for nobody
        self._sessions.lose(claim)
        return True

    async def _confirm_grant(self, request: Request, claim: Claim, session: Session, limit: int) -> Taken | None:
        """Read the queue's answer, and have the session prove that it is alive; None: begin anew."""
        try:
            result = await session.answer()
            claim.queued = False
            identity = self._locking.granted(session, result)
            if identity is not None:
                return await self._locking.prove(session, claim.key, limit, request, identity)
        except self.database.driver_errors as error:
            claim.queued = False
            kind = self.database.kind(error)
            if kind not in _NOT_GRANTED | {"timeout", "no table", "read-only"} or session.unanswered:
                self._sessions.lose(claim)
                raise self.database.translate(error) from error
            if kind == "no table":
                await self._sessions.give_up(claim, request.answer_by)
                await self._leases.make_tables(error, request.answer_by)
            # A limit of the server's, or an administrator's cancel: the grant may have raced with that, so begin anew.
            # Or the server was demoted: a new session finds the one that took over.
        await self._sessions.give_up(claim, request.answer_by)
        return None

    async def _proven(self, request: Request, claim: Claim) -> bool:
        """
        Read the answer that proves that the session still holds the lock; False: begin anew.

        The lease has been written meanwhile, by a statement that checks by itself whether this session holds the lock.
        If it lost the lock since, the next holder writes its own lease over that, with a larger token.
        """
        session = claim.session
        assert session is not None
        try:
            await session.answer()
        except self.database.driver_errors as error:
            if session.unanswered or self.database.kind(error) not in _NOT_GRANTED | {"timeout"}:
                self._sessions.lose(claim)
                raise self.database.translate(error) from error
            # Cancelled by an administrator: that may have ended the transaction that was the lock.
            await self._sessions.give_up(claim, request.answer_by)
            return False
        return True

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        """See `LockBackend.wait`: until the statement that waits in the database's queue is answered."""
        del busy
        claim: Claim | None = request.state
        if claim is not None and claim.queued and claim.session is not None:
            await claim.session.until_answer(request.wake, min(until, claim.ask_at))

    async def abandon(self, request: Request) -> None:
        claim: Claim | None = request.state
        if claim is not None:
            await self._sessions.give_up(claim, request.answer_by)
        request.state = None

    # -- about a lock ----------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        found = await self._leases.holders(await self._leases.key(self.database.run, name))
        return [holder for _, holder in found]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`: ends the sessions that hold it."""
        key = await self._leases.key(self.database.run, name)
        holding = {(pid, holder.owner) for pid, holder in await self._leases.holders(key)}
        if not holding:
            return False
        until = self._runtime.now() + BREAK_SECONDS
        for pid, _ in holding:
            await self._locking.end(pid, until)
        # The server does it in its own time.
        while left := holding & {(pid, holder.owner) for pid, holder in await self._leases.holders(key)}:
            if self._runtime.now() >= until:
                message = f"session {min(left)[0]}, which holds it, has not ended within {BREAK_SECONDS:g} s"
                raise BackendUnavailable(message)
            await self._runtime.sleep(BREAK_PAUSE)
        return True

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`: the server shows who holds a row or a number, but not for all names at once."""
        del prefix, after
        message = (
            f"{self.url} cannot list its locks: at the server, a held lock has no name, only a number or a locked row. "
            "Ask for the holders of each name, or use mode=table, which lists its locks"
        )
        raise Unsupported(message, backend=self.url)

    async def close(self) -> None:
        await self._sessions.close()
        await self.database.close()
