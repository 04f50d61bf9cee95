"""What mode=row and mode=advisory have in common on PostgreSQL."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_session.locking import Locking, whole_units
from lockkit.backends.sql_session.session import Key, Session
from lockkit.units import Seconds
from lockkit.validation import NAME_BYTES_MAX

if TYPE_CHECKING:
    from lockkit.backends.sql.postgresql import PsycopgConnection

_LIMIT_MS_MAX = 2_147_483_647
"""The longest limit that PostgreSQL takes, 24.8 days. For a longer ttl there is none."""

_PG_NO_CLIENT = (
    "CASE WHEN current_setting('client_connection_check_interval', true) IS NOT NULL AND version() LIKE '%linux%'"
    " THEN set_config('client_connection_check_interval', '2s', {local}) END"
)
"""Has PostgreSQL 14 and later end a statement that waits for a lock, soon after its client has gone. Longer keeps such
waiters for longer, shorter asks the server's kernel more often."""

_PG_NO_END = (
    "CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL"
    " THEN set_config('transaction_timeout', '0', {local}) END"
)
"""Has PostgreSQL 17 and later end no transaction, which is the lock or a waiter, because it has been open for long."""

_PG_SESSION = Statement(
    "SET statement_timeout = 0; SET lock_timeout = 0; SET synchronous_commit = off; SELECT"
    " (SELECT CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) FROM pg_stat_get_activity(pg_backend_pid())),"
    f" {_PG_NO_CLIENT.format(local='false')}, {_PG_NO_END.format(local='false')}"
)
_PG_PID = Statement("SELECT pg_backend_pid()")
_PG_CANCEL = Statement("SELECT pg_cancel_backend(CAST($1 AS integer))")
_PG_END = Statement("SELECT pg_terminate_backend(CAST($1 AS integer))")
# Not another session that has got the same number since.
_PG_END_WAITER = Statement(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_get_activity(CAST($1 AS integer))"
    " WHERE CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) = CAST($2 AS bigint)"
)
# Its own server tells no start behind a pooler, which may also have the session served by another one by now.
_PG_WAITS = Statement(
    "SELECT CAST($2 AS bigint) = 0 OR EXISTS (SELECT FROM pg_stat_get_activity(CAST($1 AS integer))"
    " WHERE state = 'active' AND CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) = CAST($2 AS bigint))"
)
_PG_OBSTRUCTS = Statement(
    "SELECT EXISTS (SELECT FROM pg_locks mine JOIN pg_locks theirs ON theirs.virtualxid = mine.virtualxid"
    " WHERE mine.pid = CAST($1 AS integer) AND mine.locktype = 'virtualxid' AND mine.granted"
    " AND theirs.locktype = 'virtualxid' AND NOT theirs.granted)"
)
_PG_OFFER_MS = 250
"""A waiter that is granted the lock has at least so long to use it. Longer keeps others waiting behind one that is
stopped, with a short ttl; shorter throws out waiters on a busy machine."""
_PG_KEEP = Statement("SET LOCAL idle_in_transaction_session_timeout = $1")
_PG_ROLLBACK = Statement("ROLLBACK")
_PG_COMMIT = Statement("COMMIT")


LEASE_COLUMNS = "(name, owner, token, granted_at_us, session, metadata)"
UPDATE_LEASE = (
    " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = greatest(l.token + 1, excluded.token),"
    " granted_at_us = excluded.granted_at_us, session = excluded.session, metadata = excluded.metadata"
)
COUNT_READER = (
    " ON CONFLICT (name) DO UPDATE SET token = greatest(l.token + 1, excluded.token),"
    " granted_at_us = excluded.granted_at_us, session = 0"
)
"""The row of the lock when a reader is granted it: it has the token, and names no session that writes."""
UPDATE_SHARE = UPDATE_LEASE.replace("greatest(l.token + 1, excluded.token)", "excluded.token")
# A crash of the server frees the lock, and the time is then behind the token: no need to wait for a disk.
RETURNING = " RETURNING token, set_config('synchronous_commit', 'off', true)"


class BeginTexts(NamedTuple):
    """
    The texts that begin a transaction and lock: one round trip each.

    Attributes:
        pooled: Behind a pooler.
        limited: On a session that has another limit than it is to have.
        again: On one that has that limit.
    """

    pooled: Statement
    limited: Statement
    again: Statement


