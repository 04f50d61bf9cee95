"""
The modes of the SQL backends in which an open session of the database is the lock: what ``row`` and ``advisory`` share.

::

    we (on a session of the lock's own)         the database                      on a connection for statements
    -----------------------------------         ------------                      ------------------------------
    lock at once or not at all; if ours,
    write the lease, committed             ->   ours                              (mode=advisory)

    BEGIN, lock at once or not at all      ->   ours                              (mode=row, or behind a pooler)
                                                                              ->  the lease is written: owner, token,
                                                                                  session; committed at once
    a renewal: any statement               ->   idles anew, at most a ttl
    COMMIT                                 ->   the next in the queue has it

    BEGIN, lock at once or not at all      ->   somebody else's
    lock                                   ->   (waits in the database's queue)
                                           <-  ours, perhaps long ago
    a renewal, as proof that it still is   ->
                                                                              ->  the lease is written

- The server was told before to end a session that idles for longer than the ttl. It counts from its last answer, which
  is later than our last request, so our deadline comes first. So a holder that is stopped is thrown out, and so, after
  half of that, is a waiter that is stopped in the queue and granted the lock there.
- A call knows when its caller must have an answer; each session has that as `Session.answer_by`, for all that it runs.
- A grant that we find in the queue may be old: we may have been stopped. Only a statement that the session answers
  *after* we have looked shows that the lock is ours, and from before that statement the ttl counts.
- The lease is in a table, not in the session, for others to see; and the token is there, so that neither the end of a
  connection nor a rollback takes it back. It is written only while the session that it names holds the lock, or where
  that takes long to find out, not over the lease of a later grant; the statement that writes it looks. Without that:
  A is granted the lock, is stopped, is thrown out; B is granted it and writes its lease; A wakes and writes over that.
  What a session writes in the statement that locks needs no look.
- A session that ends frees the lock, so what lost its connection is lost: nothing is confirmed by another one.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
    Busy,
    Gone,
    Grant,
    Holder,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
)
from lockkit.backends.sql.dialect import STATEMENT_SECONDS
from lockkit.backends.sql.errors import MissingTable
from lockkit.backends.sql.options import adopt_database, driver_options, mode_option, open_database
from lockkit.backends.sql.schema import create, parse_table
from lockkit.backends.sql.statement import Statement
from lockkit.backends.sql_session.pool import Sessions, size_of
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, Unsupported

if TYPE_CHECKING:
    from sqlalchemy import Table

    from lockkit.backend import Host
    from lockkit.backends.sql.database import Database
    from lockkit.backends.sql.statement import Parameter, Result
    from lockkit.backends.sql_session.session import Session
    from lockkit.url import Url

__all__ = ["Key", "SessionBackend", "Taken", "options_of"]

log = logging.getLogger("lockkit")

LOOKS_MAX = 3
"""How often one attempt begins anew: a table or row was made, the database gave the attempt up for others."""

AGAIN_SECONDS = 1.0
"""After a waiter has made way for other work in the database, it looks again so soon whether it is in the way: such
work waits several times. Longer delays that work, shorter asks more often."""

RELEASE_ALL_SECONDS = 1.0
"""How long all sessions together are given to answer that they have released when a client is closed. Longer delays the
end of a program whose server hangs; shorter closes the connection of one that is only slow, which releases as well, but
perhaps a little later."""

BREAK_SECONDS = 5.0
"""How long `break_lock` waits for the end of the session that it has ended."""

BREAK_PAUSE = 0.005
"""Between two looks whether that session has ended, seconds."""

CANCEL_PAUSE = 0.02
"""Until a statement that was cancelled, but goes on, is cancelled once more, seconds, and then twice as long."""

NAME_CHARS_MAX = 56
"""Of a table, so that the name of the one beside it, which is longer by seven, is short enough for PostgreSQL."""

_PING = Statement("SELECT 1")


class Key(NamedTuple):
    """
    A lock as the database knows it.

    Attributes:
        name: As the tables have it.
        number: 64 bits of a hash, signed, for PostgreSQL's advisory locks.
        text: The same for MariaDB and MySQL: more bits of it, in hexadecimal digits.
    """

    name: str | bytes
    number: int
    text: str


class Taken(NamedTuple):
    """
    What the database has given us.

    Attributes:
        identity: Of the holder, for `SessionBackend._written`.
        token: Of the lease, if it was written in the same moment; 0: it was, under a token that we were not told.
    """

    identity: int
    token: int | None = None


class _Place:
    """A place in the database's queue, and then a lock that is held."""

    __slots__ = ("found", "look_at", "queued", "session")

    def __init__(self) -> None:
        self.found: Key | None = None
        self.session: Session | None = None
        self.queued = False
        # When to look whether we are in the way of others, client monotonic clock.
        self.look_at = 0.0

    @property
    def key(self) -> Key:
        """The lock. Known once a session was told to lock it."""
        assert self.found is not None
        return self.found


