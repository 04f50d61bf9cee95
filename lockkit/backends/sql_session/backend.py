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

Beside `SessionBackend`: `Locking` (what the modes and databases differ in, and the leases) and `Sessions` (the pool; it
also leaves the queue).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    NamesPage,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
)
from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import CONFLICTS, KEEPALIVE_SECONDS, STATEMENT_SECONDS
from lockkit.backends.sql.options import mode_option
from lockkit.backends.sql.schema import parse_table
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.pool import Sessions
from lockkit.backends.sql_session.session import Claim, Session, Taken
from lockkit.background import Background, nothing
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.units import Instant, Seconds

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

WATCH_SECONDS = 0.25
"""How often to look for closed connections. Longer notifies holders later; shorter wakes an idle one more often."""

LINGER_SECONDS = 2.0
"""For how long to go on when nothing is held any more. Shorter starts a thread or task more often."""

_GONE = Gone("session")
_SENT = Unknown(BackendUnavailable("sent, and not read yet"))
"""The outcome of a renewal until its answer is read."""


CAPABILITIES = Capabilities(
    crash_release="connection",
    min_ttl=0.05,
    ttl_granularity=0.001,
    fair=True,
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
    caveat="A lock is a connection, and names are hashed: a failover ends it without the holder's knowing until its "
    "next renewal.",
    permits="slots",
)
"""Of mode=advisory on PostgreSQL, without `Capabilities.downgrade`."""


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
        raise ValueError(f"it must be at most {NAME_CHARS_MAX} characters long")
    return table


