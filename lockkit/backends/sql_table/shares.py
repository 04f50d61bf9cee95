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
from collections.abc import Sequence
from math import inf
from types import NoneType
from typing import Any, NamedTuple

from lockkit.backend import Gone, Grant, Mode, Request
from lockkit.backends.lock_state import Lease, LockState
from lockkit.backends.sql.connection import Parameter, Result
from lockkit.backends.sql_table.statements import SHARED
from lockkit.validation import decode_json

SHARES_CHARS_MAX = 16 * 1024 * 1024
"""Longest text of the shares of one lock: what a MEDIUMTEXT column of MariaDB holds."""


class Held(NamedTuple):
    """Why a lock cannot be had."""

    owner: str  # its holder; `SHARED` if there may be several
    left_us: int  # after so many µs it may be had
    alien: bool = False  # a foreign client holds it, which notifies nobody
    token: int = 0  # of a holder that is alone; 0: it is not


class Claim(NamedTuple):
    """See `lockkit.backends.lock_state.Claim`; here all times are µs."""

    owner: str
    ttl: int = 0
    metadata: str = "{}"
    mode: Mode = "exclusive"
    limit: int = 1


class Row:
    """A row of the lock table, as it was read."""

    def __init__(self, key: str, values: Sequence[Any] | None = None) -> None:
        self.key = key  # its name in the table
        self.exists = values is not None  # in the table
        owner, metadata, metadata_owner, broken, writer, *rest = values or (None, None, None, None, None, *[0] * 6)
        # `now_us` is the database's clock when the row was read.
        token, expires_us, self._writer_until_us, wanted, shares, self.now_us = rest
        # What must not have changed when it is written: see `Statements`.
        self.version: tuple[Parameter, ...] = (token, expires_us, self._writer_until_us, int(wanted), text(shares))
        self.wanted = bool(wanted)  # a release must notify waiters
        self.alien = owner != metadata_owner  # a foreign client holds the lock
        self.state: LockState[Claim] = LockState(token)  # what it says, without leases that have ended
        found, holder = _decoded(text(shares)), text(owner)
        if holder == SHARED and found:
            self.state.leases = {each: lease for each, lease in found.items() if lease.until > self.now_us}
        elif holder and expires_us > self.now_us:
            self.state.leases[holder] = Lease(Claim(holder, metadata=text(metadata) or "{}"), expires_us, token)
        if holder != SHARED:
            self.state.broken = tuple(found) if text(broken) == SHARED else (text(broken),)
        if self._writer_until_us > self.now_us:
            self.state.queue = [Claim(text(writer))]
        self.state.until = inf if self.state.leases else self._writer_until_us
        self._before = inf if self.state.alone else len(self.state.leases)

    def gone(self, owner: str) -> Gone | None:
        """Say why an owner does not hold the lock; None if it does."""
        return self.state.confirm(owner, self.now_us)

    @property
    def has_room(self) -> bool:
        """Whether a lease has ended, or goes on as a reader's: waiters may have the lock now."""
        return self.state.alone is None and len(self.state.leases) < self._before

    def acquire(self, request: Request, ttl_us: int) -> Grant | Held:
        """Take a lease for an owner that may have one already: the answer was lost."""
        state = self.state
        state.leases.pop(request.owner, None)
        if not state.leases:
            state.until = self._writer_until_us
        free = not state.leases
        claim = Claim(request.owner, ttl_us, request.metadata, request.mode, request.limit)
        outcome, _ = state.acquire(request.name, claim, self.now_us, token_min=self.now_us, queue=False)
        if isinstance(outcome, Grant):
            self.wanted = self.wanted and not free
            outcome.ttl, outcome.state = request.ttl, "alone" if free else "share"
            return outcome
        if state.alone is not None:
            return Held(state.alone.claim.owner, int(state.alone.until) - self.now_us, self.alien)
        ends = [lease.until for lease in state.leases.values()] if claim.mode == "permit" else [self._writer_until_us]
        return Held(SHARED, int(min(ends)) - self.now_us)

    def content(self) -> tuple[Parameter, ...] | None:
        """Return what the state writes: owner, token, expires_at_us, wanted, shares; None if a holder is alone."""
        if self.state.alone is not None:
            return None
        shares = {
            owner: {"o": owner, "t": lease.token, "e": lease.until, "p": lease.slot, "m": lease.claim.metadata}
            for owner, lease in self.state.leases.items()
        }
        end = int(max((lease.until for lease in self.state.leases.values()), default=0))
        packed = json.dumps(shares, separators=(",", ":")) if shares else None
        return (SHARED if shares else None, self.state.token, end, int(self.wanted), packed)


def rows_of(keys: Sequence[str], result: Result) -> list[Row]:
    """Read the answer to `Statements.rows` or `Statements.state`."""
    values = {text(row[0]): row[1:] for row in result.rows}
    return [Row(key, values.get(key)) for key in keys]


def _decoded(written: str) -> dict[str, Lease[Claim]]:
    """Read the column; what lockkit cannot have written there, by its types, is left out."""
    try:
        found = decode_json(written or "{}", SHARES_CHARS_MAX)
    except ValueError:
        return {}
    shares: dict[str, Lease[Claim]] = {}
    for owner, one in found.items() if isinstance(found, dict) else ():
        if not isinstance(one, dict) or [type(one.get(key)) for key in "te"] != [int, int]:
            continue
        slot, metadata = one.get("p"), one.get("m")
        if type(slot) in {int, NoneType} and isinstance(metadata, str | None):
            claim = Claim(owner, metadata=metadata or "{}")
            shares[owner] = Lease(claim, one["e"], one["t"], "shared" if slot is None else "permit", slot)
    return shares


def text(value: Any) -> str:  # noqa: ANN401 - by driver
    """Read a name, an owner or JSON; a foreign client may have written anything."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else value or ""