class PostgresqlLocking(Locking):
    """PostgreSQL: the lock belongs to an open transaction, ``idle_in_transaction_session_timeout`` ends it."""

    right_to_end = "have your role granted pg_signal_backend"
    cancel = _PG_CANCEL
    end_session = _PG_END

    _plan: Statement
    """Prepares what the texts that begin execute, once in a session."""
    _begin_writing: BeginTexts
    _begin_reading: BeginTexts

    def _make_statements(self, *tables: str) -> None:
        # Schema and name, as PostgreSQL finds the table. Of what is in "public", as most is, the name alone.
        self.find_table = Statement(
            "SELECT CASE n.nspname WHEN 'public' THEN '' ELSE n.nspname || '.' END || c.relname FROM pg_class c"
            f" JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('{tables[0]}')"
        )

    def _begin_pooled(self, locking: str) -> Statement:
        """
        Make the text that begins a transaction and locks behind a pooler.

        What a session of our own has set at its start is enough, but for the limit ($2 in ms), which changes with the
        ttl. Behind a pooler sessions are lent for one transaction, so each of them sets it all, and plans nothing.
        """
        settings = {
            "idle_in_transaction_session_timeout": "CAST($2 AS text)",
            "statement_timeout": "'0'",
            "lock_timeout": "'0'",
            "synchronous_commit": "'off'",
        }
        newer = ", ".join(setting.format(local="true") for setting in (_PG_NO_CLIENT, _PG_NO_END))
        told = ", ".join(f"set_config('{name}', {value}, true)" for name, value in settings.items())
        return Statement(f"BEGIN ISOLATION LEVEL READ COMMITTED;SELECT {told}, {newer};{locking}")

    def _begin_with(self, pooled: str, text: str) -> BeginTexts:
        """Make the texts that begin a transaction and lock."""
        limited = Statement(f"SET idle_in_transaction_session_timeout = $2;{text}")
        return BeginTexts(self._begin_pooled(pooled), limited, Statement(text))

    @staticmethod
    def _planning(*plans: str) -> Statement:
        # Cancelled halfway, the same text is sent again: what was planned is not undone with the transaction.
        return Statement(";".join(["DEALLOCATE ALL", *(f"PREPARE {plan.replace('$', '$$')}" for plan in plans)]))

    async def set_up(self, session: Session) -> None:
        if not session.pooled:
            session.pid = session.connection.server_pid
            # Nothing that this session writes need outlive a crash of the server: it frees the lock in any case.
            session.started = (await session.run(_PG_SESSION)).rows[0][0]

    def limit(self, ttl: Seconds) -> int:
        limit = whole_units(ttl, 0.001, _LIMIT_MS_MAX)
        return 0 if limit == _LIMIT_MS_MAX else limit

    def seconds(self, limit: int, ttl: float) -> float:
        return limit / 1000 if limit else ttl

    def kept_seconds(self, session: Session) -> float:
        del session
        return inf  # the limit is for transactions only

    async def _begin(self, session: Session, key: Key, lock: str | int, limit: int, *more: Parameter) -> Result:
        texts = self._begin_reading if key.shared else self._begin_writing
        if session.pooled:
            return await session.run(texts.pooled, (lock, limit, *more))
        if not session.planned:
            await session.run(self._plan)
        statement = texts.again if session.limit == limit else texts.limited
        # Until it is answered, and well, nothing is known of either.
        session.limit, session.planned = None, False
        result = await session.run(statement, (lock, limit, *more))
        session.limit, session.planned = limit, True
        return result

    def _waiter_limit(self, limit: int) -> int:
        """Give the limit for a session that waits: see `Locking.enqueue`."""
        return min(limit, max(limit // 2, _PG_OFFER_MS))

    async def blocks_others(self, session: Session, answer_by: float) -> bool:
        result = await self.database.run(_PG_OBSTRUCTS, (session.pid,), again=True, answer_by=answer_by)
        return bool(result.rows[0][0])

    async def waits(self, session: Session, key: Key, answer_by: float) -> bool:
        del key
        parameters = (session.pid, session.started)
        result = await self.database.run(_PG_WAITS, parameters, again=True, answer_by=answer_by)
        return bool(result.rows[0][0])

    async def _know_pid(self, session: Session) -> None:
        """Ask which process serves the session: a pooler may use another one for each transaction."""
        if session.pooled:
            session.pid = (await session.run(_PG_PID)).rows[0][0]

    def keep(self, session: Session, limit: int) -> None:
        session.send(_PG_KEEP, (limit,))

    async def leave(self, session: Session, key: Key) -> None:
        del key
        if _psycopg(session).in_transaction:
            # It takes the limit back, which was set in the same text and so belongs to the transaction.
            session.limit = None
            await session.run(_PG_ROLLBACK)

    async def free(self, session: Session, key: Key) -> bool:
        if _psycopg(session).failed:
            # For example a renewal that was cancelled: that ended the lock, and COMMIT would not say so.
            await self.leave(session, key)
            return False
        await session.run(_PG_COMMIT)
        return True

    async def end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        del key
        await self.database.run(_PG_END_WAITER, (session.pid, session.started), again=True, answer_by=answer_by)

    def shares_key(self, key: Key) -> str:
        return f"+read/{key.text}/".ljust(NAME_BYTES_MAX + 1, ".")

    def token(self, result: Result) -> int | None:
        return result.rows[0][0] if result.rows else None


def halves(number: int) -> tuple[int, int]:
    """Split a key of 64 bits as pg_locks shows it: both halves without a sign."""
    bits = number & (2**64 - 1)
    return bits >> 32, bits & (2**32 - 1)


def _psycopg(session: Session) -> PsycopgConnection:
    return cast("PsycopgConnection", session.connection)
