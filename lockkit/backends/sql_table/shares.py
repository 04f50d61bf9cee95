"""What a backend does with readers and permits: see `lockkit.backends.sql_table.share_statements`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal

from lockkit.backend import Gone, Grant, Holder, Mode, Renewal, Renewed, Request, decode_metadata, granted_at
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_table.share_statements import SHARED, ShareStatements
from lockkit.units import Instant
from lockkit.validation import decode_json

MARK_SECONDS = 5.0
"""How long a waiting writer stops new readers if it does not say so again, seconds. Longer stops them for longer when
the writer has died; shorter lets readers in before a writer whose machine is busy."""

REMARK_SECONDS = 2.0
"""How often it says so again, seconds."""

CROWDED_SECONDS = 1.0
"""For how long a client uses the dearer statement at once where it has found leases of others, seconds. Longer goes on
with it when they have gone; shorter asks in vain more often whether they have."""

SHARES_CHARS_MAX = 16 * 1024 * 1024
"""Longest text of the shares of one lock: what a MEDIUMTEXT column of MariaDB holds."""

CROWDED_MAX = 1000
"""Names for which a client remembers that. More takes memory; fewer asks in vain more often."""

GrantState = Literal["share", "either"]
"""`Grant.state` of a lease beside others; ``either`` while a downgrade has no answer."""


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
        """Nothing yet."""
        self.connection: object = None
        self.marked_at: float | None = None
        self.seen_held = False


def waiting_of(request: Request) -> Waiting:
    """Return what a request that waits has left elsewhere."""
    if request.state is None:
        request.state = Waiting()
    waiting: Waiting = request.state
    return waiting


class Shares:
    """The readers and permits in one table."""

    def __init__(self, run: Callable[..., Awaitable[Result]], statements: ShareStatements) -> None:
        """Use a table."""
        self._run = run
        self._statements = statements
        self._crowded: dict[str, float] = {}

    def alone(self, side: Mode, name: str, now: Instant) -> Statement | None:
        """Return the statement for a lease that nobody else has one beside, unless there was one just now."""
        statement = None if side == "exclusive" else self._statements.acquire_alone.get(side)
        if statement is None or now < self._crowded.get(name, 0.0):
            return None
        return statement

    def found_crowded(self, name: str, now: Instant) -> None:
        """Remember that others had leases."""
        self._crowded.pop(name, None)
        while len(self._crowded) >= CROWDED_MAX:
            self._crowded.pop(next(iter(tuple(self._crowded)), ""), None)  # a copy: threads add others meanwhile
        self._crowded[name] = now + CROWDED_SECONDS

    async def release_one(self, name: str, owner: str, now: Instant, answer_by: float) -> bool:
        """Release a lease, once; return whether it was held."""
        statement = self._statements.free_alone
        if statement is not None and now >= self._crowded.get(name, 0.0):
            if (await self._run(statement, (name, owner), answer_by=answer_by)).changed:
                return True
            self.found_crowded(name, now)
        return bool(await self.release([name], [owner], answer_by, again=False))

    async def release(self, names: Sequence[str], owners: Sequence[str], answer_by: float, *, again: bool) -> int:
        """Release leases; return how many rows were changed."""
        statement = self._statements.free(len(names))
        parameters = self._statements.many(names, owners)
        return (await self._run(statement, parameters, again=again, answer_by=answer_by)).changed

    async def renew(self, ttl_us: int, grants: Sequence[Grant], key: Callable[[str], str]) -> dict[str, Renewal]:
        """Renew leases of one ttl."""
        names = [key(grant.name) for grant in grants]
        statement = self._statements.renew(len(grants))
        owners = [grant.owner for grant in grants]
        await self._run(statement, (ttl_us, *self._statements.many(names, owners)), again=True, urgent=True)
        # Which of them were renewed: the leases that the rows still have.
        rows = await self._rows(names)
        return {grant.owner: rows[name].outcome(grant.owner) for name, grant in zip(names, grants, strict=True)}

    async def confirm(self, name: str, owner: str) -> Gone | None:
        """Say why a lease is not held; None if it is."""
        outcome = (await self._rows([name]))[name].outcome(owner)
        return outcome if isinstance(outcome, Gone) else None

    async def _rows(self, names: Sequence[str]) -> dict[str, _Row]:
        statement = self._statements.state(len(names))
        result = await self._run(statement, self._statements.many(names), again=True, urgent=True)
        found = {text(row[0]): _Row(*row[1:]) for row in result.rows}
        return {name: found.get(name) or _Row(None, 1, None, None, 0) for name in names}

    async def holders(self, name: str) -> Sequence[Holder]:
        """Return the holders of a lock that is held by readers or permits; none if it is not."""
        return (await self._rows([name]))[name].holders()

    async def update(self, parameters: Sequence[Parameter]) -> bool:
        """See `LockBackend.update`; return whether a row was changed."""
        return (await self._run(self._statements.update, parameters, again=True)).changed == 1

    async def write_note(self, parameters: Sequence[Parameter], answer_by: float) -> bool:
        result = await self._run(self._statements.write_note, parameters, again=True, answer_by=answer_by)
        return result.changed == 1

    async def downgrade(self, name: str, owner: str) -> bool:
        """Make a share of an exclusive lease, once or again; return whether it is one."""
        if (await self._run(self._statements.downgrade, (name, owner), again=True)).changed:
            return True
        return await self.confirm(name, owner) is None

    async def mark(self, name: str, owner: str, answer_by: float) -> None:
        """Have a waiting writer stop new readers."""
        parameters = (name, owner, int(MARK_SECONDS * 1e6))
        await self._run(self._statements.mark, parameters, again=True, answer_by=answer_by)

    async def unmark(self, name: str, owner: str, answer_by: float) -> None:
        """Have it no longer do so."""
        await self._run(self._statements.unmark, (name, owner), again=True, answer_by=answer_by)


class _Row:
    """What a row says of its shares."""

    __slots__ = ("_broken", "_holder", "_now", "_shares")

    def __init__(self, owner: Any, expired: object, broken: Any, shares: Any, now: int) -> None:  # noqa: ANN401 - by driver
        self._holder = "" if expired else text(owner)
        self._broken = text(broken) == SHARED and self._holder != SHARED
        self._shares = _decoded(shares)
        self._now = now

    def outcome(self, owner: str) -> Renewal:
        share = self._shares.get(owner)
        if self._holder == SHARED:
            return Renewed() if share is not None and share["e"] > self._now else Gone("gone")
        if share is not None and self._broken:
            return Gone("broken")
        return Gone("taken" if self._holder else "gone")

    def holders(self) -> Sequence[Holder]:
        if self._holder != SHARED:
            return []
        return [
            Holder(
                owner, share["t"], (share["e"] - self._now) / 1e6, decode_metadata(share["m"]),
                mode="shared" if share["p"] is None else "permit", slot=share["p"], since=granted_at(share["t"]),
            )
            for owner, share in self._shares.items()
            if share["e"] > self._now
        ]  # fmt: skip


def _decoded(shares: Any) -> Mapping[str, Any]:  # noqa: ANN401 - some drivers read JSON themselves
    """Read the column; what lockkit cannot have written there, by its types, is left out."""
    if not isinstance(shares, dict):
        try:
            shares = decode_json(shares or "{}", SHARES_CHARS_MAX)
        except ValueError:
            return {}
    return {
        owner: share
        for owner, share in (shares.items() if isinstance(shares, dict) else ())
        if isinstance(share, dict)
        and [type(share.get(key)) for key in "te"] == [int, int]
        and isinstance(share.get("m"), str | None)
        and type(share.get("p")) in {int, NoneType}
    }


def text(value: str | bytes | bytearray | None) -> str:
    """Read a name or owner; a foreign client may have written anything."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else value or ""
