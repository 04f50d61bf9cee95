"""
What differs between databases, as data and short SQL.

Each dialect has the expression for its clock: ``now_us``, microseconds since 1970 in UTC, as an integer.
No time zone of a session, and no change to or from summer time, moves it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from lockkit.backends.sql.connection import Connection
from lockkit.backends.sql.errors import Kind, mysql_kind, postgresql_kind, sqlite_kind
from lockkit.backends.sql.statement import Statement
from lockkit.errors import ConfigurationError

CONNECT_SECONDS = 2
"""Time limit for a connection. Longer holds up callers of a server that hangs; shorter takes a busy one for dead. libpq
takes whole seconds only."""

STATEMENT_SECONDS = 3.0
"""Time limit for the answer to a statement; with `CONNECT_SECONDS` a call takes at most five seconds."""

KEEPALIVE_SECONDS = 30.0
"""Within how many seconds a dead connection is noticed, and how long one that is a lock, or waits for one, may be idle.
Longer than a load balancer allows loses locks; shorter sends more."""

LOCK_SECONDS = 0.25
"""How long the server lets a statement wait for others that have locked the row, the table or the file, before lockkit
sends it again: a caller may have as little time as that, and a statement that is left behind would lock for no caller.
Longer keeps its position in the server's queue for longer. MariaDB and MySQL count whole seconds: it is one there."""