class SessionBackend(SqlBackend):
    """What the modes share. Each subclass is one mode of one database."""

    _locking_class: ClassVar[type[Locking]]

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        super().__init__(database, options, host)
        self._locking = self._locking_class(database, options["table"], auto_create=options["auto_create"])
        self.tables = self._locking.tables
        database.keepalive = options["keepalive"]
        self._sessions = Sessions(database, host.runtime, options["pool_size"] or database.pool_size, self._locking)
        self._lost = host.lost
        self._held: set[Claim] = set()
        self._watched_until = -inf
        self._watch = Background(host.runtime, "lockkit-sql-watch", self._watch_held, nothing)

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
        look_after = min(max(request.ttl, RETRY_SECONDS), self.database.keepalive)
        for _ in range(ATTEMPTS_MAX):
            started = self._runtime.now()
            if claim.queued:
                assert claim.session is not None
                claim.session.answer_by = request.answer_by
                if not claim.session.answered:
                    if await self._waits_in_vain(request, claim, claim.session):
                        look_after = RETRY_SECONDS
                        continue
                    if started >= claim.look_at:
                        claim.look_at = started + look_after
                    return Busy()
                # Before the proof that the lock is still held: see the module.
                anchor = self._runtime.now()
                taken = await self._confirm_grant(request, claim, claim.session, limit)
            else:
                anchor = None
                taken = await self._first_attempt(request, claim, limit)
                if taken is None and claim.session is not None:
                    claim.look_at = started + look_after
                    await self._enqueue(request, claim, claim.session, limit)
                    return Busy()
            if taken is not None and claim.session is not None:
                token = await self._token(request, claim, claim.session, taken)
                if claim.session.unanswered and not await self._proven(request, claim, claim.session):
                    continue
                if token is not None:
                    self._hold(claim, request.owner, ttl, (started if anchor is None else anchor) + ttl)
                    return Grant(request.name, request.owner, token, ttl, anchor, claim)
                # Ended between the grant and now: this process was stopped, or it was done by force.
                self._sessions.lose(claim)
        await self._sessions.give_up(claim, request.answer_by)
        return Busy(retry_after=0.0, poll=True)

    async def _first_attempt(self, request: Request, claim: Claim, limit: int) -> Taken | None:
        """Try at once, on a session of its own; None with a session: it is busy; None without: begin anew."""
        if claim.session is None:
            claim.session = await self._sessions.take(request.answer_by)
        session = claim.session
        session.answer_by = request.answer_by
        try:
            if not claim.sent:
                key = await self._locking.key(session.run, request.name)
                if key is None:
                    await self._sessions.give_up(claim, request.answer_by)
                    await self._locking.make_tables(None, request.answer_by)
                    return None
                claim.key = key._replace(shared=request.mode == "shared")
            claim.sent = True
            return await self._locking.attempt(session, claim.key, limit, request)
        except LockError:  # of a statement on another connection; some are an OSError, as errors of drivers are
            await self._sessions.give_up(claim, request.answer_by)
            raise
        except self.database.driver_errors as error:
            await self._failed_to_lock(request, claim, session, error, queued=False)
            return None

    async def _failed_to_lock(
        self, request: Request, claim: Claim, session: Session, error: BaseException, *, queued: bool
    ) -> None:
        """
        Give up a session after an error; return to begin anew, or raise it.

        In the queue: a limit of the server's, or an administrator's cancel. The grant may have raced with that, and may
        have ended. Where the server was demoted a new session finds the one that took over.
        """
        kind = self.database.kind(error)
        anew = CONFLICTS | {"no table"} | ({"locked", "timeout", "read-only"} if queued else set())
        if kind in anew | {"locked"} and not session.unanswered:
            await self._sessions.give_up(claim, request.answer_by)
            if kind == "no table":
                await self._locking.make_tables(error, request.answer_by)
            if kind in anew:
                return
        else:
            kept = session.connection.used > 0
            self._sessions.lose(claim)
            if kind == "read-only":
                self._sessions.drop_idle()
            if not queued and kept and kind in {"connection", "read-only"}:
                return
        raise self.database.translate(error) from error

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

    async def _waits_in_vain(self, request: Request, claim: Claim, session: Session) -> bool:
        """
        Leave the queue if waiting there is useless, which is looked at now and then; tell whether it left.

        It may block other work in the database: the holder may, for example, build an index CONCURRENTLY under the
        lock, which waits for every statement that began before.

        Or the connection may be dead: the server answers a waiting statement when it grants the lock, perhaps after
        hours. Until then no data crosses the connection, so a NAT or a firewall may forget it, and the answer never
        arrives. The server says on another connection whether it still waits.
        """
        if self._runtime.now() < claim.look_at:
            return False
        if await self._locking.blocks_others(session, request.answer_by):
            await self._sessions.give_up(claim, request.answer_by)
            return True
        if await self._locking.waits(session, claim.key, request.answer_by):
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
            await self._failed_to_lock(request, claim, session, error, queued=True)
        else:
            await self._sessions.give_up(claim, request.answer_by)
        return None

    async def _token(self, request: Request, claim: Claim, session: Session, taken: Taken) -> int | None:
        """Return the token of what was taken, and write the lease if that is still to be done."""
        identity, token = taken
        if token is None:
            token = await self._locking.write(request, claim.key, session, identity)
        if token == 0:
            # MariaDB returns no last id when the table has a trigger that writes.
            holders = await self._locking.holders(claim.key, request.answer_by)
            token = next((holder.token for _, holder in holders if holder.owner == request.owner), None)
        return token

    async def _proven(self, request: Request, claim: Claim, session: Session) -> bool:
        """
        Read the answer that proves that the session still holds the lock; False: begin anew.

        The lease has been written meanwhile, by a statement that checks by itself whether this session holds the lock.
        If it lost the lock since, the next holder writes its own lease over that, with a larger token.
        """
        try:
            await session.answer()
        except self.database.driver_errors as error:
            await self._failed_to_lock(request, claim, session, error, queued=True)
            return False
        return True

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        """See `LockBackend.wait`: until the statement that waits in the database's queue is answered."""
        del busy
        claim: Claim | None = request.state
        if claim is not None and claim.queued and claim.session is not None:
            await claim.session.until_answer(request.wake, min(until, claim.look_at))

    async def abandon(self, request: Request) -> None:
        claim: Claim | None = request.state
        if claim is not None:
            await self._sessions.give_up(claim, request.answer_by)
        request.state = None

    # -- renew -----------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        for grant in grants:
            grant.state.ttl = grant.ttl  # an extension may have changed it
        ttls = [*(claim.ttl for claim in list(self._held)), *(grant.ttl for grant in grants)]
        until = self._runtime.now() + min(STATEMENT_SECONDS, RENEW_SHARE * min(ttls, default=inf))
        return await self._renew([(grant.state, grant.ttl) for grant in grants], until, until)

    async def _renew(
        self, leases: Sequence[tuple[Claim, Seconds]], until: Instant, turns_until: Instant
    ) -> list[Renewal]:
        """
        Renew leases for so many seconds. All renewals are sent before the first answer is read.

        An answer that does not come in time is read by the next renewal of that lease.
        """
        outcomes: list[Renewal] = []
        asked: list[tuple[int, Claim, Session]] = []
        try:
            for claim, ttl in leases:
                outcomes.append(_GONE)
                session = claim.session
                if session is None:
                    continue
                if not await session.turn.take(turns_until):
                    outcomes[-1] = Unknown(BackendUnavailable("another request of this lease is under way"))
                    continue
                asked.append((len(outcomes) - 1, claim, session))
                # Else it was released while we waited for our turn: the session may be another lock's by now.
                if claim.session is session:
                    session.answer_by = until
                    outcomes[-1] = await self._send_renewal(claim, session, self._locking.limit(ttl))
            for number, claim, session in asked:
                if outcomes[number] is _SENT:
                    outcomes[number] = await self._read_renewal(claim, session, leases[number][1])
        finally:
            for _, _, session in asked:
                session.turn.give()
        return outcomes

    async def _send_renewal(self, claim: Claim, session: Session, limit: int) -> Renewal:
        """Send a renewal, unless the same one was sent before and is not answered."""
        try:
            if session.unanswered and session.renewing != limit:
                if not session.answered:
                    return Unknown(BackendUnavailable("the last request of this lease is not answered yet"))
                await self._sessions.discard_answer(session)
            if not session.unanswered:
                self._locking.keep(session, limit)
                session.renewing = limit
        except self.database.driver_errors as error:
            return self._failed(claim, session, error)
        return _SENT

    async def _read_renewal(self, claim: Claim, session: Session, ttl: Seconds) -> Renewal:
        assert session.renewing is not None, "sent before"
        ttl = self._locking.seconds(session.renewing, ttl)
        try:
            await session.answer()
        except self.database.driver_errors as error:
            return self._failed(claim, session, error)
        claim.valid_until = session.sent_at + ttl
        return Renewed(session.sent_at, ttl)

    def _failed(self, claim: Claim, session: Session, error: BaseException) -> Renewal:
        if session.unanswered:
            return Unknown(self.database.translate(error))
        # The connection was the lock.
        self._sessions.lose(claim)
        return _GONE

    # -- watch -----------------------------------------------------------------------------------------------------

    def _hold(self, claim: Claim, owner: str, ttl: Seconds, valid_until: Instant) -> None:
        """Watch a lock until its claim ends."""
        claim.owner, claim.ttl, claim.valid_until = owner, ttl, valid_until
        self._held.add(claim)
        if self._runtime.now() >= self._watched_until:
            self._watch.wake()  # the watch may have found nothing to do just now, and be about to end
        try:
            self._watch.start()
        except RuntimeError as error:  # no more threads, or the event loop has ended
            log.warning("ended connections will be noticed by the next renewal only: %s", error)

    async def _watch_held(self) -> None:
        """
        Notice ended connections, and send on those that would be silent for too long.

        Without the first a holder learns that its session was ended (``pg_terminate_backend``, ``KILL``, a server that
        stops) by its next renewal, a third of its ttl later. A server that hangs, or is cut off, closes nothing: for
        that there is the deadline.

        A load balancer or a NAT may close an idle connection, often after a minute, and with it the lock. Renewals are
        sent only after a third of the ttl, and with ``renew=False`` never.
        """
        self._watched_until = self._runtime.now() + LINGER_SECONDS
        while ((now := self._runtime.now()) < self._watched_until or self._held) and not self._sessions.closed:
            self._watch.clear()
            if self._held:
                self._watched_until = now + LINGER_SECONDS
            # Half of the time: the answer, and the others that are due, come in the other half. And not where the ttl
            # ends before the session would be silent for too long.
            keepalive, due = self.database.keepalive, []
            for claim in list(self._held):
                session = claim.session
                if session is None or session.dropped:
                    self._held.discard(claim)
                elif self._has_ended(claim, session):
                    self._end(claim)
                elif claim.ttl > keepalive and session.sent_at + keepalive / 2 <= now and not session.unanswered:
                    due.append((claim, claim.valid_until - now))  # for as long as the lease is valid, and no longer
            for (claim, _), outcome in zip(due, await self._renew(due, now + STATEMENT_SECONDS, now), strict=True):
                if outcome is _GONE:
                    self._end(claim)
            await self._watch.wait(WATCH_SECONDS)

    def _end(self, claim: Claim) -> None:
        """Tell the holder that its session has ended, unless it is releasing its lease."""
        if claim in self._held:
            self._held.discard(claim)
            self._lost(claim.owner, "session")

    def _has_ended(self, claim: Claim, session: Session) -> bool:
        """Tell whether the server has closed a session, and close what is of no more use."""
        if not session.turn.take_now():
            return False  # a renewal or a release is under way, which will find that out itself
        try:
            ended = claim.session is session and session.ended
            # After `valid_until` the server has ended it, or does so now.
            if claim.session is session and (ended or claim.valid_until < self._runtime.now()):
                self._sessions.drop(session)
            return ended
        finally:
            session.turn.give()

    # -- downgrade and release -------------------------------------------------------------------------------------

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

    async def downgrade(self, grant: Grant) -> bool:
        if not self.capabilities.downgrade:
            return await super().downgrade(grant)
        claim: Claim = grant.state
        if claim.session is not None and claim.session.pooled:
            message = (
                f"{self.database.url} is behind a pooler, where a write lease of {grant.name!r} cannot become a read "
                "lease: release it, and acquire a read lease"
            )
            raise Unsupported(message, name=grant.name, backend=self.database.url)
        session = await self._take(claim, self._runtime.now() + CALL_SECONDS)
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

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        answer_by = min(answer_by, self._runtime.now() + CALL_SECONDS)
        claim: Claim = grant.state
        self._held.discard(claim)
        session = await self._take(claim, answer_by)
        if session is None:
            return False
        try:
            await self._sessions.discard_answer(session)
            held = await self._locking.free(session, claim.key)
            # Before the turn is given: a renewal that waits for it must see that the session is not this lock's.
            self._sessions.detach(claim)
        except self.database.driver_errors as error:
            self._sessions.lose(claim)  # that frees the lock, but nobody can tell whether it was held until then
            raise self.database.translate(error) from error
        finally:
            session.turn.give()
        await self._sessions.give_back(session)
        if claim.key.shared and self._runtime.random.random() < DELETE_CHANCE:
            await self._locking.delete_former_shares(claim.key, answer_by)
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

    # -- about a lock ----------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        found = await self._locking.holders(await self._locking.key(self.database.run, name))
        return [holder for _, holder in found]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`: ends the sessions that hold it."""
        key = await self._locking.key(self.database.run, name)
        holding = {(pid, holder.owner) for pid, holder in await self._locking.holders(key)}
        if not holding:
            return False
        until = self._runtime.now() + BREAK_SECONDS
        for pid, _ in holding:
            await self._locking.end(pid, until)
        # The server does it in its own time.
        while left := holding & {(pid, holder.owner) for pid, holder in await self._locking.holders(key)}:
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
        self._held.clear()
        self._watch.wake()
        await self._sessions.close()
        await self.database.close()
