"""
Option ``mode=table``: what each kind of database adds to `lockkit.backends.sql_table.backend`.

On PostgreSQL a release notifies waiting clients by NOTIFY (`lockkit.backends.sql.wakeup`), if one of them has marked
the row. Elsewhere, behind a pooler that lends out sessions, and while a foreign client holds the lock, waiters poll
with growing, jittered pauses (`lockkit.backends.sql_table.pace`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any

from lockkit import validation
from lockkit.backend import Busy, Grant, Host, Option, Request
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.wakeup import WakeupListener
from lockkit.backends.sql_table.backend import CAPABILITIES, OPTIONS, SqlTableBackend, Waiting, waiting_of
from lockkit.backends.sql_table.pace import Paces
from lockkit.backends.sql_table.shares import Held, text
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

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        super().__init__(database, options, host)
        self._listener = WakeupListener(host.runtime, database, self.tables[0].name)

    async def _attempt(self, request: Request) -> Grant | Busy:
        listener = self._listener
        for _ in range(LOOKS_MAX):
            listening = self._listen(request)
            if request.mode == "exclusive":
                found = await self._ask(request, listening=listening)
            else:
                found = await self._ask_for_share(request, want=listening)
            if isinstance(found, Grant):
                self._forget(request)
                return found
            if found is None:
                continue
            if listening or not request.queue or listener.cannot_listen:
                return await self._busy(request, found, poll=found.alien or not listening)
            await listener.open(request.answer_by)
        return Busy(0.0, poll=True)

    async def _ask(self, request: Request, *, listening: bool) -> Grant | Held | None:
        """Try to take the lock; None if it changed hands meanwhile."""
        statement = self._statements.acquire_or_wait if listening else self._statements.acquire
        parameters = self._parameters(request)
        rows = (await self._run(statement, parameters, answer_by=request.answer_by, acquiring=True)).rows
        if not rows:
            return None
        token, owner, left_us, alien, settled = rows[0]
        if token is not None:
            return Grant(request.name, request.owner, token, request.ttl)
        return Held(owner, left_us, alien) if settled else None

    def _listen(self, request: Request) -> bool:
        """Have a request that may wait woken; return whether it will be."""
        connection = self._listener.connection if request.queue else None
        if connection is None:
            return False
        waiting = waiting_of(request)
        if waiting.connection is not connection:
            waiting.connection = connection
            self._listener.expect(request, self._key(request.name))
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
        super().__init__(database, options, host)
        self._paces = Paces()

    async def _attempt(self, request: Request) -> Grant | Busy:
        if request.mode != "exclusive":
            found = await self._ask_for_share(request)
            return found if isinstance(found, Grant) else await self._busy(request, found, poll=True)
        now, waiting = self._runtime.now(), request.state
        pace = self._paces.find(self._key(request.name), now)
        # Others go first, but a caller with little time is not kept waiting.
        leisurely = request.queue and waiting is None and request.answer_by >= now + LEISURE_SECONDS
        if pace is not None and leisurely and pace.just_released(now):
            waiting_of(request)
            return Busy(pace.pause(self._runtime.random.uniform), poll=True)
        outcome = await self._ask_or_look(request)
        if isinstance(outcome, Grant):
            request.state = None
            if pace is not None:
                pace.granted(outcome.token, self._runtime.now())
        return outcome

    async def _ask_or_look(self, request: Request) -> Grant | Busy:
        # A request that found the lock held only reads until it is free: that neither writes nor waits for writers.
        waiting: Waiting | None = request.state
        found = await self._look_for(request) if waiting is not None and waiting.seen_held else None
        if found is None:
            statement, parameters = self._statements.acquire, self._parameters(request)
            result = await self._run(statement, parameters, answer_by=request.answer_by, acquiring=True)
            token = result.rows[0][0] if result.rows else result.last_id
            if token:
                return Grant(request.name, request.owner, token, request.ttl)
            found = await self._look_for(request)
        if isinstance(found, Grant):
            return found
        if request.queue:
            waiting_of(request).seen_held = True
        if found is None:  # released since: ask again soon
            return Busy(0.0, poll=True)
        left = self._until_next_look(request, found.token) if request.queue else inf
        return await self._busy(request, found, poll=True, left=left)

    def _until_next_look(self, request: Request, token: int) -> float:
        """Return after how many seconds to look again for a lock that changes hands; without limit if it does not."""
        key, now = self._key(request.name), self._runtime.now()
        pace = self._paces.find(key, now) or self._paces.begin(key)
        return pace.pause(self._runtime.random.uniform) if pace.found(token, now) else inf

    async def _release(self, key: str, owner: str, answer_by: float, *, again: bool) -> bool:
        released = await super()._release(key, owner, answer_by, again=again)
        pace = self._paces.find(key, self._runtime.now())
        if pace is not None:
            pace.released_at = self._runtime.now()
        return released

    async def _look_for(self, request: Request) -> Grant | Held | None:
        """
        Look who holds the lock; None if it can be had.

        A grant: the answer did not say so. MariaDB returns no last id if the table has a trigger that writes.
        """
        row = await self._look(self._key(request.name), request.answer_by)
        if row is None:
            return None
        owner, left_us, token, *_ = row
        if text(owner) == request.owner:
            return Grant(request.name, request.owner, token, request.ttl)
        return Held(text(owner), left_us, token=token)


class MysqlTable(_PollingTable):
    """MariaDB and MySQL."""

    _dialect = "mysql"
    _statements_class = MysqlStatements


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
