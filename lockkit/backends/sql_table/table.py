"""
Option ``mode=table``: what each kind of database adds to `lockkit.backends.sql_table.backend`.

On PostgreSQL a release notifies waiting clients by NOTIFY (`lockkit.backends.sql.wakeup`), if one of them has marked
the row. Elsewhere, behind a pooler that lends out sessions, and while a foreign client holds the lock, waiters poll
with growing, jittered pauses (`lockkit.backends.sql_table.pace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any

from lockkit import validation
from lockkit.backend import Busy, Grant, Host, Option, Request
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.statement import Parameter, Statement
from lockkit.backends.sql.wakeup import WakeupListener
from lockkit.backends.sql_table.backend import CAPABILITIES, OPTIONS, SqlTableBackend
from lockkit.backends.sql_table.pace import Pace, Paces
from lockkit.backends.sql_table.share_statements import (
    SHARED,
    SLOTS,
    MysqlShareStatements,
    PostgresqlShareStatements,
    SqliteShareStatements,
)
from lockkit.backends.sql_table.shares import Waiting, text, waiting_of
from lockkit.backends.sql_table.statements import MysqlStatements, PostgresqlStatements, SqliteStatements
from lockkit.units import Instant

LOOKS_MAX = 5
"""How often one attempt retries on a lock that changes hands all the time before it reports it as busy."""

LEISURE_SECONDS = 1.0
"""Where nothing wakes waiters, a client lets others take a lock that it has just released if its caller still has so
much time, seconds. Longer lets callers with a timeout take it again at once; shorter could use up the timeout."""


class PostgresqlTable(SqlTableBackend):
    """PostgreSQL: waiters are woken."""

    capabilities = replace(CAPABILITIES, wakeup="push")
    _dialect = "postgresql"
    _statements_class = PostgresqlStatements
    _statements: PostgresqlStatements
    _share_statements_class = PostgresqlShareStatements
    _share_statements: PostgresqlShareStatements

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        """Use a database; nothing is sent."""
        super().__init__(database, options, host)
        self._listener = WakeupListener(host.runtime, database, self.tables[0].name)

    async def _attempt(self, request: Request, parameters: tuple[Parameter, ...]) -> Grant | Busy:
        granted = None if request.mode == "exclusive" else await self._try_alone(request, parameters)
        if granted is not None:
            return granted
        listener = self._listener
        for _ in range(LOOKS_MAX):
            listening = self._listen(request)
            statement = self._acquiring_or_waiting(request) if listening else self._acquiring(request)
            rows = (await self._run_for(request, statement, parameters)).rows
            if not rows:
                continue
            token, owner, left_us, alien, settled, *slot = rows[0]
            if token is not None:
                self._forget(request)
                return self._granted(request, token, *slot)
            if not settled:
                continue
            if listening or not request.queue or listener.cannot_listen:
                return await self._busy(request, owner, left_us / 1e6, poll=alien or not listening)
            await listener.open(request.answer_by)
        return Busy(0.0, poll=True)

    async def _ask(self, request: Request, statement: Statement, parameters: tuple[Parameter, ...]) -> Grant | None:
        rows = (await self._run_for(request, statement, parameters)).rows
        return self._granted(request, rows[0][0], rows[0][5]) if rows else None

    def _acquiring_or_waiting(self, request: Request) -> Statement:
        """Choose the statement for a request that is woken."""
        if request.mode != "exclusive":
            return self._share_statements.acquire_or_wait[request.mode]
        if request.state.marked_at is not None:
            return self._statements.acquire_of_writer_or_wait
        return self._statements.acquire_or_wait

    def _listen(self, request: Request) -> bool:
        """Have a request that may wait woken; return whether it will be."""
        listener = self._listener
        connection = listener.connection if request.queue else None
        if connection is None:
            return False
        waiting = waiting_of(request)
        if waiting.connection is not connection:
            waiting.connection = connection
            listener.expect(request, self._key(request.name))
        return True

    def _forget(self, request: Request) -> None:
        waiting: Waiting | None = request.state
        request.state = None
        if waiting is not None and waiting.connection is not None:
            self._listener.forget(request, self._key(request.name))

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        # The connection may have ended since the row was marked: retry at once, which listens anew.
        waiting: Waiting | None = request.state
        connection = None if waiting is None else waiting.connection
        if connection is not None and connection is self._listener.connection:
            await super().wait(request, busy, until)

    async def close(self) -> None:
        await self._listener.close()
        await super().close()


class _PollingTable(SqlTableBackend):
    """A database that cannot notify waiters: they poll."""

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        """Use a database; nothing is sent."""
        super().__init__(database, options, host)
        self._paces = Paces()

    async def _attempt(self, request: Request, parameters: tuple[Parameter, ...]) -> Grant | Busy:
        waiting: Waiting | None = request.state
        pace = self._paces.find(self._key(request.name), self._runtime.now()) if request.mode == "exclusive" else None
        if pace is not None and waiting is None and self._lets_others_go_first(request, pace):
            waiting_of(request)
            return Busy(pace.pause(self._runtime.random.uniform), poll=True)
        outcome = await self._ask_or_look(request, parameters)
        if isinstance(outcome, Grant):
            request.state = None
            if pace is not None:
                pace.granted(outcome.token, self._runtime.now())
        return outcome

    def _lets_others_go_first(self, request: Request, pace: Pace) -> bool:
        """Tell whether this client has just released the lock. A caller with little time is not kept waiting."""
        now = self._runtime.now()
        return request.queue and pace.just_released(now) and request.answer_by >= now + LEISURE_SECONDS

    async def _ask_or_look(self, request: Request, parameters: tuple[Parameter, ...]) -> Grant | Busy:
        # A request that found the lock held only reads until it is free: that neither writes nor waits for writers.
        waiting: Waiting | None = request.state
        if waiting is None or not waiting.seen_held or await self._look_for(request, parameters) is None:
            granted = None if request.mode == "exclusive" else await self._try_alone(request, parameters)
            granted = granted or await self._ask(request, self._acquiring(request), parameters)
            if granted is not None:
                return granted
        found = await self._look_for(request, parameters)
        if isinstance(found, Grant):
            return found
        if request.queue:
            waiting_of(request).seen_held = True
        if found is None:  # released since: ask again soon
            return Busy(0.0, poll=True)
        owner, left_us, token = found
        left = left_us / 1e6
        if token and request.queue:
            left = min(left, self._until_next_look(request, token))
        return await self._busy(request, owner, left, poll=True)

    def _until_next_look(self, request: Request, token: int) -> float:
        """Return after how many seconds to look again for a lock that changes hands; without limit if it does not."""
        name, now = self._key(request.name), self._runtime.now()
        pace = self._paces.find(name, now) or self._paces.begin(name)
        return pace.pause(self._runtime.random.uniform) if pace.found(token, now) else inf

    async def _release(self, name: str, owner: str, answer_by: float, *, again: bool) -> bool:
        released = await super()._release(name, owner, answer_by, again=again)
        pace = self._paces.find(name, self._runtime.now())
        if pace is not None:
            pace.released_at = self._runtime.now()
        return released

    async def _look_for(self, request: Request, parameters: Sequence[Parameter]) -> Grant | tuple[str, int, int] | None:
        """
        Look who holds the lock, for how many µs, and since which token (0: it is not alone); None if it can be had.

        A grant: the answer did not say so. MariaDB returns no last id if the table has a trigger that writes.
        """
        if request.mode == "exclusive":
            row = await self._look(parameters[0], request.answer_by)
            if row is None:
                return None
            holder = text(row[0])
            return self._granted(request, row[2]) if holder == request.owner else (holder, row[1], row[2])
        name, owner, _, _, *limit = parameters
        statement = self._share_statements.look[request.mode]
        rows = (await self._run_for(request, statement, (name, owner, *limit))).rows
        if not rows:
            return None
        left_us, token, slot = rows[0]
        return (SHARED, left_us, 0) if token is None else self._granted(request, token, slot)


class MysqlTable(_PollingTable):
    """MariaDB and MySQL."""

    _dialect = "mysql"
    _statements_class = MysqlStatements
    _share_statements_class = MysqlShareStatements

    async def _ask(self, request: Request, statement: Statement, parameters: tuple[Parameter, ...]) -> Grant | None:
        answer = (await self._run_for(request, statement, parameters)).last_id
        if not answer:
            return None
        if request.mode == "exclusive":
            return self._granted(request, answer)
        token, slot = divmod(answer, SLOTS)
        return self._granted(request, token, slot if request.mode == "permit" else None)

    async def _renew(self, ttl_us: int, grants: Sequence[Grant]) -> Iterable[str]:
        if (await self._run_renewal(ttl_us, grants)).changed == len(grants):
            return [grant.owner for grant in grants]
        # The answer says how many, but not which: those with the same owner that have not expired.
        states = await self._states(self._keys(grants))
        return [grant.owner for grant in grants if states[self._key(grant.name)].holds(grant.owner)]


class SqliteTable(_PollingTable):
    """SQLite, on one machine."""

    capabilities = replace(
        CAPABILITIES,
        ttl_granularity=0.001,
        scope="machine",
        clock_assumption="the wall clock of the machine runs at the rate of its monotonic one within 1 % and is not "
        "set forward while a lock is held",
        caveat="One machine, a local file system: locks of SQLite's own do not work on network file systems.",
    )
    options = MappingProxyType(
        {
            **OPTIONS,
            "group": Option(
                validation.parse_bool, "The file is shared with the group: its members may write to it.", default=False
            ),
        }
    )
    _dialect = "sqlite"
    _statements_class = SqliteStatements
    _share_statements_class = SqliteShareStatements

    async def _ask(self, request: Request, statement: Statement, parameters: tuple[Parameter, ...]) -> Grant | None:
        rows = (await self._run_for(request, statement, parameters)).rows
        return self._granted(request, *rows[0]) if rows else None
