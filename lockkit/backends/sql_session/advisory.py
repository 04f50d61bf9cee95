"""
Advisory locks of PostgreSQL, user locks (``GET_LOCK``) of MariaDB and MySQL: ``?mode=advisory``.

Algorithm: the database has locks that mean nothing to itself, named by a number or a short text: here a hash of the
lock's name and of the table's. A holder has a connection for the lock alone, on PostgreSQL with a transaction open; a
waiter waits in the database's own queue. See `lockkit.backends.sql_session.backend` for the life of a lease, and
for what is in the table of leases beside it.

A lock that is free is taken by the statement that writes the lease, which is committed there and then: so the lock is
the session's (``pg_advisory_lock``), not that of a transaction, and outlives an error. Behind a pooler, which gives the
session to others, it is a transaction's (``pg_advisory_xact_lock``), and the lease is written beside it.

What the server must offer: PostgreSQL 12, MariaDB 10.5 or MySQL 8; a connection for every lock that is held or waited
for. It must be able to end a session that idles: ``idle_in_transaction_session_timeout`` on PostgreSQL,
``wait_timeout`` on MariaDB and MySQL.

Readers share the lock (``pg_advisory_lock_shared``) on PostgreSQL. While a writer waits, PostgreSQL grants it to no
reader that comes later, whether that waits or only tries. User locks have no shared mode. A writer becomes a reader by
taking the shared lock beside its own, and then freeing that; not behind a pooler, where a lock ends with its
transaction.

The hash: 64 bits on PostgreSQL, 192 on MariaDB and MySQL. Two names with the same hash are one lock: they exclude each
other needlessly, and a client that wants both at once waits for itself. With a million names in use the odds
are one in 37 million on PostgreSQL.

What it cannot promise: a promoted replica does not know the locks of the former primary.

Source: PostgreSQL, "13.3.5. Advisory Locks" and "54.12. pg_locks"; MySQL, "14.14 Locking Functions"; MariaDB,
"GET_LOCK".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from lockkit.backend import Option, Request
from lockkit.backends.sql.schema import Table
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_session.backend import SessionBackend, capabilities_of, options_of
from lockkit.backends.sql_session.locking import DELETE_AFTER_US, lease_table
from lockkit.backends.sql_session.mysql import MysqlLocking
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

_OPTIONS = options_of("advisory", "lockkit_advisory")

_CAPABILITIES = capabilities_of(
    fair=True,
    caveat="A lock is a connection, and names are hashed: a failover ends it without the holder's knowing until its "
    "next renewal.",
)


_PG_FREE = Statement("COMMIT;SELECT pg_advisory_unlock($1)")
_PG_FREE_TWICE = Statement("COMMIT;SELECT pg_advisory_unlock($1), pg_advisory_unlock($1)")
# A writer that was to become a reader, if the answer to that was lost, may have either lock.
_PG_FREE_SHARED = Statement(
    "COMMIT;SELECT pg_advisory_unlock_shared($1) OR pg_advisory_unlock($1), pg_advisory_unlock_all()"
)
_PG_UNLOCK_ALL = Statement("SELECT pg_advisory_unlock_all()")


class _PostgresqlAdvisoryLocking(PostgresqlLocking):
    @staticmethod
    def describe(name: str) -> list[Table]:
        return [lease_table(name)]

    def _make_statements(self, *tables: str) -> None:
        super()._make_statements(*tables)
        (leases,) = tables
        now = self.database.dialect.now_us
        self._make_locking(leases, now)
        self._make_waiting(now)
        self._make_downgrading(leases)
        self._make_leases(leases, now)

    def _make_locking(self, leases: str, now: str) -> None:
        """Make the statements that lock at once."""
        # On a session of our own the lock is the session's, so that the lease can be committed where it is taken: one
        # round trip. The time is read after the lock is had. Readers update the row of the lock one after the other,
        # each until the COMMIT in the same text.
        self._plan = self._planning(
            f"lockkit_try (bigint, text, text, text) AS INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" SELECT $2, $3, {now}, {now}, pg_backend_pid(), $4 WHERE pg_try_advisory_lock($1)"
            f"{UPDATE_LEASE} RETURNING token",
            f"lockkit_read (bigint, text, text, text, text) AS WITH counted AS (INSERT INTO {leases} AS l"
            f" {LEASE_COLUMNS} SELECT $2, '', {now}, {now}, 0, '' WHERE pg_try_advisory_lock_shared($1){COUNT_READER}"
            f" RETURNING token, granted_at_us) INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            " SELECT $5 || pg_backend_pid(), $3, token, granted_at_us, pg_backend_pid(), $4 FROM counted"
            f"{UPDATE_SHARE} RETURNING token",
        )
        # What idles afterwards is a transaction: that is what PostgreSQL before 14 has a limit for. The limit for
        # sessions of later versions needs neither BEGIN nor COMMIT, a tenth of the pair's time. But it would also end a
        # session that is kept for the next lock, which would then have to connect.
        taking = "EXECUTE lockkit_try ($1, $3, $4, $5);COMMIT AND CHAIN"
        sharing = "EXECUTE lockkit_read ($1, $3, $4, $5, $6);COMMIT AND CHAIN"
        trying = "SELECT pg_backend_pid(), CASE WHEN pg_try_advisory_xact_lock{0}($1) THEN {1} END"
        self._begin_writing = self._begin_with(trying.format("", now), f"BEGIN;{taking}")
        self._begin_reading = self._begin_with(trying.format("_shared", now), f"BEGIN;{sharing}")
        # By a session that has the lock from the queue already: a session may have it twice. It goes on in the
        # transaction in which it waited, whose COMMIT also takes back the limit for waiters.
        self._take = Statement(taking)
        self._share = Statement(sharing)

    def _make_waiting(self, now: str) -> None:
        """Make the statements that wait, by whether the lock is a transaction's, and whether it is shared."""
        offer = "SET LOCAL idle_in_transaction_session_timeout = $2"
        # Behind a pooler the lease is written on another connection, which compares this time.
        identity = f"SELECT pg_backend_pid(), {now}"
        self._waits = {
            (False, False): Statement(f"{offer};SELECT pg_advisory_lock($1)"),
            (False, True): Statement(f"{offer};SELECT pg_advisory_lock_shared($1)"),
            (True, False): Statement(f"{offer};SELECT pg_advisory_xact_lock($1);{identity}"),
            (True, True): Statement(f"{offer};SELECT pg_advisory_xact_lock_shared($1);{identity}"),
        }

    def _make_downgrading(self, leases: str) -> None:
        """Make the statements that downgrade, by whether the session has the lock twice."""
        # The shared lock does not wait, even with waiters: PostgreSQL puts a session that holds before those that wait
        # for it.
        downgrading = (
            f"COMMIT;BEGIN;SELECT pg_advisory_lock_shared($1);INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" SELECT $5 || pg_backend_pid(), owner, token, granted_at_us, session, metadata FROM {leases}"
            f" WHERE name = $3 AND owner = $4{UPDATE_SHARE};COMMIT AND CHAIN;"
            "SET LOCAL idle_in_transaction_session_timeout = $2;SELECT pg_advisory_unlock($1)"
        )
        self._downgrades = {False: Statement(downgrading), True: Statement(f"{downgrading}, pg_advisory_unlock($1)")}

    def _make_leases(self, leases: str, now: str) -> None:
        """Make the statements about leases that others than the lock's session run."""
        # pg_locks has a key of 64 bits in two halves, and 1 in objsubid to tell it from two keys of 32 bits.
        locks = (
            "SELECT {what} FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND"
            " database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND"
            " classid = CAST({high} AS oid) AND objid = CAST({low} AS oid) AND "
        )
        holds = locks.format(what="", high="CAST($6 AS bigint)", low="CAST($7 AS bigint)")
        self.write_lease = Statement(
            f"INSERT INTO {leases} AS l {LEASE_COLUMNS} VALUES ($1, $2, $3, $3, $5, $4){UPDATE_LEASE}"
            # A client that was granted the lock later would have a later time there. pg_locks is slow, so it is asked
            # only when the times do not show the order (the clock was set back).
            " WHERE excluded.granted_at_us > l.granted_at_us"
            f" OR EXISTS ({holds} granted AND pid = excluded.session)"
            f"{RETURNING}"
        )
        self.write_share = Statement(
            f"WITH counted AS (INSERT INTO {leases} AS l {LEASE_COLUMNS}"
            f" VALUES ($1, '', $3, $3, 0, ''){COUNT_READER}"
            f" WHERE EXISTS ({holds} granted AND pid = $5) RETURNING token)"
            f" INSERT INTO {leases} AS l {LEASE_COLUMNS} SELECT $8, $2, token, $3, $5, $4 FROM counted"
            f"{UPDATE_SHARE}{RETURNING}"
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
        parameters = (session.pid, *halves(key.number))
        return (*parameters, f"{self.shares_key(key)}{session.pid}") if key.shared else parameters

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, *halves(key.number), self.shares_key(key))

    def share_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return halves(key.number)

    def _lease(self, key: Key, request: Request) -> tuple[Parameter, ...]:
        """Return what a session of our own writes when it takes the lock."""
        lease = (key.name, request.owner, request.metadata)
        return (*lease, self.shares_key(key)) if key.shared else lease

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        session.doubled = False
        result = await self._begin(session, key, key.number, limit, *self._lease(key, request))
        if session.pooled:
            identity = self.granted(session, result)
            return None if identity is None else Taken(identity)
        return Taken(session.pid, result.rows[0][0]) if result.rows else None

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
        session.doubled = True
        taking = self._share if key.shared else self._take
        result = await session.run(taking, (key.number, limit, *self._lease(key, request)))
        return Taken(identity, result.rows[0][0]) if result.rows else None

    async def downgrade(self, session: Session, key: Key, limit: int, owner: str) -> None:
        parameters = (key.number, limit, key.name, owner, self.shares_key(key))
        await session.run(self._downgrades[session.doubled], parameters)
        session.doubled = False

    async def leave(self, session: Session, key: Key) -> None:
        await super().leave(session, key)
        if not session.pooled:
            await session.run(_PG_UNLOCK_ALL)

    async def free(self, session: Session, key: Key) -> bool:
        if session.pooled:
            return await super().free(session, key)
        # Also when an error has ended the transaction: the lock is the session's.
        statement = _PG_FREE_SHARED if key.shared else _PG_FREE_TWICE if session.doubled else _PG_FREE
        return bool((await session.run(statement, (key.number,))).rows[0][0])


