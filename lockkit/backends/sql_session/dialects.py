"""What sessions of PostgreSQL, and of MariaDB and MySQL, have in common in mode=row and mode=advisory."""

from __future__ import annotations

import hashlib
from math import inf
from typing import TYPE_CHECKING, ClassVar, cast

from lockkit.backends.sql.schema import quoted
from lockkit.backends.sql.statement import Statement
from lockkit.backends.sql_session.backend import Key, SessionBackend, whole
from lockkit.errors import ConfigurationError, LockError

if TYPE_CHECKING:
    from lockkit.backends.sql.statement import Parameter, Result
    from lockkit.backends.sql_session.postgresql import PqSession
    from lockkit.backends.sql_session.session import Session

__all__ = ["MysqlSessions", "PostgresqlSessions"]


class _Keys(SessionBackend):
    def _key(self, table: str, name: str) -> Key:
        # The table is in it: clients that have different tables do not share locks.
        digest = hashlib.sha256(f"{table}\0{name}".encode()).digest()
        text = f"lockkit:{digest[:24].hex()}"  # 56 characters: GET_LOCK takes 64
        return Key(self.database.dialect.name_parameter(name), int.from_bytes(digest[:8], signed=True), text)


_LIMIT_MS_MAX = 2_147_483_647
"""The longest limit that PostgreSQL takes, 24.8 days. For a longer ttl there is none."""

_PG_NO_CLIENT = (
    "CASE WHEN current_setting('client_connection_check_interval', true) IS NOT NULL AND version() LIKE '%linux%'"
    " THEN set_config('client_connection_check_interval', '2s', {local}) END"
)
"""Has PostgreSQL 14 and later end a statement that waits for a lock, soon after its client has gone. Longer keeps such
waiters for longer, shorter asks the server's kernel more often."""

