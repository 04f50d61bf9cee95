"""How mode=row and mode=advisory lock on PostgreSQL; see `lockkit.backends.sql_session.row` and ``advisory``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lockkit.backend import Request
from lockkit.backends.sql.connection import Parameter, Result, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql_session.locking import DELETE_AFTER_US, Locking
from lockkit.backends.sql_session.session import Key, Session, Taken
from lockkit.units import Seconds
from lockkit.validation import NAME_BYTES_MAX

if TYPE_CHECKING:
    from lockkit.backends.sql.postgresql import PsycopgConnection

_NO_CLIENT = (
    "CASE WHEN current_setting('client_connection_check_interval', true) IS NOT NULL AND version() LIKE '%linux%'"
    " THEN set_config('client_connection_check_interval', '2s', {local}) END"
)
"""Has PostgreSQL 14 and later end a statement that waits for a lock, soon after its client has gone. Longer keeps such
waiters for longer, shorter asks the server's kernel more often."""

_NO_END = (
    "CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL"
    " THEN set_config('transaction_timeout', '0', {local}) END"
)
"""Has PostgreSQL 17 and later end no transaction, which is the lock or a waiter, because it has been open for long."""

_SESSION = Statement(
    "SET statement_timeout = 0; SET lock_timeout = 0; SET synchronous_commit = off; SELECT"
    " (SELECT CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) FROM pg_stat_get_activity(pg_backend_pid())),"
    f" {_NO_CLIENT.format(local='false')}, {_NO_END.format(local='false')}"
)
_PID = Statement("SELECT pg_backend_pid()")
_CANCEL = Statement("SELECT pg_cancel_backend(CAST($1 AS integer))")
_END = Statement("SELECT pg_terminate_backend(CAST($1 AS integer))")
# Not another session that has got the same number since.
_END_WAITER = Statement(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_get_activity(CAST($1 AS integer))"
    " WHERE CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) = CAST($2 AS bigint)"
)
# Its own server tells no start behind a pooler, which may also have the session served by another one by now.
_WAITS = Statement(
    "SELECT CAST($2 AS bigint) = 0 OR EXISTS (SELECT FROM pg_stat_get_activity(CAST($1 AS integer))"
    " WHERE state = 'active' AND CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) = CAST($2 AS bigint))"
)
_OBSTRUCTS = Statement(
    "SELECT EXISTS (SELECT FROM pg_locks mine JOIN pg_locks theirs ON theirs.virtualxid = mine.virtualxid"
    " WHERE mine.pid = CAST($1 AS integer) AND mine.locktype = 'virtualxid' AND mine.granted"
    " AND theirs.locktype = 'virtualxid' AND NOT theirs.granted)"
)
_OFFER_MS = 250
"""A waiter that is granted the lock has at least so long to use it. Longer keeps others waiting behind one that is
stopped, with a short ttl; shorter throws out waiters on a busy machine."""
_KEEP = Statement("SET LOCAL idle_in_transaction_session_timeout = $1")
_ROLLBACK = Statement("ROLLBACK")
_COMMIT = Statement("COMMIT")
_LEASE_COLUMNS = "(name, owner, token, granted_at_us, session, metadata)"
_UPDATE_LEASE = (
    " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = greatest(l.token + 1, excluded.token),"
    " granted_at_us = excluded.granted_at_us, session = excluded.session, metadata = excluded.metadata"
)
_COUNT_READER = (
    " ON CONFLICT (name) DO UPDATE SET token = greatest(l.token + 1, excluded.token),"
    " granted_at_us = excluded.granted_at_us, session = 0"
)
"""The row of the lock when a reader is granted it: it has the token, and names no session that writes."""
_UPDATE_SHARE = _UPDATE_LEASE.replace("greatest(l.token + 1, excluded.token)", "excluded.token")
# A crash of the server frees the lock, and the time is then behind the token: no need to wait for a disk.
_RETURNING = " RETURNING token, set_config('synchronous_commit', 'off', true)"


