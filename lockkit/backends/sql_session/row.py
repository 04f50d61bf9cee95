"""
Locks by ``SELECT … FOR UPDATE`` on PostgreSQL, MariaDB and MySQL: ``?mode=row``.

Algorithm: each lock has a row in a table of its own. The holder has a transaction open in which that row is
locked, on a connection for that lock alone; a waiter waits in the database's own queue for the row. See
`lockkit.backends.sql_session.backend` for the life of a lease, and for what is in the table of leases beside it.

What the server must offer: PostgreSQL 12, MariaDB 10.5 or MySQL 8 with InnoDB; a connection for every lock that is held
or waited for. It must be able to end a session that idles: ``idle_in_transaction_session_timeout`` on PostgreSQL,
``wait_timeout`` on MariaDB and MySQL.

On PostgreSQL the holder is known by its transaction's number, which others see in ``pg_locks`` while it is open. On
MariaDB and MySQL only the privileged see who has locked a row, so the holder has a user lock (``GET_LOCK``) of its own
beside, and ``IS_USED_LOCK`` says who it is.

What it cannot promise: order. A newcomer may be faster than a waiter that is being woken (PostgreSQL locks a row that
it finds free without checking the queue; MySQL's scheduler prefers the waiter that most others wait for). A promoted
replica does not know the locks of the former primary. A transaction that is open for hours keeps VACUUM (PostgreSQL)
and purge (InnoDB) from removing what was deleted since.

Source: PostgreSQL, "13.3.2. Row-Level Locks"; MySQL, "17.7.2.4 Locking Reads"; MariaDB, "SELECT … FOR UPDATE".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from lockkit.backends.sql.schema import quoted
from lockkit.backends.sql.statement import Statement
from lockkit.backends.sql_session.backend import SessionBackend, capabilities_of, options_of
from lockkit.backends.sql_session.claim import Key, Taken
from lockkit.backends.sql_session.mysql import MysqlLocking
from lockkit.backends.sql_session.postgresql import LEASE_COLUMNS, RETURNING, UPDATE_LEASE, PostgresqlLocking
from lockkit.backends.sql_session.schema import ROWS, leases_name, leases_table, rows_table

if TYPE_CHECKING:
    from lockkit.backend import Option, Request
    from lockkit.backends.sql.statement import Parameter, Result
    from lockkit.backends.sql_session.session import Session

__all__ = ["MysqlRow", "PostgresqlRow"]

_OPTIONS = options_of("row", ROWS)

_CAPABILITIES = capabilities_of(
    fair=False,
    caveat="A lock is an open transaction and a connection: it holds back VACUUM (PostgreSQL) or purge "
    "(MariaDB, MySQL), and a failover ends it without the holder's knowing until its next renewal.",
)


class _PostgresqlRowLocking(PostgresqlLocking):
    def _make_statements(self) -> None:
        dialect = self.database.engine.dialect
        rows_of, leases_of = rows_table(name=self._table_name), leases_table(name=leases_name(self._table_name))
        self.tables = [rows_of, leases_of]
        super()._make_statements()
        rows, leases = quoted(rows_of, dialect), quoted(leases_of, dialect)
        # Not NOWAIT: its error would end the transaction in which we then want to wait.
        locking = f"SELECT pg_backend_pid(), txid_current() FROM {rows} WHERE name = $1 FOR UPDATE"
        self._begin_with(f"{locking} SKIP LOCKED", "text")
        self._try = Statement(f"{locking} SKIP LOCKED")
        self._wait = Statement(f"SET LOCAL idle_in_transaction_session_timeout = $2;{locking}")
        self._insert = Statement(f"INSERT INTO {rows} (name) VALUES ($1) ON CONFLICT DO NOTHING")
        self.write_lease = Statement(
            f"INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" SELECT $1, $2, now_us, now_us, $3, $4 FROM (SELECT {self.database.dialect.now_us} AS now_us) AS clock"
            f"{UPDATE_LEASE} WHERE txid_status(excluded.session) = 'in progress'{RETURNING}"
        )
        # Every transaction that has a number has a lock on that, and waiters for its rows wait for it: the first for
        # the number, those behind for the row. pg_locks has the lower 32 bits of the number.
        self.find_holder = Statement(
            "SELECT k.pid, l.owner, l.token, l.metadata,"
            " (SELECT count(*) FROM pg_locks w WHERE NOT w.granted AND (w.transactionid = k.transactionid OR"
            " w.locktype = 'tuple' AND w.relation = c.tableoid AND w.database = k.mine AND"
            " CAST(c.ctid AS text) = '(' || w.page || ',' || w.tuple || ')'))"
            f" FROM {leases} l JOIN {rows} c ON c.name = l.name JOIN (SELECT pid, transactionid,"
            " (SELECT oid FROM pg_database WHERE datname = current_database()) AS mine FROM pg_locks"
            " WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted) k"
            " ON k.transactionid = CAST(CAST(l.session % 4294967296 AS text) AS xid) WHERE l.name = $1"
        )

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        name = key.name
        assert isinstance(name, str)
        result = await self._begin(session, name, limit)
        # Nothing was found: is the row locked, or is there none?
        if not result.rows:
            inserted = await self.database.run(self._insert, (name,), again=True, answer_by=request.answer_by)
            if inserted.changed:
                result = await session.run(self._try, (name,))
        identity = self.granted(session, result)
        if identity is None:
            await self._know_pid(session)
            return None
        return Taken(identity)

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        session.send(self._wait, (key.name, self._waiter_limit(limit)))

    def granted(self, session: Session, result: Result) -> int | None:
        if not result.rows:
            return None  # the row was deleted meanwhile
        session.pid, identity = result.rows[0]
        return int(identity)


_MYSQL_SESSION = Statement("SET SESSION autocommit = 0, innodb_lock_wait_timeout = 1073741824")
_MYSQL_ROLLBACK = Statement("ROLLBACK")
_MYSQL_COMMIT = Statement("COMMIT")
_MYSQL_UNMARK = Statement("DO RELEASE_LOCK($1)")
# The mark first: the next holder has its own as soon as it has the row.
_MARIADB_COMMIT = Statement("BEGIN NOT ATOMIC DO RELEASE_LOCK($1); COMMIT; END")
_MARK_SECONDS = 2
"""How long a new holder waits for the mark of the former, whose session the server is just ending: it frees the row
first."""


class _MysqlRowLocking(MysqlLocking):
    def _make_statements(self) -> None:
        dialect = self.database.engine.dialect
        rows_of, leases_of = rows_table(name=self._table_name), leases_table(name=leases_name(self._table_name))
        self.tables = [rows_of, leases_of]
        super()._make_statements()
        rows, leases = quoted(rows_of, dialect), quoted(leases_of, dialect)
        locking = f"SELECT GET_LOCK($2, {_MARK_SECONDS}) FROM {rows} WHERE name = $1 FOR UPDATE"
        self._try = Statement(f"{locking} NOWAIT")
        self._wait = Statement(locking)
        self._insert = Statement(f"INSERT IGNORE INTO {rows} (name) VALUES ($1)")
        self.write_lease = self._writing(leases, "IS_USED_LOCK($5)")
        self.find_holder = self._looking(leases, "IS_USED_LOCK($2)")

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        del session
        return (key.text,)

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, key.text)

    async def set_up(self, session: Session) -> None:
        await super().set_up(session)
        # Without autocommit a transaction is open whenever a row is read: no statement of its own for that.
        await session.run(_MYSQL_SESSION)

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        await self._limited(session, limit)
        try:
            result = await session.run(self._try, (key.name, key.text))
            if not result.rows:
                # At REPEATABLE READ, which a binary log of statements needs, it has locked the gap where the row will
                # be, and the INSERT would wait for that.
                await session.run(_MYSQL_ROLLBACK)
                await self.database.run(self._insert, (key.name,), again=True, answer_by=request.answer_by)
                result = await session.run(self._try, (key.name, key.text))
        except self.database.driver_errors as error:
            if session.unanswered or self.database.kind(error) != "locked":
                raise
            return None
        identity = self.granted(session, result)
        return None if identity is None else Taken(identity)

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        await self._waiter_limit(session, limit)
        session.send(self._wait, (key.name, key.text))

    def granted(self, session: Session, result: Result) -> int | None:
        return session.pid if result.rows else None

    async def leave(self, session: Session, key: Key) -> None:
        await session.run(_MYSQL_UNMARK, (key.text,))
        await session.run(_MYSQL_ROLLBACK)

    async def free(self, session: Session, key: Key) -> bool:
        if self.mariadb:
            await session.run(_MARIADB_COMMIT, (key.text,))
        else:  # MySQL has no blocks outside of stored programs
            await session.run(_MYSQL_UNMARK, (key.text,))
            await session.run(_MYSQL_COMMIT)
        return True

    def send_free(self, session: Session, key: Key) -> None:
        if self.mariadb:
            session.send(_MARIADB_COMMIT, (key.text,))
        else:
            session.send(_MYSQL_COMMIT)  # the mark goes with the connection


class PostgresqlRow(SessionBackend):
    """Processes that reach the same PostgreSQL database."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _locking_class = _PostgresqlRowLocking


class MysqlRow(SessionBackend):
    """Processes that reach the same MariaDB or MySQL database."""

    capabilities = replace(_CAPABILITIES, min_ttl=1.0, ttl_granularity=1.0, waiters_visible=False)
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _locking_class = _MysqlRowLocking