SQLITE_LOCK_SECONDS = 0.02
"""The same for SQLite, where the client's other statements wait for this one meanwhile: renewals go first."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """
    One kind of database.

    Attributes:
        name: ``postgresql``, ``mysql`` (MariaDB too) or ``sqlite``.
        now_us: SQL for its clock, see the module.
        kind: Tells what an error is about.
        set_up: Awaited with each new connection, a label for messages, and seconds for each answer: checks the server
            and the connection's settings, and sets what holds for the session.
        connections_max: Connections kept for statements. A statement takes a millisecond, so few carry many threads;
            more would use up the server's for others. SQLite has one writer: a second connection of the same client
            would only compete with the first, and renewals could not go first.
    """

    name: Literal["postgresql", "mysql", "sqlite"]
    now_us: str
    kind: Callable[[BaseException], Kind]
    set_up: Callable[[Connection, str, float], Awaitable[None]]
    connections_max: int = 4


# clock_timestamp(), not now(): that is the time at which the transaction began, and it may have waited since.
_POSTGRESQL_NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"

# Only on a connection that leads to the server itself. A pooler that lends out sessions shows a number of its own for
# the server's process, and what is set there would stay for the next client of that session.
_POSTGRESQL_SET_UP = Statement(
    "SELECT CAST(current_setting('server_version_num') AS integer), pg_backend_pid() = $1, version(),"
    " current_setting('client_encoding'), CASE WHEN pg_backend_pid() = $1 THEN"
    " set_config('default_transaction_isolation', 'read committed', false)"
    " || set_config('statement_timeout', $2, false) || set_config('lock_timeout', $3, false)"
    # A grant that a crash of the server undoes, though the client knows of it, would be granted twice.
    " || CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false)"
    " ELSE '' END END"
)
_POSTGRESQL_OLDEST = 120_000


async def _set_up_postgresql(connection: Connection, label: str, seconds: float) -> None:
    pid = cast("Any", connection).pgconn.backend_pid
    limits = [f"{STATEMENT_SECONDS:g}s", f"{LOCK_SECONDS * 1000:.0f}ms"]
    result = await connection.run(_POSTGRESQL_SET_UP, [pid, *limits], seconds)
    version, direct, product, encoding = result.rows[0][:4]
    if product.startswith("CockroachDB"):
        # It speaks PostgreSQL's protocol, and its functions for advisory locks exist "for compatibility" and do nothing
        # ("Functions and Operators" in its documentation): every client would be granted every lock. And it refuses the
        # statement that releases a lock of the table, because it has no pg_notify.
        message = (
            f"{label} is {product.partition('(')[0].strip()}, on which lockkit has no locks: it has no pg_notify, and "
            "its advisory locks exclude nobody. Use PostgreSQL, or another backend"
        )
        raise ConfigurationError(message)
    if version < _POSTGRESQL_OLDEST:
        message = f"{label} is PostgreSQL {version // 10_000}: lockkit needs 12 or later"
        raise ConfigurationError(message)
    if encoding != "UTF8":  # names are sent as UTF-8
        message = (
            f"{label} is behind a pooler that does not pass on client_encoding=utf8, so a lock name would be another "
            f"one in {encoding}: connect to the server itself"
        )
        raise ConfigurationError(message)
    connection.pooled = not direct


# Not UNIX_TIMESTAMP(NOW(6)): it goes through the session's time zone, where an hour of each autumn comes twice.
_MYSQL_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_MYSQL_LOOK = Statement("SELECT VERSION(), @@log_bin, @@binlog_format")
# The mode says what a statement means: with SIMULTANEOUS_ASSIGNMENT, which ORACLE includes, assignments do not see
# those to their left, and the lock table would grant a lock whose end it does not write. This one refuses what does not
# fit; without one of its parts MySQL warns. And it makes no table with another engine than InnoDB, whose rows would not
# be locked.
_MYSQL_MODE = "STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"
# The others end a session with its first ROLLBACK, cut off rows, or refuse statements, if the server's default says so.
# And init_connect of the server may end autocommit, which drivers do not notice: it runs after the login was answered.
# Names are sent as text, are converted from the client's charset to the connection's, and compared as its bytes.
_MYSQL_SETTINGS = Statement(
    "SET SESSION character_set_client = utf8mb4, character_set_connection = utf8mb4, character_set_results = utf8mb4,"
    f" autocommit = 1, innodb_lock_wait_timeout = {max(1.0, LOCK_SECONDS):.0f},"
    f" lock_wait_timeout = {max(1.0, LOCK_SECONDS):.0f}, sql_mode = '{_MYSQL_MODE}',"
    " completion_type = 'NO_CHAIN', sql_select_limit = 18446744073709551615, sql_big_selects = 1"
)
_MYSQL_ISOLATION = Statement("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
_MYSQL_ISOLATION_LOGGED = Statement("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
_MYSQL_VERSION = re.compile(r"(?:5\.5\.5-)?(\d+)\.(\d+)")
_MARIADB_OLDEST = (10, 5)
_MYSQL_OLDEST = (8, 0)


async def _set_up_mysql(connection: Connection, label: str, seconds: float) -> None:
    version, logging, log_format = (await connection.run(_MYSQL_LOOK, (), seconds)).rows[0]
    found = _MYSQL_VERSION.match(version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    product, oldest = ("MariaDB", _MARIADB_OLDEST) if "MariaDB" in version else ("MySQL", _MYSQL_OLDEST)
    if numbers < oldest:
        message = f"{label} is {product} {version}: lockkit needs {oldest[0]}.{oldest[1]} or later"
        raise ConfigurationError(message)
    await connection.run(_MYSQL_SETTINGS, (), seconds)
    # With a log of statements InnoDB refuses to write at the lower level (error 1665).
    logged = int(logging) and log_format == "STATEMENT"
    await connection.run(_MYSQL_ISOLATION_LOGGED if logged else _MYSQL_ISOLATION, (), seconds)


# SQLite's clock counts milliseconds. 'now' is the same wherever it stands in one statement.
_SQLITE_NOW = (
    "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
)
_SQLITE_LOOK = Statement("SELECT sqlite_version()")
_SQLITE_PATIENCE = Statement(f"PRAGMA busy_timeout = {SQLITE_LOCK_SECONDS * 1000:.0f}")
_SQLITE_OLDEST = (3, 35)


async def _set_up_sqlite(connection: Connection, label: str, seconds: float) -> None:
    (version,) = (await connection.run(_SQLITE_LOOK, (), seconds)).rows[0]
    if tuple(map(int, version.split(".")))[:2] < _SQLITE_OLDEST:
        message = f"{label} is used through SQLite {version}: lockkit needs 3.35 or later"
        raise ConfigurationError(message)
    await connection.run(_SQLITE_PATIENCE, (), seconds)


_MYSQL = Dialect("mysql", _MYSQL_NOW, mysql_kind, _set_up_mysql)
_POSTGRESQL = Dialect("postgresql", _POSTGRESQL_NOW, postgresql_kind, _set_up_postgresql)
_DIALECTS = {
    "postgresql": _POSTGRESQL,
    "postgres": _POSTGRESQL,  # as platforms write it
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": Dialect("sqlite", _SQLITE_NOW, sqlite_kind, _set_up_sqlite, connections_max=1),
}


def dialect_named(name: str) -> Dialect:
    """Find a dialect by its name in URLs, which is SQLAlchemy's."""
    found = _DIALECTS.get(name)
    if found is None:
        message = f"lockkit knows no locks on {name} databases: it knows PostgreSQL, MariaDB, MySQL and SQLite"
        raise ConfigurationError(message)
    return found
