"""
Locks by ``SELECT … FOR UPDATE`` and ``FOR SHARE`` on PostgreSQL, MariaDB and MySQL: ``?mode=row``.

Algorithm: each lock has a row in a table of its own. The holder has a transaction open in which that row is
locked, on a connection for that lock alone; a waiter waits in the database's own queue for the row. See
`lockkit.backends.sql_session.backend` for the life of a lease, and for what is in the table of leases beside it.

What the server must offer: PostgreSQL 12, MariaDB 10.5 or MySQL 8 with InnoDB; a connection for every lock that is held
or waited for. It must be able to end a session that idles: ``idle_in_transaction_session_timeout`` on PostgreSQL,
``wait_timeout`` on MariaDB and MySQL.

On PostgreSQL the holder is known by its transaction's number, which others see in ``pg_locks`` while it is open. On
MariaDB and MySQL only the privileged see who has locked a row, so the holder has a user lock (``GET_LOCK``) of its own
beside, and ``IS_USED_LOCK`` says who it is; each reader has one of its own.

Readers lock the row ``FOR SHARE``. InnoDB makes them wait behind a writer that waits. PostgreSQL does not: readers that
overlap would keep a writer out for ever. So there is a turnstile beside each row, an advisory lock: a reader shares it
as long as it reads, and a writer that has to wait takes it before it waits for the row. PostgreSQL serves the turnstile
first come, first served. A writer that finds the row free does without, so a lock without readers costs the same.

What it cannot promise: order. A newcomer may be faster than a waiter that is being woken (PostgreSQL locks a row that
it finds free without checking the queue; MySQL's scheduler prefers the waiter that most others wait for). A promoted
replica does not know the locks of the former primary. A transaction that is open for hours keeps VACUUM (PostgreSQL)
and purge (InnoDB) from removing what was deleted since.

Source: PostgreSQL, "13.3.2. Row-Level Locks"; MySQL, "17.7.2.4 Locking Reads"; MariaDB, "SELECT … FOR UPDATE",
"LOCK IN SHARE MODE".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from lockkit.backend import Option, Request
from lockkit.backends.sql.schema import Table
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_session.backend import SessionBackend, capabilities_of, options_of
from lockkit.backends.sql_session.locking import DELETE_AFTER_US, KEY, lease_table
from lockkit.backends.sql_session.mysql import MARK_CHARS, MysqlLocking
from lockkit.backends.sql_session.postgresql import (
    COUNT_READER,
    LEASE_COLUMNS,
    RETURNING,
    UPDATE_LEASE,
    UPDATE_SHARE,
    PostgresqlLocking,
    halves,
)
from lockkit.backends.sql_session.session import Key, Session, Taken

_OPTIONS = options_of("row", "lockkit_rows")

_CAPABILITIES = capabilities_of(
    fair=False,
    caveat="A lock is an open transaction and a connection: it holds back VACUUM (PostgreSQL) or purge "
    "(MariaDB, MySQL), and a failover ends it without the holder's knowing until its next renewal.",
)


def _tables(name: str) -> list[Table]:
    """Describe the rows that are locked, one for each name, and their leases."""
    return [Table(name, (KEY,), busy=False), lease_table(f"{name}_leases")]


class _PostgresqlRowLocking(PostgresqlLocking):
    describe = staticmethod(_tables)

    def _make_statements(self, *tables: str) -> None:
        super()._make_statements(*tables)
        rows, leases = tables
        self._make_locking(rows)
        self._make_writing(leases, self.database.dialect.now_us)
        self._make_seeing(rows, leases, self.database.dialect.now_us)

    def _make_locking(self, rows: str) -> None:
        """Make the statements that lock the row."""
        # Not NOWAIT: its error would end the transaction in which we then want to wait.
        found = f"SELECT pg_backend_pid(), txid_current() FROM {rows} WHERE name = $1"
        entering = f"{found} AND pg_try_advisory_xact_lock_shared($2) FOR SHARE SKIP LOCKED"
        self._try = Statement(f"{found} FOR UPDATE SKIP LOCKED")
        self._try_reading = Statement(entering)
        self._plan = self._planning(
            f"lockkit_try (text) AS {self._try.text}", f"lockkit_read (text, bigint) AS {entering}"
        )
        self._begin_writing = self._begin_with(self._try.text, "BEGIN;EXECUTE lockkit_try ($1)")
        self._begin_reading = self._begin_with(entering.replace("$2", "$3"), "BEGIN;EXECUTE lockkit_read ($1, $3)")
        offer = "SET LOCAL idle_in_transaction_session_timeout = $2"
        self._wait = Statement(f"{offer};SELECT pg_advisory_xact_lock($3);{found} FOR UPDATE")
        self._wait_reading = Statement(f"{offer};SELECT pg_advisory_xact_lock_shared($3);{found} FOR SHARE")
        self._insert = Statement(f"INSERT INTO {rows} (name) VALUES ($1) ON CONFLICT (name) DO NOTHING")

    def _make_writing(self, leases: str, now: str) -> None:
        """Make the statements that write leases."""
        clock = f"(SELECT {now} AS now_us) AS clock"
        self.write_lease = Statement(
            f"INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" SELECT $1, $2, now_us, now_us, $3, $4 FROM {clock}"
            f"{UPDATE_LEASE} WHERE txid_status(excluded.session) = 'in progress'{RETURNING}"
        )
        self.write_share = Statement(
            f"WITH counted AS (INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" SELECT $1, '', now_us, now_us, 0, '' FROM {clock}"
            f"{COUNT_READER} WHERE txid_status($3) = 'in progress' RETURNING token, granted_at_us)"
            f" INSERT INTO {leases} AS l {LEASE_COLUMNS} SELECT $5, $2, token, granted_at_us, $3, $4 FROM counted"
            f"{UPDATE_SHARE}{RETURNING}"
        )

    def _make_seeing(self, rows: str, leases: str, now: str) -> None:
        """Make the statements that look for holders."""
        # Every transaction that has a number has a lock on that. pg_locks has the lower 32 bits of the number.
        number = "CAST(CAST({0}session % 4294967296 AS text) AS xid)"
        open_ones = "FROM pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        self.delete_shares = Statement(
            f"DELETE FROM {leases} WHERE name >= $1 AND name < $2"
            f" AND granted_at_us < {now} - {DELETE_AFTER_US}"
            f" AND {number.format('')} NOT IN (SELECT transactionid {open_ones})"
        )
        # The first in the queue for a row waits for a transaction that has locked it, those behind for the row or at
        # the turnstile.
        self.find_holder = Statement(
            "WITH k AS MATERIALIZED (SELECT o.pid, o.transactionid, l.owner, l.token, l.metadata, l.name <> $1 AS reads"
            f" FROM {leases} l JOIN (SELECT pid, transactionid {open_ones}) o"
            f" ON o.transactionid = {number.format('l.')} WHERE l.name = $1 OR l.name >= $2 AND l.name < $3)"
            " SELECT k.pid, k.owner, k.token, k.metadata, (SELECT count(*) FROM pg_locks w WHERE NOT w.granted AND"
            " (w.transactionid IN (SELECT transactionid FROM k) OR w.database = d.oid AND (w.locktype = 'tuple' AND"
            " w.relation = c.tableoid AND CAST(c.ctid AS text) = '(' || w.page || ',' || w.tuple || ')'"
            " OR w.locktype = 'advisory' AND w.objsubid = 1 AND w.classid = CAST(CAST($4 AS bigint) AS oid)"
            " AND w.objid = CAST(CAST($5 AS bigint) AS oid)))), k.reads"
            f" FROM k JOIN {rows} c ON c.name = $1 JOIN pg_database d ON d.datname = current_database()"
            " ORDER BY k.token"
        )

    def key(self, table: str, name: str) -> Key:
        # Other bits of the hash than mode=advisory takes, which may have a table of the same name.
        key = super().key(table, name)
        return key._replace(number=int.from_bytes(bytes.fromhex(key.text[-16:]), signed=True))

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        return (f"{self.shares_key(key)}{session.pid}",) if key.shared else ()

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, *self.shares_range(key), *halves(key.number))

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        turnstile = (key.number,) if key.shared else ()
        result = await self._begin(session, key, key.name, limit, *turnstile)
        # Nothing was found: is the row locked, or is there none?
        if not result.rows:
            inserted = await self.database.run(self._insert, (key.name,), again=True, answer_by=request.answer_by)
            if inserted.changed:
                result = await session.run(self._try_reading if key.shared else self._try, (key.name, *turnstile))
        identity = self.granted(session, result)
        if identity is None:
            await self._know_pid(session)
            return None
        return Taken(identity)

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        waiting = self._wait_reading if key.shared else self._wait
        session.send(waiting, (key.name, self._waiter_limit(limit), key.number))

    def granted(self, session: Session, result: Result) -> int | None:
        if not result.rows:
            return None  # the row was deleted meanwhile
        session.pid, identity = result.rows[0]
        return int(identity)


# Three years, the longest wait that MariaDB takes since 10.6.3.
_MYSQL_SESSION = Statement("SET SESSION autocommit = 0, innodb_lock_wait_timeout = 100000000")
_MYSQL_ROLLBACK = Statement("ROLLBACK")
_MYSQL_COMMIT = Statement("COMMIT")
_MYSQL_UNMARK = Statement("DO RELEASE_ALL_LOCKS()")
# The mark first: the next holder has its own as soon as it has the row.
_MARIADB_COMMIT = Statement("BEGIN NOT ATOMIC DO RELEASE_ALL_LOCKS(); COMMIT; END")
_MARK_SECONDS = 2
"""How long a new holder waits for the mark of the former, whose session the server is just ending: it frees the row
first."""


class _MysqlRowLocking(MysqlLocking):
    describe = staticmethod(_tables)

    def _make_statements(self, *tables: str) -> None:
        super()._make_statements(*tables)
        rows, leases = tables
        locking = f"SELECT GET_LOCK($2, {_MARK_SECONDS}) FROM {rows} WHERE name = $1 FOR UPDATE"
        self._try = Statement(f"{locking} NOWAIT")
        self._wait = Statement(locking)
        reading = f"SELECT GET_LOCK($2, {_MARK_SECONDS}) FROM {rows} WHERE name = $1 LOCK IN SHARE MODE"
        self._wait_reading = Statement(reading)
        # MariaDB has no FOR SHARE, and MySQL no NOWAIT with the older spelling.
        self._try_reading = {
            True: Statement(f"{reading} NOWAIT"),
            False: Statement(f"{reading.replace('LOCK IN SHARE MODE', 'FOR SHARE')} NOWAIT"),
        }
        self._insert = Statement(f"INSERT IGNORE INTO {rows} (name) VALUES ($1)")
        self.write_lease = self._writing(leases, "IS_USED_LOCK($5)")
        self.write_share = self._counting(leases, "IS_USED_LOCK($5)")
        self.find_holder = Statement(
            f"{self._looking(leases, 'IS_USED_LOCK($2)').text} UNION ALL"
            f" SELECT session, owner, token, metadata, NULL, 1 FROM {leases}"
            " WHERE name BETWEEN $3 AND $4 AND IS_USED_LOCK(CONCAT($5, session)) = session ORDER BY 3"
        )
        self.delete_shares = Statement(
            f"DELETE FROM {leases} WHERE name BETWEEN $1 AND $2"
            f" AND granted_at_us < {self.database.dialect.now_us} - {DELETE_AFTER_US}"
            " AND NOT (IS_USED_LOCK(CONCAT($3, session)) <=> session)"
        )

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        mark = self._mark(session, key)
        return (mark, f"{self.shares_key(key)}{session.pid}") if key.shared else (mark,)

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, key.text, *self.shares_range(key), _shared_mark(key))

    def share_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (_shared_mark(key),)

    def _mark(self, session: Session, key: Key) -> str:
        """Name the user lock that shows who has locked the row; each reader has its own."""
        return f"{_shared_mark(key)}{session.pid}" if key.shared else key.text

    async def set_up(self, session: Session) -> None:
        await super().set_up(session)
        # Without autocommit a transaction is open whenever a row is read: no statement of its own for that.
        await session.run(_MYSQL_SESSION)

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        await self._limited(session, limit)
        trying = self._try_reading[self.mariadb] if key.shared else self._try
        parameters = (key.name, self._mark(session, key))
        try:
            result = await session.run(trying, parameters)
            if not result.rows:
                # At REPEATABLE READ, which a binary log of statements needs, it has locked the gap where the row will
                # be, and the INSERT would wait for that.
                await session.run(_MYSQL_ROLLBACK)
                await self.database.run(self._insert, (key.name,), again=True, answer_by=request.answer_by)
                result = await session.run(trying, parameters)
        except self.database.driver_errors as error:
            if session.unanswered or self.database.kind(error) != "locked":
                raise
            return None
        identity = self.granted(session, result)
        return None if identity is None else Taken(identity)

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        await self._waiter_limit(session, limit)
        session.send(self._wait_reading if key.shared else self._wait, (key.name, self._mark(session, key)))

    def granted(self, session: Session, result: Result) -> int | None:
        return session.pid if result.rows else None

    async def leave(self, session: Session, key: Key) -> None:
        del key
        await session.run(_MYSQL_UNMARK)
        await session.run(_MYSQL_ROLLBACK)

    async def free(self, session: Session, key: Key) -> bool:
        del key
        if self.mariadb:
            await session.run(_MARIADB_COMMIT)
        else:  # MySQL has no blocks outside of stored programs
            await session.run(_MYSQL_UNMARK)
            await session.run(_MYSQL_COMMIT)
        return True


def _shared_mark(key: Key) -> str:
    """Return how the user locks of readers begin; the number of the session follows. GET_LOCK takes 64 characters."""
    return f"{key.text[:MARK_CHARS]}:r"


class PostgresqlRow(SessionBackend):
    """Processes that reach the same PostgreSQL database."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _dialect = "postgresql"
    _locking_class = _PostgresqlRowLocking


class MysqlRow(SessionBackend):
    """Processes that reach the same MariaDB or MySQL database."""

    capabilities = replace(_CAPABILITIES, min_ttl=1.0, ttl_granularity=1.0, waiters_visible=False)
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _dialect = "mysql"
    _locking_class = _MysqlRowLocking
