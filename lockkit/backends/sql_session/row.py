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

from dataclasses import replace

from lockkit.backends.sql_session.backend import CAPABILITIES, SessionBackend, options_of
from lockkit.backends.sql_session.mysql import MysqlRowLocking
from lockkit.backends.sql_session.postgresql import PostgresqlRowLocking

_OPTIONS = options_of("row", "lockkit_rows")

_CAPABILITIES = replace(
    CAPABILITIES,
    fair=False,
    caveat="A lock is an open transaction and a connection: it holds back VACUUM (PostgreSQL) or purge "
    "(MariaDB, MySQL), and a failover ends it without the holder's knowing until its next renewal.",
)


class PostgresqlRow(SessionBackend):
    """Processes that reach the same PostgreSQL database."""

    capabilities = _CAPABILITIES
    options = _OPTIONS
    _dialect = "postgresql"
    _locking_class = PostgresqlRowLocking


class MysqlRow(SessionBackend):
    """Processes that reach the same MariaDB or MySQL database."""

    capabilities = replace(_CAPABILITIES, min_ttl=1.0, ttl_granularity=1.0, waiters_visible=False)
    options = _OPTIONS
    _dialect = "mysql"
    _locking_class = MysqlRowLocking