class _PostgresqlLocking(Locking):
    """PostgreSQL: ``idle_in_transaction_session_timeout`` ends a session whose transaction is, or guards, the lock."""

    units = 1000
    limit_max = 2_147_483_647  # 24.8 days; for a longer ttl there is none
    right_to_end = "have your role granted pg_signal_backend"
    cancel = _CANCEL
    end_session = _END

    _plan: Statement
    """Prepares what the texts that begin execute, once in a session."""
    _begins: dict[tuple[bool, bool], Statement]
    """Begin a transaction and lock, in one round trip; by whether it is behind a pooler, and whether to share."""

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        # Schema and name, as PostgreSQL finds the table. Of what is in "public", as most is, the name alone.
        self.find_table = Statement(
            "SELECT CASE n.nspname WHEN 'public' THEN '' ELSE n.nspname || '.' END || c.relname FROM pg_class c"
            f" JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('{self.quoted[0]}')"
        )

    def limit(self, ttl: Seconds) -> int:
        limit = super().limit(ttl)
        return 0 if limit == self.limit_max else limit

    def seconds(self, limit: int, ttl: Seconds) -> float:
        return limit / self.units if limit else ttl

    def _make_beginning(self, plan_try: str, plan_read: str, *, own: tuple[str, str], pooled: tuple[str, str]) -> None:
        """Make `_plan` and `_begins`; `own` and `pooled` are texts that lock, for writers and for readers."""
        # Cancelled halfway, the same text is sent again: what was planned is not undone with the transaction.
        plans = f"DEALLOCATE ALL;PREPARE lockkit_try {plan_try};PREPARE lockkit_read {plan_read}"
        self._plan = Statement(plans.replace("$", "$$"))
        limit = "SET idle_in_transaction_session_timeout = $2;BEGIN"
        # What a session of our own has set at its start is enough, but for the limit ($2 in ms), which changes with the
        # ttl. Behind a pooler sessions are lent for one transaction, so each of them sets it all, and plans nothing.
        settings = {
            "idle_in_transaction_session_timeout": "CAST($2 AS text)",
            "statement_timeout": "'0'",
            "lock_timeout": "'0'",
            "synchronous_commit": "'off'",
        }
        newer = ", ".join(setting.format(local="true") for setting in (_NO_CLIENT, _NO_END))
        told = ", ".join(f"set_config('{name}', {value}, true)" for name, value in settings.items())
        all_ = f"BEGIN ISOLATION LEVEL READ COMMITTED;SELECT {told}, {newer}"
        self._begins = {
            (behind, bool(reads)): Statement(f"{begin};{text}")
            for behind, begin, texts in ((False, limit, own), (True, all_, pooled))
            for reads, text in enumerate(texts)
        }

    async def set_up(self, session: Session) -> None:
        if not session.pooled:
            session.pid = _psycopg(session).pgconn.backend_pid
            # Nothing that this session writes need outlive a crash of the server: it frees the lock in any case.
            session.started = (await session.run(_SESSION)).rows[0][0]

    async def _begin(self, session: Session, key: Key, *parameters: Parameter) -> Result:
        if not session.pooled and not session.planned:
            await session.run(self._plan)
        session.planned = False  # until it is answered, and well, nothing is known
        result = await session.run(self._begins[session.pooled, key.shared], parameters)
        session.planned = True
        return result

    def _waiter_limit(self, limit: int) -> int:
        """Give the limit for a session that waits: see `Locking.enqueue`."""
        return min(limit, max(limit // 2, _OFFER_MS))

    async def blocks_others(self, session: Session, answer_by: float) -> bool:
        result = await self.database.run(_OBSTRUCTS, (session.pid,), again=True, answer_by=answer_by)
        return bool(result.rows[0][0])

    async def waits(self, session: Session, key: Key, answer_by: float) -> bool:
        del key
        parameters = (session.pid, session.started)
        result = await self.database.run(_WAITS, parameters, again=True, answer_by=answer_by)
        return bool(result.rows[0][0])

    def keep(self, session: Session, limit: int) -> None:
        session.send(_KEEP, (limit,))

    async def leave(self, session: Session) -> None:
        if _psycopg(session).in_transaction:
            await session.run(_ROLLBACK)

    async def free(self, session: Session, key: Key) -> bool:
        del key
        if _psycopg(session).failed:
            # For example a renewal that was cancelled: that ended the lock, and COMMIT would not say so.
            await session.run(_ROLLBACK)
            return False
        await session.run(_COMMIT)
        return True

    async def end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        del key
        await self.database.run(_END_WAITER, (session.pid, session.started), again=True, answer_by=answer_by)

    def shares_key(self, key: Key) -> str:
        return f"+read/{key.text}/".ljust(NAME_BYTES_MAX + 1, ".")

    def token(self, result: Result) -> int | None:
        return result.rows[0][0] if result.rows else None


def _halves(number: int) -> tuple[int, int]:
    """Split a key of 64 bits as pg_locks shows it: both halves without a sign."""
    bits = number & (2**64 - 1)
    return bits >> 32, bits & (2**32 - 1)


def _psycopg(session: Session) -> PsycopgConnection:
    return cast("PsycopgConnection", session.connection)


class PostgresqlRowLocking(_PostgresqlLocking):
    """The holder locks the row of the lock in an open transaction."""

    rows_table = True

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        rows, leases = self.quoted
        now = database.dialect.now_us
        # Not NOWAIT: its error would end the transaction in which we then want to wait.
        found = f"SELECT pg_backend_pid(), txid_current() FROM {rows} WHERE name = $1"
        entering = f"{found} AND pg_try_advisory_xact_lock_shared($2) FOR SHARE SKIP LOCKED"
        writing, reading = f"{found} FOR UPDATE SKIP LOCKED", entering.replace("$2", "$3")
        self._make_beginning(
            f"(text) AS {writing}",
            f"(text, bigint) AS {entering}",
            own=("EXECUTE lockkit_try ($1)", "EXECUTE lockkit_read ($1, $3)"),
            pooled=(writing, reading),
        )
        self._again = {False: Statement(writing), True: Statement(reading)}
        offer = "SET LOCAL idle_in_transaction_session_timeout = $2"
        self._waits = {
            False: Statement(f"{offer};SELECT pg_advisory_xact_lock($3);{found} FOR UPDATE"),
            True: Statement(f"{offer};SELECT pg_advisory_xact_lock_shared($3);{found} FOR SHARE"),
        }
        self._insert = Statement(f"INSERT INTO {rows} (name) VALUES ($1) ON CONFLICT (name) DO NOTHING")

        clock = f"(SELECT {now} AS now_us) AS clock"
        self.write_lease = Statement(
            f"INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" SELECT $1, $2, now_us, now_us, $3, $4 FROM {clock}"
            f"{_UPDATE_LEASE} WHERE txid_status(excluded.session) = 'in progress'{_RETURNING}"
        )
        self.write_share = Statement(
            f"WITH counted AS (INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" SELECT $1, '', now_us, now_us, 0, '' FROM {clock}"
            f"{_COUNT_READER} WHERE txid_status($3) = 'in progress' RETURNING token, granted_at_us)"
            f" INSERT INTO {leases} AS l {_LEASE_COLUMNS} SELECT $5, $2, token, granted_at_us, $3, $4 FROM counted"
            f"{_UPDATE_SHARE}{_RETURNING}"
        )
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

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        return (f"{self.shares_key(key)}{session.pid}",) if key.shared else ()

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, *self.shares_range(key), *_halves(key.number))

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        parameters = (key.name, limit, key.number)
        result = await self._begin(session, key, *parameters)
        # Nothing was found: is the row locked, or is there none?
        if not result.rows:
            inserted = await self.database.run(self._insert, (key.name,), again=True, answer_by=request.answer_by)
            if inserted.changed:
                result = await session.run(self._again[key.shared], parameters)
        identity = self.granted(session, result)
        if identity is not None:
            return (identity, None)
        if session.pooled:  # another process may serve each transaction
            session.pid = (await session.run(_PID)).rows[0][0]
        return None

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        session.send(self._waits[key.shared], (key.name, self._waiter_limit(limit), key.number))

    def granted(self, session: Session, result: Result) -> int | None:
        if not result.rows:
            return None  # the row was deleted meanwhile
        session.pid, identity = result.rows[0]
        return int(identity)


_FREE = Statement("COMMIT;SELECT pg_advisory_unlock($1)")
# A writer that was to become a reader, if the answer to that was lost, may have either lock.
_FREE_SHARED = Statement(
    "COMMIT;SELECT pg_advisory_unlock_shared($1) OR pg_advisory_unlock($1), pg_advisory_unlock_all()"
)
_UNLOCK_ALL = Statement("SELECT pg_advisory_unlock_all()")


class PostgresqlAdvisoryLocking(_PostgresqlLocking):
    """
    The holder has the lock on a session of its own, or behind a pooler in a transaction.

    On a session of our own the lease can be committed where the lock is taken: one round trip. The time is read after
    the lock is had. Readers update the row of the lock one after the other, each until the COMMIT in the same text.

    What idles afterwards is a transaction: that is what PostgreSQL before 14 has a limit for. The limit for sessions of
    later versions needs neither BEGIN nor COMMIT, a tenth of the pair's time. But it would also end a session that is
    kept for the next lock, which would then have to connect.
    """

    rows_table = False

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        (leases,) = self.quoted
        now = database.dialect.now_us
        # Whether the session has the lock from the queue already, in whose transaction it goes on then: its COMMIT also
        # takes back the limit for waiters.
        taking = "EXECUTE lockkit_try ($1, $3, $4, $5, {0});COMMIT AND CHAIN".format
        sharing = "EXECUTE lockkit_read ($1, $3, $4, $5, {0}, $6);COMMIT AND CHAIN".format
        trying = "SELECT pg_backend_pid(), CASE WHEN pg_try_advisory_xact_lock{0}($1) THEN {1} END"
        self._make_beginning(
            f"(bigint, text, text, text, boolean) AS INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" SELECT $2, $3, {now}, {now}, pg_backend_pid(), $4 WHERE $5 OR pg_try_advisory_lock($1)"
            f"{_UPDATE_LEASE} RETURNING token",
            f"(bigint, text, text, text, boolean, text) AS WITH counted AS (INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" SELECT $2, '', {now}, {now}, 0, '' WHERE $5 OR pg_try_advisory_lock_shared($1){_COUNT_READER}"
            f" RETURNING token, granted_at_us) INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            " SELECT $6 || pg_backend_pid(), $3, token, granted_at_us, pg_backend_pid(), $4 FROM counted"
            f"{_UPDATE_SHARE} RETURNING token",
            own=(taking("false"), sharing("false")),
            pooled=(trying.format("", now), trying.format("_shared", now)),
        )
        self._take = {False: Statement(taking("true")), True: Statement(sharing("true"))}
        offer = "SET LOCAL idle_in_transaction_session_timeout = $2"
        # Behind a pooler the lease is written on another connection, which compares this time.
        identity = f"SELECT pg_backend_pid(), {now}"
        self._waits = {
            (False, False): Statement(f"{offer};SELECT pg_advisory_lock($1)"),
            (False, True): Statement(f"{offer};SELECT pg_advisory_lock_shared($1)"),
            (True, False): Statement(f"{offer};SELECT pg_advisory_xact_lock($1);{identity}"),
            (True, True): Statement(f"{offer};SELECT pg_advisory_xact_lock_shared($1);{identity}"),
        }
        # The shared lock does not wait, even with waiters: PostgreSQL puts a session that holds before those that wait
        # for it.
        self._downgrade = Statement(
            f"COMMIT;BEGIN;SELECT pg_advisory_lock_shared($1);INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" SELECT $5 || pg_backend_pid(), owner, token, granted_at_us, session, metadata FROM {leases}"
            f" WHERE name = $3 AND owner = $4{_UPDATE_SHARE};COMMIT AND CHAIN;"
            "SET LOCAL idle_in_transaction_session_timeout = $2;SELECT pg_advisory_unlock($1)"
        )
        self._write_leases(leases, now)

    def _write_leases(self, leases: str, now: str) -> None:
        """Write the statements that ask which session has the lock."""
        # pg_locks has a key of 64 bits in two halves, and 1 in objsubid to tell it from two keys of 32 bits.
        locks = (
            "SELECT {what} FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND"
            " database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND"
            " classid = CAST({high} AS oid) AND objid = CAST({low} AS oid) AND "
        )
        holds = locks.format(what="", high="CAST($6 AS bigint)", low="CAST($7 AS bigint)")
        self.write_lease = Statement(
            f"INSERT INTO {leases} AS l {_LEASE_COLUMNS} VALUES ($1, $2, $3, $3, $5, $4){_UPDATE_LEASE}"
            # A client that was granted the lock later would have a later time there. pg_locks is slow, so it is asked
            # only when the times do not show the order (the clock was set back).
            " WHERE excluded.granted_at_us > l.granted_at_us"
            f" OR EXISTS ({holds} granted AND pid = excluded.session)"
            f"{_RETURNING}"
        )
        self.write_share = Statement(
            f"WITH counted AS (INSERT INTO {leases} AS l {_LEASE_COLUMNS}"
            f" VALUES ($1, '', $3, $3, 0, ''){_COUNT_READER}"
            f" WHERE EXISTS ({holds} granted AND pid = $5) RETURNING token)"
            f" INSERT INTO {leases} AS l {_LEASE_COLUMNS} SELECT $8, $2, token, $3, $5, $4 FROM counted"
            f"{_UPDATE_SHARE}{_RETURNING}"
        )
        keyed = locks.format(what="pid", high="CAST($3 AS bigint)", low="CAST($4 AS bigint)")
        self.delete_shares = Statement(
            f"DELETE FROM {leases} WHERE name >= $1 AND name < $2 AND granted_at_us < {now} - {DELETE_AFTER_US}"
            f" AND session NOT IN ({keyed} granted)"
        )
        number = {"high": "CAST($2 AS bigint)", "low": "CAST($3 AS bigint)"}
        held = locks.format(what="pid, mode = 'ShareLock' AS reads", **number)
        waiting = locks.format(what="count(*)", **number)
        self.find_holder = Statement(
            f"SELECT k.pid, l.owner, l.token, l.metadata, ({waiting} NOT granted), k.reads FROM ({held} granted) k"
            f" LEFT JOIN {leases} l ON l.name = CASE WHEN k.reads THEN $4 || CAST(k.pid AS text) ELSE $1 END"
            " AND l.session = k.pid ORDER BY l.token"
        )

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        parameters = (session.pid, *_halves(key.number))
        return (*parameters, f"{self.shares_key(key)}{session.pid}") if key.shared else parameters

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, *_halves(key.number), self.shares_key(key))

    def share_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return _halves(key.number)

    def _lease(self, key: Key, request: Request) -> tuple[Parameter, ...]:
        """Return what a session of our own writes when it takes the lock."""
        return (key.name, request.owner, request.metadata, self.shares_key(key))

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        result = await self._begin(session, key, key.number, limit, *self._lease(key, request))
        if session.pooled:
            identity = self.granted(session, result)
            return None if identity is None else (identity, None)
        return (session.pid, result.rows[0][0]) if result.rows else None

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        session.send(self._waits[session.pooled, key.shared], (key.number, self._waiter_limit(limit)))

    def granted(self, session: Session, result: Result) -> int | None:
        if not session.pooled:
            return session.pid  # what waits for the lock returns when it has it
        session.pid, granted_at_us = result.rows[0]
        return None if granted_at_us is None else int(granted_at_us)

    async def prove(self, session: Session, key: Key, limit: int, request: Request, identity: int) -> Taken | None:
        if session.pooled:
            return await super().prove(session, key, limit, request, identity)
        result = await session.run(self._take[key.shared], (key.number, limit, *self._lease(key, request)))
        return (identity, result.rows[0][0]) if result.rows else None

    async def downgrade(self, session: Session, key: Key, limit: int, owner: str) -> None:
        parameters = (key.number, limit, key.name, owner, self.shares_key(key))
        await session.run(self._downgrade, parameters)

    async def leave(self, session: Session) -> None:
        await super().leave(session)
        if not session.pooled:
            await session.run(_UNLOCK_ALL)

    async def free(self, session: Session, key: Key) -> bool:
        if session.pooled:
            return await super().free(session, key)
        # Also when an error has ended the transaction: the lock is the session's.
        statement = _FREE_SHARED if key.shared else _FREE
        return bool((await session.run(statement, (key.number,))).rows[0][0])
