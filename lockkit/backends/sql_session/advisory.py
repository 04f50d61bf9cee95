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

from dataclasses import replace

from lockkit.backends.sql_session.backend import CAPABILITIES, SessionBackend, options_of
from lockkit.backends.sql_session.mysql import MysqlAdvisoryLocking
from lockkit.backends.sql_session.postgresql import PostgresqlAdvisoryLocking

_OPTIONS = options_of("advisory", "lockkit_advisory")


class PostgresqlAdvisory(SessionBackend):
    """Processes that reach the same PostgreSQL database."""

    capabilities = replace(CAPABILITIES, downgrade=True)
    options = _OPTIONS
    _dialect = "postgresql"
    _locking_class = PostgresqlAdvisoryLocking


class MysqlAdvisory(SessionBackend):
    """Processes that reach the same MariaDB or MySQL server: its user locks are not of one database."""

    capabilities = replace(
        CAPABILITIES, min_ttl=1.0, ttl_granularity=1.0, waiters_visible=False, shared_mode=False, fair_shared=False
    )
    options = _OPTIONS
    _dialect = "mysql"
    _locking_class = MysqlAdvisoryLocking
