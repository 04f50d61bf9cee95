"""
Locks in a table of a SQL database: PostgreSQL, MariaDB, MySQL or SQLite.

Algorithm: a row per lock, with its owner and the time until which it is held, by the database's clock. One statement in
a transaction of its own decides (`lockkit.backends.sql_table.statements`): it takes the row if it is free, and raises
the token. A release clears the owner and keeps the row, so the token stays. Clients remove rows that were not used for
``idle_ttl``; the clock has passed their tokens by then. A note is two more columns of the row, and keeps it until its
end.
Readers and permits are a JSON object in the row (`lockkit.backends.sql_table.shares`).

How waiters are woken, and what each kind of database does in its own way: `lockkit.backends.sql_table.table`.

What the database must offer: PostgreSQL 12, MariaDB 10.5, MySQL 8 or SQLite 3.35; the rights to SELECT, INSERT, UPDATE
and DELETE, and to CREATE the table unless it is there.

What it cannot promise: a primary that fails over without synchronous replication forgets the newest grants. Tokens
still increase: they are at least the database's time in microseconds.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from lockkit import validation
from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    NamesPage,
    Note,
    Option,
    Renewal,
    Renewed,
    Request,
    decode_metadata,
    granted_at,
    in_space,
)
from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.connection import Parameter, Result, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import MissingTable
from lockkit.backends.sql.options import mode_option
from lockkit.backends.sql.schema import (
    TABLE,
    create,
    lock_table,
    locks,
    name_of_key,
    parse_table,
    range_of,
    row_key,
)
from lockkit.backends.sql_table.shares import Held, Row, rows_of, text
from lockkit.backends.sql_table.statements import SHARED, Statements
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.units import Instant, Seconds

__all__ = ["CAPABILITIES", "SqlTableBackend", "lock_table"]

log = logging.getLogger("lockkit")

T = TypeVar("T")

BATCH = 1000
"""Leases renewed by one statement. More makes statements longer, and others wait for more rows at once."""

SHARES_BATCH = 100
"""Rows of readers and permits that one statement changes. More makes it longer: it compares each row with each name."""

IDLE_TTL = 86_400.0
"""How long a row must have been idle to be removed, if the option ``idle_ttl`` does not say, seconds: a day. Shorter
relies more on the database's clock, which must then not be set back by more; longer keeps more small rows."""

IDLE_TTL_MIN = 60.0
"""The shortest, seconds: tokens increase only if no clock is set back by more."""

CLOSE_SECONDS = 0.3
"""How long closing waits for a statement of the reaper. Longer delays it more when the server hangs."""

REAP_SECONDS = 600.0
"""A client looks for idle rows at most this often, or once in ``idle_ttl``: that reads the whole table."""

REAP_SHARE = 1 / 256
"""And in this share of its acquisitions: a client that locks more leaves more rows."""

MARK_SECONDS = 5.0
"""How long a waiting writer stops new readers if it does not say so again, seconds. Longer stops them for longer when
the writer has died; shorter lets readers in before a writer whose machine is busy."""

REMARK_SECONDS = 2.0
"""How often it says so again, seconds."""

RETRY_SECONDS = 0.002
"""Longest pause after another client has changed the row meanwhile, for each time, seconds. Longer delays the call,
shorter meets the same clients again."""

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "mode": mode_option("table"),
        "table": Option(parse_table, "Name of the table, also as schema.name.", TABLE),
        "auto_create": Option(validation.parse_bool, "Make the table when it is not there.", default=True),
        "idle_ttl": Option(
            validation.parse_at_least(IDLE_TTL_MIN), "How long the row of a released lock is kept, seconds.", IDLE_TTL
        ),
    }
)

CAPABILITIES = Capabilities(
    crash_release="ttl",
    min_ttl=0.05,
    ttl_granularity=0.000001,
    fair=False,
    wakeup="poll",
    token_source="max(last + 1, database time in µs), so it also grows when the table comes back without its rows",  # noqa: S106
    survives_node_loss=False,
    survives_data_loss=True,
    shared_mode=True,
    clock_assumption="the database's clock runs at the rate of the clients' within 1 % and is not set forward while a "
    "lock is held; for tokens after a loss of data it is not set back by more than the outage",
    waiters_visible=False,
    scope="network",
    caveat="Without synchronous replication a promoted replica may not know the newest locks: guard storage by token.",
    metadata_update=True,
    listing=True,
    fair_shared=True,
    downgrade=True,
    permits="native",
    notes=True,
    transfer=True,
)