def options_of(mode: str, table: str) -> Mapping[str, Option]:
    """Give the options of a mode; `table` is the name of its table."""
    return MappingProxyType(
        {
            "mode": mode_option(mode),
            "table": Option(_parse_table, "Name of the table, also as schema.name.", table),
            "auto_create": Option(validation.parse_bool, "Make the tables when they are not there.", default=True),
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


class SessionBackend(LockBackend):
    """What the modes share. Subclasses know one mode of one database."""

    _dialect: ClassVar[str]
    """The name of `lockkit.backends.sql.dialect.Dialect` that this is for."""

    tables: Sequence[Table]
    """What there must be in the database; ``lockkit migrate`` makes it."""
    _written: Statement
    """Writes a lease ($1 name, $2 owner, $3 identity, $4 metadata, then `_lease_parameters`), committed."""
    _seen: Statement
    """Looks who holds a lock (`_look_parameters`): process id, owner, token, metadata, waiters; no row: free."""
    _cancel: Statement
    """Ends the statement of a session ($1 its process id)."""
    _home: Statement
    """Asks which table ``table=`` means, as text that is the same however it was spelled; no row: there is none."""

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host, size: int | None) -> None:
        """Use a database; nothing is sent."""
        self.database = database
        self._host = host
        self._failures: tuple[type[BaseException], ...] = (LockError, *database.driver_errors)
        self._runtime = host.runtime
        self._auto_create: bool = options["auto_create"]
        self._table_name: str = options["table"]
        self._resolved = ""
        self._left: set[_Place] = set()
        self._sessions = Sessions(
            database, host.runtime, size, self._greet, kept_seconds=self._kept_seconds, ended=self._session_ended
        )
        self._prepare()

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """See `LockBackend.driver_options`."""
        return driver_options()

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Self:
        """See `LockBackend.open`."""
        return cls(open_database(url, options, cls.options, host), options, host, options["pool_size"])

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> Self | None:
        """See `LockBackend.adopt`: an engine of SQLAlchemy's, in the form of this face."""
        database = adopt_database(client, host)
        if database is None or database.dialect.name != cls._dialect:
            return None
        return cls(database, options, host, options["pool_size"] or size_of(database.engine.pool))

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return self.database.url

    # -- what the modes and databases differ in --------------------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """Make the statements."""

    @abstractmethod
    def _key(self, table: str, name: str) -> Key:
        """Make the key of a lock; `table` is what `_home` said."""

    @abstractmethod
    async def _greet(self, session: Session) -> None:
        """Set what is to hold for a new session."""

    @abstractmethod
    def _limit(self, ttl: float) -> int:
        """How long the server is to let a session idle, in its unit: rounded up."""

    @abstractmethod
    def _seconds(self, limit: int, ttl: float) -> float:
        """Tell how long the lock is kept with this limit, seconds: at least the ttl asked for."""

    @abstractmethod
    def _kept_seconds(self, session: Session) -> float:
        """How long the server lets a session idle that holds nothing."""

    @abstractmethod
    async def _attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        """Lock if it is free. Nothing is open in the session before."""

    @abstractmethod
    async def _enqueue(self, session: Session, key: Key, limit: int) -> None:
        """
        Send the statement that waits for the lock, after an `_attempt` that gave None.

        And before, have the server end the session when it idles for half of `limit`: a waiter that is stopped, and is
        granted the lock then, holds up those behind it no longer than that.
        """

    async def _obstructs(self, session: Session, answer_by: float) -> bool:
        """Whether other work in the database cannot go on because this session waits for a lock."""
        del session, answer_by
        return False

    @abstractmethod
    def _granted(self, session: Session, result: Result) -> int | None:
        """Read the answer to that: the holder's identity; None: not granted, begin anew."""

    @abstractmethod
    def _keep(self, session: Session, limit: int) -> None:
        """Send what starts the ttl anew."""

    @abstractmethod
    async def _leave(self, session: Session, key: Key) -> None:
        """Give up what the session holds, whatever that is."""

    @abstractmethod
    async def _free(self, session: Session, key: Key) -> bool:
        """Release the lock that is held; False: it was not."""

    @abstractmethod
    def _send_free(self, session: Session, key: Key) -> None:
        """Send what releases the lock that is held; the session is closed afterwards."""

    @abstractmethod
    async def _end(self, pid: int, answer_by: float) -> None:
        """Have the server end a session. Raises `Unsupported` if we may not."""

    @abstractmethod
    async def _end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        """Have the server end a session whose connection we have closed, if it is still there and waits for a lock."""

    @abstractmethod
    def _token(self, result: Result) -> int | None:
        """Read what `_written` gave: the token; None: the session does not hold the lock."""

    def _lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        del session, key
        return ()

    def _look_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name,)

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        place: _Place | None = request.state
        if place is None:
            place = request.state = _Place()
        limit = self._limit(request.ttl)
        look_again: float | None = None
        for _ in range(LOOKS_MAX):
            started = self._runtime.now()
            if place.queued:
                assert place.session is not None
                place.session.answer_by = request.answer_by
                if not place.session.answered:
                    if not await self._makes_way(request, place, place.session):
                        return Busy()
                    look_again = AGAIN_SECONDS
                    continue
                # Before the proof that it is still ours: see the module.
                anchor = self._runtime.now()
                taken = await self._take_granted(request, place, place.session, limit)
            else:
                anchor = None
                taken = await self._first_attempt(request, place, limit)
                if taken is None and place.session is not None:
                    await self._stand_back(request, place, limit)
                    place.look_at = started + (look_again or request.ttl)
                    return Busy(retry_after=look_again)
            token = None if taken is None else await self._lease(request, place, taken)
            if token is not None and place.session is not None:
                self._believe(place.session, started if anchor is None else anchor, limit, request.ttl)
                self._sessions.hold(place.session, request.owner)
                return Grant(request.name, request.owner, token, self._seconds(limit, request.ttl), anchor, place)
        await self._give_up(place, request.answer_by)
        return Busy(retry_after=0.0, poll=True)

    def _believe(self, session: Session, anchor: float, limit: int, ttl: float) -> None:
        """Note until when this session may hold a lock. A lease that nobody renews is lost without another word."""
        session.useful_until = anchor + self._seconds(limit, ttl)

    async def _first_attempt(self, request: Request, place: _Place, limit: int) -> Taken | None:
        """Try at once, on a session of our own; None with a session: it is busy; None without: begin anew."""
        if place.session is None:
            await self._end_left(request.answer_by)
            place.session = await self._sessions.take(request.answer_by)
        session = place.session
        session.answer_by = request.answer_by
        try:
            if place.found is None:
                place.found = await self._find(session.run, request.name)
                if place.found is None:
                    await self._give_up(place, request.answer_by)
                    await self._make_tables(None, request.answer_by)
                    return None
            return await self._attempt(session, place.key, limit, request)
        except self.database.driver_errors as error:
            kind = self.database.kind(error)
            if kind == "no table":
                await self._give_up(place, request.answer_by)
                await self._make_tables(error, request.answer_by)
                return None
            if kind in {"conflict", "locked"}:
                await self._give_up(place, request.answer_by)
                if kind == "conflict":
                    return None
            else:
                kept = session.link.used > 0
                self._lose(place)
                if kind == "connection" and kept:
                    return None  # the server had ended it since it was used last
            raise self.database.translate(error) from error

    async def _find(self, run: Callable[[Statement], Awaitable[Result]], name: str) -> Key | None:
        """
        Give the key of a lock; None: its table is not there.

        Clients that name one table in two ways (``t``, ``public.t``) must have the same key. The server is asked once.
        """
        if not self._resolved:
            rows = (await run(self._home)).rows
            table = rows[0][0] if rows else None
            if table is None:
                return None
            self._resolved = table.decode() if isinstance(table, bytes) else table
        return self._key(self._resolved, name)

    async def _stand_back(self, request: Request, place: _Place, limit: int) -> None:
        """The lock is busy: join the queue, or leave."""
        if not request.queue:
            await self._give_up(place, request.answer_by)
            return
        session = place.session
        assert session is not None
        place.queued = True
        try:
            await self._enqueue(session, place.key, limit)
        except self.database.driver_errors as error:
            self._lose(place)
            raise self.database.translate(error) from error

    async def _makes_way(self, request: Request, place: _Place, session: Session) -> bool:
        """
        Leave the queue if others in the database wait for the end of our waiting, once in a ttl; tell whether we did.

        The holder, say, builds an index CONCURRENTLY under the lock, which waits for every statement that began before.
        """
        now = self._runtime.now()
        if now < place.look_at:
            return False
        place.look_at = now + request.ttl
        if not await self._obstructs(session, request.answer_by):
            return False
        await self._give_up(place, request.answer_by)
        return True

    async def _take_granted(self, request: Request, place: _Place, session: Session, limit: int) -> Taken | None:
        """Hear what the queue gave, and have the session prove that it is alive; None: begin anew."""
        try:
            result = await session.answer()
            place.queued = False
            identity = self._granted(session, result)
            if identity is not None:
                return await self._prove(session, place.key, limit, request, identity)
        except self.database.driver_errors as error:
            place.queued = False
            kind = self.database.kind(error)
            if kind not in {"conflict", "locked", "timeout", "no table"} or session.unheard:
                self._lose(place)
                raise self.database.translate(error) from error
            if kind == "no table":
                await self._give_up(place, request.answer_by)
                await self._make_tables(error, request.answer_by)
            # A limit of the server's, or somebody cancelled it: the grant may have raced with that, so look again.
        await self._give_up(place, request.answer_by)
        return None

    async def _prove(self, session: Session, key: Key, limit: int, request: Request, identity: int) -> Taken | None:
        """Have a session that was granted the lock in the queue answer once more; None: begin anew."""
        del key, request
        self._keep(session, limit)
        await session.answer()
        return Taken(identity)

    async def _lease(self, request: Request, place: _Place, taken: Taken) -> int | None:
        """Give the token of what was taken, written now if it was not; None: the session does not hold it any more."""
        token = await self._write(request, place, taken.identity) if taken.token is None else taken.token
        if token == 0:
            # MariaDB gives no last id when the table has a trigger that writes.
            holders = await self._look(place.key, request.answer_by)
            token = next((token for _, owner, token, *_ in holders if owner == request.owner), None)
        if token is None:
            # Thrown out between the grant and now: we were stopped, or it was done by force.
            self._lose(place)
        return token

    async def _write(self, request: Request, place: _Place, identity: int) -> int | None:
        """Write the lease; give its token, or None: the session does not hold the lock any more."""
        key, session = place.key, place.session
        assert session is not None
        owner = self.database.dialect.name_parameter(request.owner)
        parameters = (key.name, owner, identity, request.metadata, *self._lease_parameters(session, key))
        try:
            result = await self.database.run(self._written, parameters, again=True, answer_by=request.answer_by)
        except MissingTable as error:
            await self._make_tables(error, request.answer_by)
            result = await self.database.run(self._written, parameters, again=True, answer_by=request.answer_by)
        return self._token(result)

    async def _make_tables(self, error: BaseException | None, answer_by: float) -> None:
        if not self._auto_create:
            names = " and ".join(table.fullname for table in self.tables)
            message = f"{self.url} lacks one of the tables {names}. Make them by lockkit migrate, or let auto_create on"
            raise ConfigurationError(message, backend=self.url) from error
        await create(self.database, self.tables, answer_by)

    # -- waiting and giving up -------------------------------------------------------------------------------------

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`: until the statement that waits in the database's queue is answered."""
        del busy
        place: _Place | None = request.state
        if place is not None and place.queued and place.session is not None:
            await place.session.until_answer(request.wake, until)

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        place: _Place | None = request.state
        if place is not None:
            await self._give_up(place, request.answer_by)
        request.state = None

    async def _give_up(self, place: _Place, answer_by: float) -> None:
        """
        Leave the queue, or give back a lock; keep the session for others if it can be of use.

        Raises:
            BackendUnavailable: The server has not confirmed that the session waits no more. Call again.
        """
        session = place.session
        if session is None:
            return
        session.answer_by = answer_by
        try:
            if session.dropped:
                await self._end_orphan(place, session, answer_by)
                self._lose(place)
                return
            if place.queued:
                await self._end_wait(session, answer_by)
            await self._hear_out(session)
            if place.found is not None:
                await self._leave(session, place.key)
        except self._failures as error:
            if self._may_wait(place, session):
                self._leave_behind(place, session)
                raise error if isinstance(error, LockError) else self.database.translate(error) from error
            # The server frees what a closed connection held.
            self._lose(place)
        except BaseException:
            if self._may_wait(place, session):
                self._leave_behind(place, session)
            else:
                self._lose(place)
            raise
        else:
            place.session, place.queued = None, False
            await self._sessions.give_back(session)

    def _may_wait(self, place: _Place, session: Session) -> bool:
        """Whether the server may have this session wait in a queue, as far as we know."""
        return place.queued and (session.dropped or not session.answered)

    def _leave_behind(self, place: _Place, session: Session) -> None:
        """
        Close the connection of a session that waits, and remember it until the server says that it waits no more.

        A server that waits for a lock does not look whether its client is still there.
        """
        self._sessions.drop(session)
        self._left.add(place)

    async def _end_left(self, answer_by: float) -> None:
        """End the sessions that were left behind. The engine tries that for a ttl only, and no ttl ends a waiter."""
        for place in list(self._left):
            try:
                await self._give_up(place, answer_by)
            except self._failures as error:
                log.debug("ending a session that was left behind at %s: %s", self.url, error)
                return

    async def _end_wait(self, session: Session, answer_by: float) -> None:
        """
        Have the server end the statement that waits for the lock.

        Again and again: a server that has not begun with the statement yet forgets that it was to be cancelled.
        """
        pause, until = CANCEL_PAUSE, min(answer_by, self._runtime.now() + STATEMENT_SECONDS)
        never = self._runtime.event()
        while not session.answered and self._runtime.now() < until:
            await self.database.run(self._cancel, [session.pid], again=True, answer_by=answer_by)
            await session.until_answer(never, min(until, self._runtime.now() + pause))
            pause *= 2

    async def _end_orphan(self, place: _Place, session: Session, answer_by: float) -> None:
        """
        Have the server end a session whose connection we closed while it waited, or joined the queue.

        The session and not its statement: that it is to be cancelled is forgotten if it has not begun.
        """
        if place.queued and session.pid and not session.pooled:  # a pooler lends that process to others
            await self._end_waiter(session, place.key, answer_by)
        self._left.discard(place)

    async def _hear_out(self, session: Session) -> None:
        """Hear what was sent last; what it says does not matter, only that it came."""
        if not session.unheard:
            return
        try:
            await session.answer()
        except self.database.driver_errors as error:
            if isinstance(error, TimeoutError) or self.database.kind(error) == "connection":
                raise

    def _lose(self, place: _Place) -> None:
        session, place.session, place.queued = place.session, None, False
        self._left.discard(place)
        if session is not None:
            self._sessions.drop(session)

    # -- while it is held ------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. All are sent before the first answer is awaited: each has a session of its own."""
        outcomes: dict[int, Renewal] = {}
        asked: list[tuple[int, _Place, Session]] = []
        started = self._runtime.now()
        until = started + STATEMENT_SECONDS
        try:
            for number, grant in enumerate(grants):
                place: _Place = grant.state
                session = place.session
                if session is None:
                    outcomes[number] = Gone("session")
                elif await session.turn.take(until):
                    asked.append((number, place, session))
                    if place.session is not session:
                        # Released while we waited for our turn: the session may be another lock's by now.
                        outcomes[number] = Gone("session")
                        continue
                    session.answer_by = until
                    failed = await self._ask(place, session, self._limit(grant.ttl))
                    if failed is not None:
                        outcomes[number] = failed
                else:
                    outcomes[number] = Unknown(BackendUnavailable("another request of this lease is under way"))
            for number, place, session in asked:
                if number not in outcomes:
                    outcomes[number] = outcome = await self._hear(place, session, grants[number])
                    if isinstance(outcome, Renewed):
                        ttl = grants[number].ttl
                        self._believe(session, started, self._limit(ttl), ttl)
        finally:
            for _, _, session in asked:
                session.turn.give()
        return [outcomes[number] for number in range(len(grants))]

    async def _ask(self, place: _Place, session: Session, limit: int) -> Renewal | None:
        """Send a renewal; None if it is under way."""
        try:
            if session.unheard:
                if not session.answered:
                    return Unknown(BackendUnavailable("the last renewal is not answered yet"))
                await self._hear_out(session)
            self._keep(session, limit)
        except self.database.driver_errors as error:
            return self._failed(place, error)
        return None

    async def _hear(self, place: _Place, session: Session, grant: Grant) -> Renewal:
        try:
            await session.answer()
        except self.database.driver_errors as error:
            return self._failed(place, error)
        return Renewed(ttl=self._seconds(self._limit(grant.ttl), grant.ttl))

    def _failed(self, place: _Place, error: BaseException) -> Renewal:
        session = place.session
        if session is not None and session.unheard:
            return Unknown(self.database.translate(error))
        # The connection was the lock.
        self._lose(place)
        return Gone("session")

    def _session_ended(self, owner: str) -> None:
        """The server has closed the connection that is the lock of this owner's lease."""
        self._host.lost(owner, "session")

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`."""
        answer_by = min(answer_by, self._runtime.now() + CALL_SECONDS)
        place: _Place = grant.state
        session = place.session
        if session is None:
            return await self._end_ours(place, grant.owner, answer_by)
        if not await session.turn.take(answer_by):
            raise BackendUnavailable("a renewal of this lease is not answered")
        try:
            if place.session is not session or session.ended:
                self._lose(place)
                return False
            session.answer_by = answer_by
            await self._hear_out(session)
            ours = await self._free(session, place.key)
            # Before the turn is given: a renewal that waits for it must see that the session is not this lock's.
            place.session = None
        except self.database.driver_errors as error:
            return await self._not_freed(place, session, grant.owner, error)
        finally:
            session.turn.give()
        await self._sessions.give_back(session)
        return ours

    async def _not_freed(self, place: _Place, session: Session, owner: str, error: BaseException) -> bool:
        """A release failed: was the lock lost before, or is that not known?"""
        lost_before = not session.unheard and session.told(error)
        self._lose(place)
        if lost_before:
            return False
        # After a TimeoutError the server would not answer this either. That the connection is closed frees the lock.
        if not isinstance(error, TimeoutError) and await self._end_ours(place, owner, session.answer_by):
            return True
        # Not held any more, and whether the release did that nobody can tell.
        raise self.database.translate(error) from error

    async def _end_ours(self, place: _Place, owner: str, answer_by: float) -> bool:
        """End a session of ours whose connection is gone, if the server still has it."""
        for pid, holder, *_ in await self._look(place.key, answer_by):
            if holder == owner:
                await self._end(pid, answer_by)
                return True
        return False

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`: all are sent, then heard for a while, and closed in any case."""
        held: list[tuple[_Place, Session]] = [(one.state, one.state.session) for one in grants if one.state.session]
        if self._runtime.loop_has_ended():
            # As at the exit of the interpreter: nothing can be heard any more.
            for place, _ in held:
                self._lose(place)
            return
        until = min(answer_by, self._runtime.now() + RELEASE_ALL_SECONDS)
        taken: list[tuple[_Place, Session]] = []
        answers = 0
        try:
            for place, session in held:
                if await session.turn.take(until):
                    if place.session is not session:
                        session.turn.give()
                        answers += 1  # released while we waited for our turn
                        continue
                    taken.append((place, session))
                    self._send_release(place.key, session, until)
            for _, session in taken:
                answers += await self._heard(session)
        finally:
            # That frees the lock, too. A session that a renewal has, which hangs, is closed by `close`.
            for place, session in taken:
                self._lose(place)
                session.turn.give()
        if answers < len(held):
            message = f"{len(held) - answers} of {len(held)} locks were not answered for: their connections are closed"
            raise BackendUnavailable(message)

    def _send_release(self, key: Key, session: Session, until: float) -> None:
        session.answer_by = until
        with suppress(*self.database.driver_errors):  # hearing the answer fails, too
            if not session.unheard:
                self._send_free(session, key)

    async def _heard(self, session: Session) -> bool:
        """Hear an answer; False: none came in time. An error is one: what was held by the session is free."""
        if not session.unheard:
            return True
        try:
            await session.answer()
        except self.database.driver_errors as error:
            return not isinstance(error, TimeoutError)
        return True

    # -- about a lock ----------------------------------------------------------------------------------------------

    async def _look(
        self, key: Key | None, answer_by: float = inf
    ) -> list[tuple[int, str, int | None, str | None, int | None]]:
        """Who holds a lock: process id, owner, token, metadata, waiters; empty if nobody does."""
        if key is None:
            return []  # there is no table
        try:
            result = await self.database.run(self._seen, self._look_parameters(key), again=True, answer_by=answer_by)
        except MissingTable:
            return []
        found = []
        for pid, owner, token, metadata, waiters in result.rows:
            name = owner.decode() if isinstance(owner, bytes) else owner
            # A client of another kind, or one that was granted the lock in this moment.
            found.append((pid, f"session {pid}" if name is None else name, token, metadata, waiters))
        return found

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        return [
            Holder(owner, token, None, decode_metadata(metadata), waiters)
            for _, owner, token, metadata, waiters in await self._look(await self._find(self.database.run, name))
        ]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`: ends the session that holds it."""
        key = await self._find(self.database.run, name)
        holders = await self._look(key)
        if not holders:
            return False
        pid, owner, *_ = holders[0]
        until = self._runtime.now() + BREAK_SECONDS
        await self._end(pid, until)
        # The server does it in its own time.
        while any(now[:2] == (pid, owner) for now in await self._look(key)):
            if self._runtime.now() >= until:
                message = f"session {pid}, which holds it, has not ended within {BREAK_SECONDS:g} s"
                raise BackendUnavailable(message)
            await self._runtime.sleep(BREAK_PAUSE)
        return True

    async def ping(self) -> None:
        """See `LockBackend.ping`."""
        await self.database.run(_PING, again=True)

    async def close(self) -> None:
        """See `LockBackend.close`."""
        await self._sessions.close()
        await self.database.close()

    def _unsupported(self, pid: int, right: str) -> Unsupported:
        message = (
            f"could not end session {pid} at {self.url}, which holds the lock: {right}, or give the login that the "
            "holder uses"
        )
        return Unsupported(message, backend=self.url)


def whole(ttl: float, unit: float, most: int) -> int:
    """Round a ttl up to whole units of so many seconds, at most `most` of them."""
    # 0.1 * 3 is a little above 0.3: without the allowance that would be a unit more.
    return min(most, max(1, math.ceil(ttl / unit - 1e-6)))
