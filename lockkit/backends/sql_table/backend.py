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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar

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
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.errors import MissingTable
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
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_table.shares import NO_ROWS, REMARK_SECONDS, Held, Row, Shares, Waiting, rows_of, waiting_of
from lockkit.backends.sql_table.shares import text as _text
from lockkit.backends.sql_table.statements import SHARED, Statements
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.units import Seconds

__all__ = ["CAPABILITIES", "SqlTableBackend", "lock_table"]

log = logging.getLogger("lockkit")

BATCH = 1000
"""Leases renewed by one statement. More makes statements longer, and others wait for more rows at once."""

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
)


class SqlTableBackend(SqlBackend):
    """Processes that reach the same table. One subclass for each kind of database."""

    capabilities = CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    _statements_class: ClassVar[type[Statements]]

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        """Use a database; nothing is sent."""
        super().__init__(database, options, host)
        self.tables = [locks(options["table"])]
        self._auto_create: bool = options["auto_create"]
        self._statements = self._statements_class(self.tables[0].quoted(database.dialect.name), database.dialect.now_us)
        self._shares = Shares(self._run, database.run, self._statements, host.runtime)
        self._idle_us = _microseconds(options["idle_ttl"])
        self._reap_seconds = min(REAP_SECONDS, options["idle_ttl"])
        self._reap_at = 0.0
        self._reaping = SingleRun(host.runtime, "lockkit-sql-reap", self.reap)
        self._ttl_us = (0.0, 0)

    async def try_acquire(self, request: Request) -> Grant | Busy:
        waiting: Waiting | None = request.state
        try:
            outcome = await self._attempt(request)
        except MissingTable as error:
            await self._make_table(error, request.answer_by)
            outcome = await self._attempt(request)
        if type(outcome) is Grant:
            if waiting is not None and waiting.marked_at is not None:
                with suppress(BackendUnavailable):  # then the mark ends by itself
                    await self._shares.unmark(self._key(request.name), request.owner, request.answer_by)
            if self._runtime.random.random() < REAP_SHARE:
                self._reap_soon()
        return outcome

    @abstractmethod
    async def _attempt(self, request: Request) -> Grant | Busy:
        """Try once."""

    def _parameters(self, request: Request) -> tuple[Parameter, ...]:
        """Return those of what takes the lock."""
        return (self._key(request.name), request.owner, self._ttl_of(request), request.metadata)

    def _ttl_of(self, request: Request) -> int:
        ttl, ttl_us = self._ttl_us
        if ttl != request.ttl:
            ttl_us = _microseconds(request.ttl)
            self._ttl_us = (request.ttl, ttl_us)
        return ttl_us

    async def _ask_for_share(self, request: Request, *, want: bool = False) -> Grant | Held:
        found = await self._shares.acquire(request, self._key(request.name), self._ttl_of(request), want=want)
        if isinstance(found, Grant):
            found.name, found.ttl = request.name, request.ttl  # it has the key, and µs
        return found

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
                await self._shares.mark(self._key(request.name), request.owner, request.answer_by)
            left = min(left, REMARK_SECONDS)
        return Busy(left, poll=poll, owner=holder)

    async def _make_table(self, error: MissingTable, answer_by: float) -> None:
        if not self._auto_create:
            message = f"{error}. Create it with lockkit migrate, or keep auto_create on"
            raise ConfigurationError(message, backend=self.url) from error.__cause__
        await create(self.database, self.tables, answer_by)

    async def abandon(self, request: Request) -> None:
        waiting: Waiting | None = request.state
        self._forget(request)
        request.state = waiting  # until all is undone
        name, owner, answer_by = self._key(request.name), request.owner, request.answer_by
        if request.uncertain and request.mode == "exclusive":
            await self._release(name, owner, answer_by, again=True)
        elif request.uncertain:
            await self._shares.release_many({name: [owner]}, answer_by)
        if waiting is not None and waiting.marked_at is not None:
            await self._shares.unmark(name, owner, answer_by)
        request.state = None

    def _forget(self, request: Request) -> None:
        """Leave the place where it is woken."""
        request.state = None

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        name, owner = self._key(grant.name), grant.owner
        if _may_be_alone(grant):
            released = await self._release(name, owner, answer_by, again=False)
            if released or grant.state is None:
                return released
        return await self._shares.release(grant, name, answer_by)

    async def _release(self, name: str, owner: str, answer_by: float, *, again: bool) -> bool:
        result = await self._run(self._statements.release, (name, owner), again=again, answer_by=answer_by)
        return result.changed == 1

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. One statement for each thousand."""
        failed: BackendUnavailable | None = None
        alone = [grant for grant in grants if _may_be_alone(grant)]
        beside = self._owners([grant for grant in grants if grant.state is not None])
        batches = (alone[start : start + BATCH] for start in range(0, len(alone), BATCH))
        for release in (*(partial(self._free, some) for some in batches), partial(self._shares.release_many, beside)):
            try:
                await release(answer_by)
            except BackendUnavailable as error:
                failed = error
        if failed is not None:
            raise failed

    async def _free(self, grants: Sequence[Grant], answer_by: float) -> None:
        statement = self._statements.free(len(grants))
        await self._run(statement, self._for_many(grants), again=True, answer_by=answer_by)

    def _owners(self, grants: Sequence[Grant]) -> dict[str, list[str]]:
        """Return the owners of leases, by key."""
        owners: dict[str, list[str]] = {}
        for grant in grants:
            owners.setdefault(self._key(grant.name), []).append(grant.owner)
        return owners

    def _for_many(self, grants: Sequence[Grant]) -> list[Parameter]:
        return self._statements.many(self._keys(grants), [grant.owner for grant in grants])

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. One statement for each ttl and thousand."""
        outcomes: dict[str, Renewal] = {}
        for group in _grouped(grants):
            outcomes |= await self._renew_group(group)
        return [outcomes[grant.owner] for grant in grants]

    async def _renew_group(self, grants: Sequence[Grant]) -> dict[str, Renewal]:
        """Renew leases of one ttl."""
        outcomes: dict[str, Renewal] = {}
        alone = [grant for grant in grants if _may_be_alone(grant)]
        if alone:
            outcomes |= await self._renew_alone(alone)
        beside = [
            grant for grant in grants
            if grant.state is not None and not isinstance(outcomes.get(grant.owner), Renewed)
        ]  # fmt: skip
        return outcomes | await self._shares.renew(self._owners(beside), _microseconds(grants[0].ttl))

    async def _renew_alone(self, grants: Sequence[Grant]) -> dict[str, Renewal]:
        renewed = await self._renew(_microseconds(grants[0].ttl), grants)
        outcomes: dict[str, Renewal] = {owner: Renewed() for owner in renewed}
        missing = [grant for grant in grants if grant.owner not in outcomes]
        if missing:
            states = await self._states(self._keys(missing))
            outcomes |= {
                grant.owner: states[self._key(grant.name)].gone(grant.owner) or Gone("gone") for grant in missing
            }
        return outcomes

    async def _renew(self, ttl_us: int, grants: Sequence[Grant]) -> Iterable[str]:
        """Renew, and return the owners whose leases were renewed."""
        return [_text(owner) for (owner,) in (await self._run_renewal(ttl_us, grants)).rows]

    async def _run_renewal(self, ttl_us: int, grants: Sequence[Grant]) -> Result:
        statement = self._statements.renew(len(grants))
        return await self._run(statement, (ttl_us, *self._for_many(grants)), again=True, urgent=True)

    async def _states(self, names: Sequence[str]) -> dict[str, Row]:
        statement = self._statements.state(len(names))
        result = await self._run(statement, self._statements.many(names), again=True, urgent=True)
        return {row.name: row for row in rows_of(names, result)}

    async def holders(self, name: str) -> Sequence[Holder]:
        row = await self._look(self._key(name))
        if row is None:
            return []
        if _text(row[0]) == SHARED:
            return await self._shares.holders(self._key(name))
        owner, left_us, token, metadata, metadata_owner = row
        ours = owner == metadata_owner
        if not ours:
            return [Holder(_text(owner), None, left_us / 1e6)]
        return [Holder(_text(owner), token, left_us / 1e6, decode_metadata(metadata), since=granted_at(token))]

    async def _look(self, name: Parameter, answer_by: float = inf) -> tuple[Any, ...] | None:
        rows = (await self._run(self._statements.look, (name,), again=True, answer_by=answer_by)).rows
        return rows[0] if rows else None

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        parameters = (metadata, self._key(grant.name), grant.owner)
        if _may_be_alone(grant) and (await self._run(self._statements.update, parameters, again=True)).changed == 1:
            return None
        if grant.state is not None:
            return await self._shares.update(self._key(grant.name), grant.owner, metadata)
        return await self.confirm(grant)  # MariaDB and MySQL do not count a row that has the same metadata already

    async def confirm(self, grant: Grant) -> Gone | None:
        name, owner = self._key(grant.name), grant.owner
        if _may_be_alone(grant):
            gone = (await self._states([name]))[name].gone(owner)
            if gone is None or grant.state is None:
                return gone
        return await self._shares.confirm(name, owner)

    async def downgrade(self, grant: Grant) -> bool:
        grant.state = "either"  # until there is an answer
        held = await self._shares.downgrade(self._key(grant.name), grant.owner)
        if held:
            grant.state = "share"
        return held

    async def break_lock(self, name: str) -> bool:
        return (await self._run(self._statements.break_lock, (self._key(name),))).changed == 1

    async def break_permit(self, name: str, slot: int) -> bool:
        return await self._shares.break_permit(self._key(name), slot)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """
        See `LockBackend.names`: the held rows in the order of their names, by the database's clock.

        On MariaDB and MySQL, names of a space that are too long for their key are not listed: see `row_key`.
        """
        first, end = range_of(prefix, self.database.dialect.name)
        begin = first if after is None else after.next
        statement = self._statements.names if end is None else self._statements.names_below
        rows = (await self._run(statement, (begin, BATCH) if end is None else (begin, BATCH, end), again=True)).rows
        # The last row of one page is the first of the next, if it is still held.
        keys = [key for row in rows if (key := _key_text(row[0])) is not None and (after is None or key != begin)]
        names = [name for key in keys if (name := name_of_key(key)) is not None and in_space(name, prefix)]
        last = _text(rows[-1][0]) if len(rows) == BATCH else begin
        return NamesPage(names, last if last != begin else None)

    async def read_note(self, name: str) -> Note | None:
        rows = (await self._run(self._statements.read_note, (self._key(name),), again=True)).rows
        return Note(_text(rows[0][0]), rows[0][1] / 1e6) if rows else None

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        parameters = (text, _microseconds(keep), self._key(grant.name), grant.owner)
        result = await self._run(self._statements.write_note, parameters, again=True, answer_by=answer_by)
        return result.changed == 1

    async def clock(self) -> float:
        ((now_us,),) = (await self._run(self._statements.clock, (), again=True)).rows
        return float(now_us) / 1e6

    def _key(self, name: str) -> str:
        """Give the key of a lock's row: its name, and for what lives apart a key that no lock can have."""
        return row_key(name, self.database.dialect.name)

    def _keys(self, grants: Sequence[Grant]) -> list[str]:
        return [self._key(grant.name) for grant in grants]

    async def close(self) -> None:
        """See `LockBackend.close`. It waits for the reaper: a driver with threads answers to an event loop."""
        if self._reaping.under_way:
            await self._reaping.start().wait(CLOSE_SECONDS)
        await self.database.close()

    def _reap_soon(self) -> None:
        """Remove idle rows in the background, now and then."""
        now = self._runtime.now()
        if now >= self._reap_at:
            self._reap_at = now + self._reap_seconds
            self._reaping.start()

    async def reap(self) -> None:
        """Remove rows that were not used for ``idle_ttl``, and have no note."""
        try:
            await self._reap()
        except LockError as error:
            log.debug("could not remove idle rows at %s: %s", self.url, error)

    async def _reap(self) -> None:
        while idle := (await self._run(self._statements.idle, (self._idle_us, BATCH), again=True)).rows:
            names = [name for (name,) in idle]
            parameters = (self._idle_us, *self._statements.many(names))
            await self._run(self._statements.reap(len(names)), parameters, again=True)

    async def _run_for(self, request: Request, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        """Run a statement of an acquisition, which may find that the table is not there."""
        return await self.database.run(statement, parameters, again=True, answer_by=request.answer_by)

    async def _run(
        self,
        statement: Statement,
        parameters: Sequence[Parameter],
        *,
        again: bool = False,
        answer_by: float = inf,
        urgent: bool = False,
    ) -> Result:
        """See `Database.run`. A table that is not there, or was dropped, has no rows: an acquisition makes it."""
        try:
            return await self.database.run(statement, parameters, again=again, answer_by=answer_by, urgent=urgent)
        except MissingTable:
            return NO_ROWS


def _may_be_alone(grant: Grant) -> bool:
    """
    Tell by ``Grant.state`` whether a lease may be an exclusive one.

    - ``share``: it is beside others.
    - ``alone``: nobody else had one when it was granted, so while the row has its token nobody has.
    - ``either``: a downgrade has no answer.
    """
    return grant.state not in {"share", "alone"}


def _key_text(value: str | bytes | bytearray) -> str | None:
    """Read a key; None for one of a foreign client that no lock of lockkit can have."""
    try:
        return value.decode() if isinstance(value, bytes | bytearray) else value
    except UnicodeDecodeError:
        return None


def _microseconds(ttl: Seconds) -> int:
    """Round a ttl up to whole microseconds."""
    return math.ceil(ttl * 1e6 - 1e-3)


def _grouped(grants: Sequence[Grant]) -> Iterable[Sequence[Grant]]:
    """Put leases of one ttl together, at most `BATCH` of them."""
    by_ttl: dict[float, list[Grant]] = {}
    for grant in grants:
        by_ttl.setdefault(grant.ttl, []).append(grant)
    for group in by_ttl.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]
