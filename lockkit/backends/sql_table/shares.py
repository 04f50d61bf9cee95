"""
Readers and permits: leases beside one another, on one row of the lock table.

All of them are in the row's column ``shares``, a JSON object by owner: token t, end e, slot p, metadata m. While there
is one, the row has the owner `SHARED`, and ``expires_at_us`` is the latest end of them: so the same statement as ever
refuses an exclusive lock, also that of an older version or of a foreign client.

The client reads the row with the database's clock, lets `LockState` decide, as the file backend does, and writes what
has changed if the row is still as it was read; otherwise it begins anew. One of those that meet always gets through,
and a lease that ends by the clock of the reading ends no later than its holder believes, who counts from before that.

A writer that waits for readers, or on a read/write lock for another writer, writes itself and the end of its *mark*
into ``writer`` and ``writer_until_us``. To `LockState` it is the head of the queue until then: no reader gets in. The
writer repeats the mark while it waits, and its grant ends it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lockkit.backend import Gone, Grant, Holder, Mode, Renewal, Request
from lockkit.backends.lock_state import LockState, Share
from lockkit.backends.sql.statement import Parameter, Result
from lockkit.backends.sql_table.statements import SHARED, Statements
from lockkit.runtime import Runtime
from lockkit.validation import decode_json

T = TypeVar("T")
Run: TypeAlias = Callable[..., Awaitable[Result]]

MARK_SECONDS = 5.0
"""How long a waiting writer stops new readers if it does not say so again, seconds. Longer stops them for longer when
the writer has died; shorter lets readers in before a writer whose machine is busy."""

REMARK_SECONDS = 2.0
"""How often it says so again, seconds."""

RETRY_SECONDS = 0.002
"""Longest pause after another client has changed the row meanwhile, for each time, seconds. Longer delays the call,
shorter meets the same clients again."""

BATCH = 100
"""Rows that are changed by one statement. More makes it longer: it compares each row with each name."""

SHARES_CHARS_MAX = 16 * 1024 * 1024
"""Longest text of the shares of one lock: what a MEDIUMTEXT column of MariaDB holds."""

NO_ROWS = Result([], 0, 0)


class Waiting:
    """
    `Request.state`: what a request that waits has left elsewhere.

    Attributes:
        connection: Where it is woken.
        marked_at: When it stopped new readers, client monotonic time; None if it has not.
        seen_held: It found the lock held, so it only looks until that is free.
    """

    __slots__ = ("connection", "marked_at", "seen_held")

    def __init__(self) -> None:
        self.connection: object = None
        self.marked_at: float | None = None
        self.seen_held = False


def waiting_of(request: Request) -> Waiting:
    """Return what a request that waits has left elsewhere."""
    if request.state is None:
        request.state = Waiting()
    waiting: Waiting = request.state
    return waiting


class Held(NamedTuple):
    """
    Why a lock cannot be had.

    Attributes:
        owner: Its holder; `SHARED` if there may be several.
        left_us: After so many µs it may be had.
        alien: A foreign client holds it, which notifies nobody.
        token: Of a holder that is alone; 0: it is not.
    """

    owner: str
    left_us: int
    alien: bool = False
    token: int = 0


class _Claim(NamedTuple):
    """See `lockkit.backends.lock_state.Claim`; here all times are µs."""

    owner: str
    ttl: int = 0
    metadata: str = "{}"
    mode: Mode = "exclusive"
    limit: int = 1


class Row:
    """
    A row of the lock table, as it was read.

    Attributes:
        name: Its key.
        state: What it says, without leases that have ended.
        now_us: The database's clock when it was read.
        exists: It is in the table.
        wanted: A release must notify waiters.
        alien: A foreign client holds the lock.
        version: What must not have changed when it is written: see `Statements`.
    """

    def __init__(self, name: str, values: Sequence[Any] | None = None) -> None:
        self.name = name
        self.exists = values is not None
        owner, metadata, metadata_owner, broken, writer, *rest = values or (None, None, None, None, None, *[0] * 6)
        token, expires_us, self._writer_until_us, wanted, shares, self.now_us = rest
        self.version: tuple[Parameter, ...] = (token, expires_us, self._writer_until_us, int(wanted), text(shares))
        self.wanted = bool(wanted)
        self.alien = owner != metadata_owner
        self.state: LockState[_Claim] = LockState(token)
        found, holder = _decoded(text(shares)), text(owner)
        if holder == SHARED and found:
            self.state.shares = {each: share for each, share in found.items() if share.until > self.now_us}
        elif holder and expires_us > self.now_us:
            self.state.holder = _Claim(holder, metadata=text(metadata) or "{}")
        if holder != SHARED:
            self.state.broken = tuple(found) if text(broken) == SHARED else (text(broken),)
        if self._writer_until_us > self.now_us:
            self.state.queue = [_Claim(text(writer))]
        self.state.until = expires_us if self.state.holder else inf if self.state.shares else self._writer_until_us
        self._before = (self.state.holder is not None, len(self.state.shares), self._permits_count)

    def gone(self, owner: str) -> Gone | None:
        """Say why an owner does not hold the lock; None if it does."""
        return self.state.confirm(owner, self.now_us)

    @property
    def _permits_count(self) -> int:
        return sum(share.slot is not None for share in self.state.shares.values())

    @property
    def has_room(self) -> bool:
        """Whether waiters may have the lock now. Of several readers one that goes makes room for nobody."""
        alone, shares_count, permits_count = self._before
        if self._permits_count < permits_count or (alone and self.state.holder is None):
            return True
        return shares_count > 0 and not self.state.shares

    def acquire(self, claim: _Claim) -> Grant | Held:
        """Take a lease for an owner that may have one already: the answer was lost."""
        state = self.state
        state.shares.pop(claim.owner, None)
        if not state.shares and state.until == inf:
            state.until = self._writer_until_us
        free = state.holder is None and not state.shares
        outcome, _ = state.acquire(self.name, claim, self.now_us, token_min=self.now_us, queue=False)
        if isinstance(outcome, Grant):
            self.wanted = self.wanted and not free
            outcome.state = "alone" if free else "share"
            return outcome
        if state.holder is not None:
            return Held(state.holder.owner, int(state.until) - self.now_us, self.alien)
        ends = [share.until for share in state.shares.values()] if claim.mode == "permit" else [self._writer_until_us]
        return Held(SHARED, int(min(ends)) - self.now_us)

    def content(self) -> tuple[Parameter, ...] | None:
        """Return what the state writes: owner, token, expires_at_us, wanted, shares; None if a holder is alone."""
        if self.state.holder is not None:
            return None
        shares = {
            owner: {"o": owner, "t": share.token, "e": share.until, "p": share.slot, "m": share.claim.metadata}
            for owner, share in self.state.shares.items()
        }
        end = int(max((share.until for share in self.state.shares.values()), default=0))
        packed = json.dumps(shares, separators=(",", ":")) if shares else None
        return (SHARED if shares else None, self.state.token, end, int(self.wanted), packed)


class Shares:
    """
    The readers and permits in one table.

    Args:
        run: As `Database.run`; a table that is not there has no rows.
        acquire: The same, but it raises `MissingTable`.
        statements: On the table.
        runtime: The client's.
    """

    def __init__(self, run: Run, acquire: Run, statements: Statements, runtime: Runtime) -> None:
        self._run = run
        self._acquire = acquire
        self._statements = statements
        self._runtime = runtime

    async def acquire(self, request: Request, name: str, ttl_us: int, *, want: bool) -> Grant | Held:
        """Try once. With `want`, the row is marked if it is held: its release notifies. Raises `MissingTable`."""
        claim = _Claim(request.owner, ttl_us, request.metadata, request.mode, request.limit)
        answer_by = request.answer_by
        while True:
            asking = self._change([name], lambda row: (row.acquire(claim), row), answer_by=answer_by, acquiring=True)
            outcome, row = (await asking)[name]
            if isinstance(outcome, Grant) or not want or row.wanted:
                return outcome
            if (await self._run(self._statements.want, (name, *row.version), again=True, answer_by=answer_by)).changed:
                return outcome

    async def release(self, grant: Grant, name: str, answer_by: float) -> bool:
        """Release a lease, once; return whether it was held."""
        if grant.state == "alone":
            statement, parameters = self._statements.free_alone, (name, grant.token)
            if (await self._run(statement, parameters, answer_by=answer_by)).changed:
                return True
        ask = partial(_release, {name: [grant.owner]})
        return (await self._change([name], ask, again=False, answer_by=answer_by))[name][0]

    async def release_many(self, owners: Mapping[str, Sequence[str]], answer_by: float) -> None:
        """Release leases, by name."""
        await self._change(list(owners), partial(_release, owners), answer_by=answer_by)

    async def break_permit(self, name: str, slot: int) -> bool:
        return (await self._change([name], lambda row: row.state.break_permit(slot, row.now_us), again=False))[name][0]

    async def renew(self, owners: Mapping[str, Sequence[str]], ttl_us: int) -> dict[str, Renewal]:
        """Renew leases of one ttl, by name; return the outcomes by owner."""

        def ask(row: Row) -> dict[str, Renewal]:
            return {owner: row.state.renew(owner, ttl_us, row.now_us) for owner in owners[row.name]}

        outcomes = await self._change(list(owners), ask, urgent=True)
        return {owner: outcome for each in outcomes.values() for owner, outcome in each.items()}

    async def confirm(self, name: str, owner: str) -> Gone | None:
        """Say why a lease is not held; None if it is."""
        return (await self._change([name], lambda row: row.gone(owner), urgent=True))[name]

    async def holders(self, name: str) -> Sequence[Holder]:
        """Return the holders of a lock that is held by readers or permits."""
        found = (await self._change([name], lambda row: row.state.holders(row.now_us)))[name]
        return [replace(one, remaining=(one.remaining or 0) / 1e6, waiters=None) for one in found]

    async def update(self, name: str, owner: str, metadata: str) -> Gone | None:
        """See `LockBackend.update`."""

        def ask(row: Row) -> Gone | None:
            return row.state.update(owner, lambda claim: claim._replace(metadata=metadata), row.now_us)

        return (await self._change([name], ask))[name]

    async def downgrade(self, name: str, owner: str) -> bool:
        """Make a share of an exclusive lease, once or again; return whether it is one."""
        return (await self._change([name], lambda row: row.state.downgrade(owner, row.now_us)))[name][0]

    async def mark(self, name: str, owner: str, answer_by: float) -> None:
        """Have a waiting writer stop new readers."""
        parameters = (name, owner, int(MARK_SECONDS * 1e6))
        await self._run(self._statements.mark, parameters, again=True, answer_by=answer_by)

    async def unmark(self, name: str, owner: str, answer_by: float) -> None:
        """Have it no longer do so."""
        await self._run(self._statements.unmark, (name, owner), again=True, answer_by=answer_by)

    async def _change(
        self,
        names: Sequence[str],
        ask: Callable[[Row], T],
        *,
        again: bool = True,
        answer_by: float = inf,
        urgent: bool = False,
        acquiring: bool = False,
    ) -> dict[str, T]:
        """
        Read rows, ask each, and write what has changed unless others have changed it meanwhile; then begin anew.

        Return the answers by name. `again`: the change may be sent twice. `acquiring`: a missing table is an error.
        """
        answers: dict[str, T] = {}
        met = 0
        while names:
            rows = await self._read(names[:BATCH], answer_by=answer_by, urgent=urgent, acquiring=acquiring)
            before = [row.content() for row in rows]
            answers |= {row.name: ask(row) for row in rows}
            changes = [row for row, content in zip(rows, before, strict=True) if row.content() != content]
            if await self._write(changes, again=again, answer_by=answer_by, urgent=urgent):
                names, met = names[BATCH:], 0
            else:
                met += 1
                await self._runtime.sleep(self._runtime.random.uniform(0.0, met * RETRY_SECONDS))
        return answers

    async def _read(self, names: Sequence[str], *, answer_by: float, urgent: bool, acquiring: bool) -> list[Row]:
        statement, parameters = self._statements.rows(len(names)), self._statements.many(names)
        run = self._acquire if acquiring else self._run
        result = await run(statement, parameters, again=True, answer_by=answer_by, urgent=urgent)
        return rows_of(names, result)

    async def _write(self, rows: Sequence[Row], *, again: bool, answer_by: float, urgent: bool) -> bool:
        """Write the content of rows; False: another client has changed one meanwhile, or it was not there."""
        new = [row for row in rows if not row.exists]
        for row in new:
            await self._run(self._statements.make_row, (row.name,), again=True, answer_by=answer_by)
        if new or not rows:
            return not rows
        parameters: list[Parameter] = [int(any(row.has_room for row in rows))]
        for row in rows:
            parameters += [row.name, *row.version, *(row.content() or ())]
        statement = self._statements.change(len(rows))
        result = await self._run(statement, parameters, again=again, answer_by=answer_by, urgent=urgent)
        return result.changed == len(rows)


def rows_of(names: Sequence[str], result: Result) -> list[Row]:
    """Read the answer to `Statements.rows` or `Statements.state`."""
    values = {text(row[0]): row[1:] for row in result.rows}
    return [Row(name, values.get(name)) for name in names]


def _release(owners: Mapping[str, Sequence[str]], row: Row) -> list[bool]:
    return [row.state.release(owner, row.now_us)[0] for owner in owners[row.name]]


def _decoded(written: str) -> dict[str, Share[_Claim]]:
    """Read the column; what lockkit cannot have written there, by its types, is left out."""
    try:
        found = decode_json(written or "{}", SHARES_CHARS_MAX)
    except ValueError:
        return {}
    shares: dict[str, Share[_Claim]] = {}
    for owner, one in found.items() if isinstance(found, dict) else ():
        if not isinstance(one, dict) or [type(one.get(key)) for key in "te"] != [int, int]:
            continue
        slot, metadata = one.get("p"), one.get("m")
        if type(slot) in {int, NoneType} and isinstance(metadata, str | None):
            claim = _Claim(owner, metadata=metadata or "{}", mode="shared" if slot is None else "permit")
            shares[owner] = Share(claim, one["e"], one["t"], slot)
    return shares


def text(value: Any) -> str:  # noqa: ANN401 - by driver
    """Read a name, an owner or JSON; a foreign client may have written anything."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else value or ""