@dataclass(slots=True)
class Waiting:
    """`Request.state`: what a request that waits has left elsewhere."""

    connection: object = None  # where it is woken
    marked_at: Instant | None = None  # when it stopped new readers, client monotonic time; None if it has not
    seen_held: bool = False  # it found the lock held, so it only looks until that is free


def waiting_of(request: Request) -> Waiting:
    """Return what a request that waits has left elsewhere."""
    if request.state is None:
        request.state = Waiting()
    waiting: Waiting = request.state
    return waiting


class SqlTableBackend(SqlBackend):
    """
    Processes that reach the same table. One subclass for each kind of database.

    `Grant.state` says whether a lease may be an exclusive one: not if it is ``share``, beside others, or ``alone``:
    nobody else had one when it was granted, so while the row has its token nobody has. ``either``: a downgrade has no
    answer.
    """

    capabilities = CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    _statements_class: ClassVar[type[Statements]]

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        super().__init__(database, options, host)
        self.tables = [locks(options["table"])]
        self._auto_create: bool = options["auto_create"]
        self._statements = self._statements_class(self.tables[0].quoted(database.dialect.name), database.dialect.now_us)
        self._idle_us = _microseconds(options["idle_ttl"])
        self._reap_seconds = min(REAP_SECONDS, options["idle_ttl"])
        self._reap_at = 0.0
        self._reaping = SingleRun(host.runtime, "lockkit-sql-reap", self.reap)

    async def try_acquire(self, request: Request) -> Grant | Busy:
        waiting: Waiting | None = request.state
        try:
            outcome = await self._attempt(request)
        except MissingTable as error:
            if not self._auto_create:
                message = f"{error}. Create it with lockkit migrate, or keep auto_create on"
                raise ConfigurationError(message, backend=self.url) from error.__cause__
            await create(self.database, self.tables, request.answer_by)
            outcome = await self._attempt(request)
        if type(outcome) is Grant:
            if waiting is not None and waiting.marked_at is not None:
                with suppress(BackendUnavailable):  # then the mark ends by itself
                    await self._unmark(request)
            now = self._runtime.now()
            if now >= self._reap_at and self._runtime.random.random() < REAP_SHARE:
                self._reap_at = now + self._reap_seconds
                self._reaping.start()
        return outcome

    @abstractmethod
    async def _attempt(self, request: Request) -> Grant | Busy:
        """Try once."""

    def _parameters(self, request: Request) -> tuple[Parameter, ...]:
        """Return those of what takes the lock."""
        return (self._key(request.name), request.owner, _microseconds(request.ttl), request.metadata)

    async def _ask_for_share(self, request: Request, *, want: bool = False) -> Grant | Held:
        """Try to get a reader's lease or a permit. With `want`, the row is marked if it is held: a release notifies."""
        ttl_us, until = _microseconds(request.ttl), request.answer_by
        while True:
            outcome, row = await self._change_one(
                request.name, lambda row: (row.acquire(request, ttl_us), row), answer_by=until, acquiring=True
            )
            if isinstance(outcome, Grant) or not want or row.wanted:
                return outcome
            if (await self._run(self._statements.want, (row.key, *row.version), answer_by=until)).changed:
                return outcome

    async def _busy(self, request: Request, held: Held, *, poll: bool, left: float = inf) -> Busy:
        """Make the answer; a writer that waits where there may be readers stops later ones first."""
        left = min(left, max(0.0, held.left_us / 1e6))  # the clock went on during the statement
        holder = None if held.owner == SHARED else held.owner
        # Also behind a writer, which may go on as a reader.
        if request.mode != "exclusive" or not (held.owner == SHARED or request.readers):
            return Busy(left, poll=poll, owner=holder)
        if request.queue:
            waiting = waiting_of(request)
            now = self._runtime.now()
            if waiting.marked_at is None or now >= waiting.marked_at + REMARK_SECONDS / 2:
                waiting.marked_at = now  # before: its answer may be lost
                parameters = (self._key(request.name), request.owner, int(MARK_SECONDS * 1e6))
                await self._run(self._statements.mark, parameters, answer_by=request.answer_by)
            left = min(left, REMARK_SECONDS)
        return Busy(left, poll=poll, owner=holder)

    async def _unmark(self, request: Request) -> None:
        """Let readers in again."""
        parameters = (self._key(request.name), request.owner)
        await self._run(self._statements.unmark, parameters, answer_by=request.answer_by)

    async def abandon(self, request: Request) -> None:
        waiting: Waiting | None = request.state
        self._forget(request)
        request.state = waiting  # until all is undone
        if request.uncertain and request.mode == "exclusive":
            await self._release(self._key(request.name), request.owner, request.answer_by, again=True)
        elif request.uncertain:
            await self._release_shares({self._key(request.name): [request.owner]}, request.answer_by)
        if waiting is not None and waiting.marked_at is not None:
            await self._unmark(request)
        request.state = None

    def _forget(self, request: Request) -> None:
        """Leave the place where it is woken."""
        request.state = None

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        key, owner = self._key(grant.name), grant.owner
        if _may_be_alone(grant):
            released = await self._release(key, owner, answer_by, again=False)
            if released or grant.state is None:
                return released
        elif grant.state == "alone":
            parameters = (key, grant.token)
            if (await self._run(self._statements.free_alone, parameters, again=False, answer_by=answer_by)).changed:
                return True
        return (await self._release_shares({key: [owner]}, answer_by, again=False))[key][0]

    async def _release(self, key: str, owner: str, answer_by: float, *, again: bool) -> bool:
        result = await self._run(self._statements.release, (key, owner), again=again, answer_by=answer_by)
        return result.changed == 1

    async def _release_shares(
        self, owners: Mapping[str, Sequence[str]], answer_by: float, *, again: bool = True
    ) -> dict[str, list[bool]]:
        """Release readers' leases and permits, by key; return which of them were held."""

        def ask(row: Row) -> list[bool]:
            return [row.state.release(owner, row.now_us)[0] for owner in owners[row.key]]

        return await self._change(list(owners), ask, again=again, answer_by=answer_by)

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. One statement for each thousand."""
        failed: BackendUnavailable | None = None
        for some in _batches([grant for grant in grants if _may_be_alone(grant)]):
            try:
                await self._run(self._statements.free(len(some)), self._for_many(some), answer_by=answer_by)
            except BackendUnavailable as error:
                failed = error
        await self._release_shares(self._owners([grant for grant in grants if grant.state is not None]), answer_by)
        if failed is not None:
            raise failed

    def _owners(self, grants: Sequence[Grant]) -> dict[str, list[str]]:
        """Return the owners of leases, by key."""
        owners: dict[str, list[str]] = {}
        for grant in grants:
            owners.setdefault(self._key(grant.name), []).append(grant.owner)
        return owners

    def _for_many(self, grants: Sequence[Grant]) -> list[Parameter]:
        return self._statements.many([self._key(grant.name) for grant in grants], [grant.owner for grant in grants])

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. One statement for each ttl and thousand."""
        outcomes: dict[str, Renewal] = {}
        by_ttl: dict[float, list[Grant]] = {}
        for grant in grants:
            by_ttl.setdefault(grant.ttl, []).append(grant)
        for ttl, group in by_ttl.items():
            for some in _batches(group):
                outcomes |= await self._renew(some, _microseconds(ttl))
        return [outcomes[grant.owner] for grant in grants]

    async def _renew(self, grants: Sequence[Grant], ttl_us: int) -> dict[str, Renewal]:
        """Renew leases of one ttl."""
        outcomes: dict[str, Renewal] = {}
        alone = [grant for grant in grants if _may_be_alone(grant)]
        if alone:
            parameters = (ttl_us, *self._for_many(alone))
            renewed = (await self._run(self._statements.renew(len(alone)), parameters, urgent=True)).changed
            # If not all were, the rows say which: a lease that had expired does not come back.
            gone = {} if renewed == len(alone) else await self._gone(alone)
            outcomes = {grant.owner: gone.get(grant.owner) or Renewed() for grant in alone}
        owners = self._owners(
            [grant for grant in grants if grant.state is not None and type(outcomes.get(grant.owner)) is not Renewed]
        )

        begun: dict[str, int] = {}

        def ask(row: Row) -> dict[str, Renewal]:
            # From the first reading on, also if `_change` begins anew: what it has written by then stays as it is.
            left_us = begun.setdefault(row.key, row.now_us) + ttl_us - row.now_us
            return {owner: row.state.renew(owner, left_us, row.now_us) for owner in owners[row.key]}

        for shares in (await self._change(list(owners), ask, urgent=True)).values():
            outcomes |= shares
        return outcomes

    async def _gone(self, grants: Sequence[Grant]) -> dict[str, Gone | None]:
        """Say of each owner of an exclusive lease why it does not hold its lock; None if it does."""
        keys = [self._key(grant.name) for grant in grants]
        statement, parameters = self._statements.state(len(keys)), self._statements.many(keys)
        rows = rows_of(keys, await self._run(statement, parameters, urgent=True))
        return {grant.owner: row.gone(grant.owner) for grant, row in zip(grants, rows, strict=True)}

    async def holders(self, name: str) -> Sequence[Holder]:
        row = await self._look(self._key(name))
        if row is None:
            return []
        owner, left_us, token, metadata, metadata_owner = row
        if text(owner) == SHARED:
            found = await self._change_one(name, lambda row: row.state.holders(row.now_us))
            return [replace(one, remaining=(one.remaining or 0) / 1e6, waiters=None) for one in found]
        if owner != metadata_owner:
            return [Holder(text(owner), None, left_us / 1e6)]
        return [Holder(text(owner), token, left_us / 1e6, decode_metadata(metadata), since=granted_at(token))]

    async def _look(self, key: str, answer_by: float = inf) -> tuple[Any, ...] | None:
        rows = (await self._run(self._statements.look, (key,), answer_by=answer_by)).rows
        return rows[0] if rows else None

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        key, mine, ttl_us, metadata = self._parameters(request)
        taking = (mine, ttl_us, metadata, key, owner)
        await self._run(self._statements.take_over, taking, answer_by=request.answer_by)
        # While it has this owner, nobody changes the token. An earlier statement may have put it there: asked again.
        row = await self._look(self._key(request.name), request.answer_by)
        return None if row is None or text(row[0]) != mine else Grant(request.name, request.owner, row[2], request.ttl)

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        parameters = (metadata, self._key(grant.name), grant.owner)
        if _may_be_alone(grant) and (await self._run(self._statements.update, parameters)).changed == 1:
            return None
        if grant.state is None:
            return await self.confirm(grant)  # MariaDB and MySQL do not count a row that has the same metadata already

        def ask(row: Row) -> Gone | None:
            return row.state.update(grant.owner, lambda claim: claim._replace(metadata=metadata), row.now_us)

        return await self._change_one(grant.name, ask)

    async def confirm(self, grant: Grant) -> Gone | None:
        if _may_be_alone(grant):
            gone = (await self._gone([grant]))[grant.owner]
            if gone is None or grant.state is None:
                return gone
        return await self._change_one(grant.name, lambda row: row.gone(grant.owner), urgent=True)

    async def downgrade(self, grant: Grant) -> bool:
        grant.state = "either"  # until there is an answer
        held, _ = await self._change_one(grant.name, lambda row: row.state.downgrade(grant.owner, row.now_us))
        if held:
            grant.state = "share"
        return held

    async def break_lock(self, name: str) -> bool:
        return (await self._run(self._statements.break_lock, (self._key(name),), again=False)).changed == 1

    async def break_permit(self, name: str, slot: int) -> bool:
        held, _ = await self._change_one(name, lambda row: row.state.break_permit(slot, row.now_us), again=False)
        return held

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """
        See `LockBackend.names`: the held rows in the order of their names, by the database's clock.

        On MariaDB and MySQL, names of a space that are too long for their key are not listed: see `row_key`.
        """
        first, end = range_of(prefix, self.database.dialect.name)
        begin = first if after is None else after.next
        statement = self._statements.names if end is None else self._statements.names_below
        rows = (await self._run(statement, (begin, BATCH) if end is None else (begin, BATCH, end))).rows
        # The last row of one page is the first of the next, if it is still held.
        keys = [text(key) for (key,) in rows]
        found = [name_of_key(key) for key in keys if after is None or key != begin]
        names = [name for name in found if name is not None and in_space(name, prefix)]
        last = keys[-1] if len(keys) == BATCH else begin
        return NamesPage(names, last if last != begin else None)

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        rows = (await self._run(self._statements.read_note, (self._key(name),), answer_by=answer_by)).rows
        return Note(text(rows[0][0]), rows[0][1] / 1e6) if rows else None

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        parameters = (text, _microseconds(keep), self._key(grant.name), grant.owner)
        return (await self._run(self._statements.write_note, parameters, answer_by=answer_by)).changed == 1

    async def clock(self) -> float:
        ((now_us,),) = (await self._run(self._statements.clock, ())).rows
        return float(now_us) / 1e6

    def _key(self, name: str) -> str:
        """Give the key of a lock's row: its name, and for what lives apart a key that no lock can have."""
        return row_key(name, self.database.dialect.name)

    async def close(self) -> None:
        """See `LockBackend.close`. It waits for the reaper: a driver with threads answers to an event loop."""
        if self._reaping.under_way:
            await self._reaping.start().wait(CLOSE_SECONDS)
        await self.database.close()

    async def reap(self) -> None:
        """Remove rows that were not used for ``idle_ttl``, and have no note."""
        try:
            while idle := (await self._run(self._statements.idle, (self._idle_us, BATCH))).rows:
                names = [name for (name,) in idle]
                parameters = (self._idle_us, *self._statements.many(names))
                await self._run(self._statements.reap(len(names)), parameters)
        except LockError as error:
            log.debug("could not remove idle rows at %s: %s", self.url, error)

    async def _run(
        self, statement: Statement, parameters: Sequence[Parameter], *, again: bool = True, acquiring: bool = False,
        **how: Any,
    ) -> Result:  # fmt: skip
        """
        See `Database.run`.

        A table that is not there, or was dropped, has no rows; only an acquisition gets `MissingTable`, and makes it.
        """
        try:
            return await self.database.run(statement, parameters, again=again, **how)
        except MissingTable:
            if acquiring:
                raise
            return Result([], 0, 0)

    async def _change_one(self, name: str, ask: Callable[[Row], T], **how: Any) -> T:
        """See `_change`."""
        key = self._key(name)
        return (await self._change([key], ask, **how))[key]

    async def _change(
        self, keys: Sequence[str], ask: Callable[[Row], T], *, again: bool = True, acquiring: bool = False, **how: Any
    ) -> dict[str, T]:
        """
        Read rows, ask each, and write what has changed unless others have changed it meanwhile; then begin anew.

        `again`: the change may be sent twice. For the rest see `_run`. Return the answers by key.
        """
        answers: dict[str, T] = {}
        met = 0
        while keys:
            some = keys[:SHARES_BATCH]
            statement, parameters = self._statements.rows(len(some)), self._statements.many(some)
            rows = rows_of(some, await self._run(statement, parameters, acquiring=acquiring, **how))
            before = [row.content() for row in rows]
            answers |= {row.key: ask(row) for row in rows}
            changes = [row for row, content in zip(rows, before, strict=True) if row.content() != content]
            if not changes or await self._write(changes, again=again, **how):
                keys, met = keys[SHARES_BATCH:], 0
            else:
                met += 1
                await self._runtime.sleep(self._runtime.random.uniform(0.0, met * RETRY_SECONDS))
        return answers

    async def _write(self, rows: Sequence[Row], *, again: bool, **how: Any) -> bool:
        """Write the content of rows; False: another client has changed one meanwhile, or it was not there."""
        new = [row for row in rows if not row.exists]
        for row in new:
            await self._run(self._statements.make_row, (row.key,), **how)
        if new:
            return False
        parameters: list[Parameter] = [int(any(row.has_room for row in rows))]
        for row in rows:
            parameters += [row.key, *row.version, *(row.content() or ())]
        statement = self._statements.change(len(rows))
        return (await self._run(statement, parameters, again=again, **how)).changed == len(rows)


def _may_be_alone(grant: Grant) -> bool:
    return grant.state not in {"share", "alone"}


def _microseconds(ttl: Seconds) -> int:
    """Round a ttl up to whole microseconds."""
    return math.ceil(ttl * 1e6 - 1e-3)


def _batches(grants: Sequence[Grant]) -> Iterable[Sequence[Grant]]:
    return (grants[start : start + BATCH] for start in range(0, len(grants), BATCH))