_WAIT_SECONDS = 31_536_000
"""How long a waiter stays in the queue before it joins it anew. Without a limit is not the same number everywhere."""

_MYSQL_LOCK = Statement("SELECT GET_LOCK($1, $2)")
# The session has no other lock, but this one perhaps twice.
_MYSQL_UNLOCK = Statement("SELECT RELEASE_ALL_LOCKS()")


class _MysqlAdvisoryLocking(MysqlLocking):
    @staticmethod
    def describe(name: str) -> list[Table]:
        return [lease_table(name)]

    def _make_statements(self, *tables: str) -> None:
        super()._make_statements(*tables)
        (leases,) = tables
        now = self.database.dialect.now_us
        # The lease is committed in the statement that locks: one round trip.
        self._take = Statement(
            f"INSERT INTO {leases} (name, owner, token, granted_at_us, session, metadata)"
            f" SELECT $1, $2, LAST_INSERT_ID({now}), {now}, CONNECTION_ID(), $3 FROM DUAL WHERE GET_LOCK($4, 0) = 1"
            " ON DUPLICATE KEY UPDATE owner = VALUES(owner),"
            " token = LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), granted_at_us = VALUES(granted_at_us),"
            " session = VALUES(session), metadata = VALUES(metadata)",
            frequent=True,
        )
        self.find_holder = self._looking(leases, "IS_USED_LOCK($2)")

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, key.text)

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        await self._limited(session, limit)
        return await self._taken(session, key, request)

    async def _taken(self, session: Session, key: Key, request: Request) -> Taken | None:
        result = await session.run(self._take, (key.name, request.owner, request.metadata, key.text))
        # NULL of GET_LOCK (out of memory, or this connection is being ended) counts as busy: the queue decides.
        return Taken(session.pid, result.last_id) if result.changed else None

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        await self._waiter_limit(session, limit)
        session.send(_MYSQL_LOCK, (key.text, _WAIT_SECONDS))

    def granted(self, session: Session, result: Result) -> int | None:
        # 0: a year has passed. NULL: the statement was ended. In either case the lock is not granted.
        return session.pid if result.rows[0][0] == 1 else None

    async def prove(self, session: Session, key: Key, limit: int, request: Request, identity: int) -> Taken | None:
        del identity
        await self._limited(session, limit)
        # It has the lock from the queue already: a session may have it twice.
        return await self._taken(session, key, request)

    async def leave(self, session: Session, key: Key) -> None:
        del key
        await session.run(_MYSQL_UNLOCK)

    async def free(self, session: Session, key: Key) -> bool:
        del key
        return bool((await session.run(_MYSQL_UNLOCK)).rows[0][0])


class PostgresqlAdvisory(SessionBackend):
    """Processes that reach the same PostgreSQL database."""

    capabilities = replace(_CAPABILITIES, downgrade=True)
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _dialect = "postgresql"
    _locking_class = _PostgresqlAdvisoryLocking


class MysqlAdvisory(SessionBackend):
    """Processes that reach the same MariaDB or MySQL server: its user locks are not of one database."""

    capabilities = replace(
        _CAPABILITIES, min_ttl=1.0, ttl_granularity=1.0, waiters_visible=False, shared_mode=False, fair_shared=False
    )
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    _dialect = "mysql"
    _locking_class = _MysqlAdvisoryLocking