_PG_SESSION = Statement(
    "SET statement_timeout = 0; SET lock_timeout = 0; SET synchronous_commit = off; SELECT"
    " (SELECT CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) FROM pg_stat_get_activity(pg_backend_pid())),"
    f" {_PG_NO_CLIENT.format(local='false')}"
)
_PG_PID = Statement("SELECT pg_backend_pid()")
_PG_CANCEL = Statement("SELECT pg_cancel_backend(CAST($1 AS integer))")
_PG_END = Statement("SELECT pg_terminate_backend(CAST($1 AS integer))")
# Not another session that has got the same number since.
_PG_END_WAITER = Statement(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_get_activity(CAST($1 AS integer))"
    " WHERE CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) = CAST($2 AS bigint)"
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


class PostgresqlSessions(_Keys):
    """PostgreSQL: the lock belongs to an open transaction, ``idle_in_transaction_session_timeout`` ends it."""

    _dialect: ClassVar[str] = "postgresql"
    _cancel = _PG_CANCEL

    _begin_first: Statement
    _begin_limited: Statement
    _begin_again: Statement
    _begin_pooled: Statement

    def _prepare(self) -> None:
        # Schema and name, as PostgreSQL finds the table. Of what is in "public", as most is, the name alone.
        table = quoted(self.tables[0], self.database.engine.dialect)
        self._home = Statement(
            "SELECT CASE n.nspname WHEN 'public' THEN '' ELSE n.nspname || '.' END || c.relname FROM pg_class c"
            f" JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('{table}')"
        )

    def _begin_with(self, locking: str, kind: str) -> None:
        """
        Make the texts that begin a transaction and lock: one round trip each.

        What a session was told at its start is enough, but for the limit ($2 in ms), which changes with the ttl; and it
        plans the statement once. Behind a pooler sessions are lent for one transaction, so each of those must be told
        all of it.

        Args:
            locking: What locks, with $1 for the lock.
            kind: SQL type of that.
        """
        settings = {
            "idle_in_transaction_session_timeout": "CAST($2 AS text)",
            "statement_timeout": "'0'",
            "lock_timeout": "'0'",
            "synchronous_commit": "'off'",
        }
        noticed = _PG_NO_CLIENT.format(local="true")
        told = ", ".join(f"set_config('{name}', {value}, true)" for name, value in settings.items())
        self._begin_pooled = Statement(f"BEGIN ISOLATION LEVEL READ COMMITTED;SELECT {told}, {noticed};{locking}")
        self._plan(f"({kind}) AS {locking}", "BEGIN;EXECUTE lockkit_try ($1)")

    def _plan(self, what: str, text: str) -> None:
        """Make the texts for sessions of our own: of what they plan once, and what is sent each time."""
        limit = "SET idle_in_transaction_session_timeout = $2"
        plan = f"PREPARE lockkit_try {what.replace('$', '$$')}"
        # Cancelled halfway, the same text is sent again: what was planned is not undone with the transaction.
        self._begin_first = Statement(f"DEALLOCATE ALL;{plan};{limit};{text}")
        self._begin_limited = Statement(f"{limit};{text}")
        self._begin_again = Statement(text)

    async def _greet(self, session: Session) -> None:
        if not session.pooled:
            session.pid = session.link.server_pid
            # Nothing that this session writes need outlive a crash of the server: it frees the lock in any case.
            session.started = (await session.run(_PG_SESSION)).rows[0][0]

    def _limit(self, ttl: float) -> int:
        limit = whole(ttl, 0.001, _LIMIT_MS_MAX)
        return 0 if limit == _LIMIT_MS_MAX else limit

    def _seconds(self, limit: int, ttl: float) -> float:
        return limit / 1000 if limit else ttl

    def _kept_seconds(self, session: Session) -> float:
        del session
        return inf  # the limit is for transactions only

    async def _begin(self, session: Session, name: str | int, limit: int, *more: Parameter) -> Result:
        if session.pooled:
            statement = self._begin_pooled
        elif not session.planned:
            statement = self._begin_first
        else:
            statement = self._begin_again if session.limit == limit else self._begin_limited
        # Until it is answered, and well, nothing is known of either.
        session.limit, session.planned = None, False
        result = await session.run(statement, (name, limit, *more))
        if not session.pooled:
            session.planned = True
            session.limit = limit
        return result

    def _offer(self, limit: int) -> int:
        """Give the limit for a session that waits: see `SessionBackend._enqueue`."""
        return min(limit, max(limit // 2, _PG_OFFER_MS))

    async def _obstructs(self, session: Session, answer_by: float) -> bool:
        result = await self.database.run(_PG_OBSTRUCTS, (session.pid,), again=True, answer_by=answer_by)
        return bool(result.rows[0][0])

    async def _know_pid(self, session: Session) -> None:
        """Learn which process serves us: a pooler gives another one for each transaction."""
        if session.pooled:
            session.pid = (await session.run(_PG_PID)).rows[0][0]

    def _keep(self, session: Session, limit: int) -> None:
        session.send(_PG_KEEP, (limit,))

    async def _leave(self, session: Session, key: Key) -> None:
        del key
        if cast("PqSession", session).in_transaction:
            # It takes the limit back, which was told in the same text and so belongs to the transaction.
            session.limit = None
            await session.run(_PG_ROLLBACK)

    async def _free(self, session: Session, key: Key) -> bool:
        if cast("PqSession", session).failed:
            # A renewal was cancelled, say: that ended the lock, and COMMIT would not tell.
            await self._leave(session, key)
            return False
        await session.run(_PG_COMMIT)
        return True

    def _send_free(self, session: Session, key: Key) -> None:
        del key
        session.send(_PG_COMMIT)

    async def _end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        del key
        await self.database.run(_PG_END_WAITER, (session.pid, session.started), again=True, answer_by=answer_by)

    async def _end(self, pid: int, answer_by: float) -> None:
        try:
            await self.database.run(_PG_END, (pid,), again=True, answer_by=answer_by)
        except ConfigurationError as error:
            right = "have your role granted pg_signal_backend"
            raise self._unsupported(pid, right) from error.__cause__

    def _token(self, result: Result) -> int | None:
        return result.rows[0][0] if result.rows else None


_LIMIT_SECONDS_MAX = 31_536_000
"""The longest limit that MariaDB and MySQL take, a year."""

_MYSQL_LOOK = Statement("SELECT CONNECTION_ID(), VERSION()")
_MYSQL_NO_OTHER_LIMIT = Statement(
    "SET SESSION idle_transaction_timeout = 0, idle_readonly_transaction_timeout = 0,"
    " idle_write_transaction_timeout = 0"
)
_MYSQL_LIMIT = Statement("SET SESSION wait_timeout = $1")
_MYSQL_CANCEL = Statement("KILL QUERY $1")
_MYSQL_END = Statement("KILL $1")
_MYSQL_WAITER = Statement("SELECT id FROM information_schema.processlist WHERE id = $1 AND INSTR(info, $2) > 0")
_KILL_DENIED = 1095
_NO_SUCH_THREAD = 1094
_REFUSED = 1
"""In place of a token: the session does not hold the lock. Tokens are times in µs, and far above."""


class MysqlSessions(_Keys):
    """
    MariaDB and MySQL: ``wait_timeout`` ends a session that idles, whole seconds.

    It counts in a transaction, too. MariaDB has other limits that go before it there: they are put out of force.

    Attributes:
        mariadb: The server is MariaDB, as the last one said that was greeted.
    """

    _dialect: ClassVar[str] = "mysql"
    _cancel = _MYSQL_CANCEL

    mariadb = False

    def _prepare(self) -> None:
        schema, _, name = self._table_name.rpartition(".")
        database = f"'{schema}'" if schema else "DATABASE()"
        table = f"CONCAT({database}, '.{name}')"
        # Where the names of tables are files of a file system that knows no case, T and t are one table.
        self._home = Statement(f"SELECT IF(@@lower_case_table_names = 0, {table}, LOWER({table}))")

    async def _greet(self, session: Session) -> None:
        session.pid, version = (await session.run(_MYSQL_LOOK)).rows[0]
        self.mariadb = "MariaDB" in version
        if self.mariadb:
            await session.run(_MYSQL_NO_OTHER_LIMIT)

    def _limit(self, ttl: float) -> int:
        return whole(ttl, 1, _LIMIT_SECONDS_MAX)

    def _seconds(self, limit: int, ttl: float) -> float:
        del ttl
        return float(limit)

    def _kept_seconds(self, session: Session) -> float:
        # Well before, by another clock, and with the time that the first statement takes to get there.
        return 0.8 * session.limit if session.limit is not None else inf

    async def _limited(self, session: Session, limit: int) -> None:
        """See that the server ends this session when it has idled for so long."""
        if session.limit != limit:
            session.limit = None
            await session.run(_MYSQL_LIMIT, (limit,))
            session.limit = limit

    async def _offer(self, session: Session, limit: int) -> None:
        """See `SessionBackend._enqueue`."""
        await self._limited(session, (limit + 1) // 2)

    def _keep(self, session: Session, limit: int) -> None:
        session.limit = limit
        session.send(_MYSQL_LIMIT, (limit,))

    async def _end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        # Not another session that has got the same number since, as after a restart of the server.
        if (await self.database.run(_MYSQL_WAITER, (session.pid, key.text), again=True, answer_by=answer_by)).rows:
            await self._end(session.pid, answer_by)

    async def _end(self, pid: int, answer_by: float) -> None:
        from lockkit.backends.sql_session.mysql import error_number  # noqa: PLC0415 - PostgreSQL needs nothing of it

        try:
            await self.database.run(_MYSQL_END, (pid,), again=True, answer_by=answer_by)
        except LockError as error:
            number = error_number(error.__cause__)
            if number == _KILL_DENIED:
                right = "KILL of another user's needs CONNECTION ADMIN (SUPER on older MariaDB) or CONNECTION_ADMIN"
                raise self._unsupported(pid, right) from error.__cause__
            if number != _NO_SUCH_THREAD:  # it has ended by itself
                raise

    def _token(self, result: Result) -> int | None:
        return None if result.last_id == _REFUSED else result.last_id

    def _writing(self, table: str, used: str) -> Statement:
        """
        Make `_written`: the lease, if `used` (an expression for the session that holds the lock) is $3.

        MariaDB and MySQL assign from left to right, so whether `owner` is ours already says what `used` was, once.
        There is no RETURNING in MySQL: the token comes back as the last id.
        """
        now = self.database.dialect.now_us
        return Statement(
            f"INSERT INTO {table} (name, owner, token, granted_at_us, session, metadata)"
            f" VALUES ($1, $2, LAST_INSERT_ID({now}), {now}, $3, $4) ON DUPLICATE KEY UPDATE"
            f" owner = IF({used} = $3, $2, owner),"
            f" token = IF(owner = $2, LAST_INSERT_ID(GREATEST(token + 1, {now})),"
            f" token + 0 * LAST_INSERT_ID({_REFUSED})),"
            " granted_at_us = IF(owner = $2, VALUES(granted_at_us), granted_at_us),"
            " session = IF(owner = $2, $3, session), metadata = IF(owner = $2, $4, metadata)"
        )

    def _looking(self, table: str, used: str) -> Statement:
        """Make `_seen`. MariaDB and MySQL show who waits only to the privileged."""
        return Statement(
            f"SELECT u.session, l.owner, l.token, l.metadata, NULL FROM (SELECT {used} AS session) u"
            f" LEFT JOIN {table} l ON l.name = $1 AND l.session = u.session WHERE u.session IS NOT NULL"
        )
