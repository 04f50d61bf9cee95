"""
What differs between databases, as data and short SQL: their errors, clocks and settings.

Of an error two tables tell what it is about, and which `LockError` says what to do.
Each dialect has the expression for its clock: ``now_us``, microseconds since 1970 in UTC, as an integer. No time zone
of a session, and no change to or from summer time, moves it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from ssl import SSLError
from typing import Any, Literal, TypeAlias, cast

from lockkit.backends.sql.connection import Connection, Statement
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

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


# -- errors ---------------------------------------------------------------------------------------------------------

Kind: TypeAlias = str
"""What an error is about: one of the keys of `_UNAVAILABLE` and `_CONFIGURATION`."""


class MissingTable(ConfigurationError):
    """The table is not there. A backend catches it, and makes the table or says what to do."""


class AlreadyThere(ConfigurationError):
    """The table or column to be made is there already: nothing is left to do."""


CONFLICTS: frozenset[Kind] = frozenset({"deadlock", "stale", "new table", "unprepared"})
"""
The database gave the statement, and its transaction, up for others: it did nothing, retry.

- ``deadlock``: others waited for what it had locked.
- ``stale``: its transaction began before others wrote what it would overwrite.
- ``new table``: its transaction began before a table was made or altered.
- ``unprepared``: others dropped what the connection had prepared, or made its table anew. The connection forgets it.
"""

_UNAVAILABLE: Mapping[Kind, str] = {
    **dict.fromkeys(CONFLICTS, "gave the statement up for others repeatedly: is it overloaded?"),
    "locked": "is locked by another transaction for longer than a statement may wait",
    # The server or lockkit ended it for taking too long; whether it took effect is unknown.
    "timeout": "did not answer in time: is it overloaded, stopped, cut off, or locked by another transaction?",
    "no session": "has no such session",  # that was to be ended
    "full": "has no space left on its disk: nothing can be locked until there is some",
    "crowded": "has no room for another connection: see its max_connections",
    # There is none, or it ended; whether the statement took effect is unknown.
    "connection": "cannot be reached, or ended the connection: is it running, and reachable from here?",
    "other": "refused the statement",  # not in the tables below
}
_CONFIGURATION: Mapping[Kind, str] = {
    "no table": "has no such table",
    "no column": "has a table or a view of this name that lacks a column: run lockkit migrate, or give another table=",
    "exists": "has something else of this name: give another table=",
    "unfit": "has something of this name that is no table of lockkit's, such as a view: rename that, or give another "
    "table=",
    "denied": "denies this user a right: SELECT, INSERT, UPDATE and DELETE are needed, and CREATE or lockkit migrate "
    "before",
    "login": "refuses the login: see user name, password and the server's rules for this host",
    # They do not agree on encryption, or one does not trust the other's certificate.
    "tls": "cannot be connected to with these settings for TLS: check the certificates, and the driver's options for "
    "TLS",
    "option": "cannot be connected to, since the driver does not accept an option of the URL",
    "no database": "cannot be opened: check the name of the database, and the rights to its file. The database, or the "
    "directory of its file, must exist",
    "read-only": "is read-only here, and a lock must be written: give the primary, and a user that may write there",
    "no engine": "makes no tables with InnoDB, which locks need: see its storage engines",
    "encoding": "cannot store a character of this name in the database's encoding: use other names, or a database in "
    "UTF-8",
    "no transaction": "is a pooler that takes no transactions: set its pool mode to transaction or session, or use "
    "mode=table",
}
_CLASSES: Mapping[Kind, type[ConfigurationError]] = {"no table": MissingTable, "exists": AlreadyThere}


def translate(kind: Kind, text: str, label: str) -> LockError:
    """Make a `LockError` of an error of a database."""
    if kind in _UNAVAILABLE:
        return BackendUnavailable(f"{label} {_UNAVAILABLE[kind]} ({text})")
    return _CLASSES.get(kind, ConfigurationError)(f"{label} {_CONFIGURATION[kind]} ({text})")


def _by_code(codes: Mapping[Kind, str]) -> dict[str, Kind]:
    return {code: kind for kind, some in codes.items() for code in some.split()}


def _of_text(parts: Mapping[str, Kind], text: str) -> Kind | None:
    return next((kind for part, kind in parts.items() if part in text), None)


# "Appendix A. PostgreSQL Error Codes": whole codes first, then classes.
_SQLSTATES = _by_code(
    {
        "stale": "40001",
        "deadlock": "40P01",
        "locked": "55P03",
        "timeout": "57014",
        "no table": "42P01 3F000",
        "no column": "42703",
        "exists": "42P07 42710 42701 23505",
        "unfit": "42804 42809 42P10 55000 23",
        "denied": "42501",
        "no database": "3D000",
        "read-only": "25006",
        "full": "53100",
        "crowded": "53300",
        "unprepared": "26000 0A000 42P05",
        "encoding": "22P05 22021",
        "login": "28",
        "connection": "08 57 25",
    }
)

# psycopg has no code for a connection that was refused, or ended by a pooler.
_POSTGRESQL_TEXTS = {
    "too many ": "crowded",
    "remaining connection slots": "crowded",
    "password authentication failed": "login",
    "no password supplied": "login",
    "pg_hba.conf": "login",
    "authentication failed": "login",
    "authentication method requirement": "login",
    "permission denied": "login",
    "role ": "login",
    "certificate": "tls",
    "private key": "tls",
    "does not support SSL": "tls",
    "does not exist": "no database",
    "not currently accepting connections": "no database",
    "statement pooling mode": "no transaction",
    # libpq reads a URL's options when it connects.
    ' value: "': "option",
    "connection option": "option",
}


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's code, of any driver: ``sqlstate``, ``pgcode`` or the field C of pg8000's; "" if none."""
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not code and error.args and isinstance(error.args[0], dict):
        code = error.args[0].get("C")
    return code or ""


def postgresql_kind(error: BaseException) -> Kind:
    """Tell what an error of PostgreSQL, or of its driver, is about."""
    code = sqlstate(error)
    if code == "0A000" and "cached plan" not in str(error):
        return "other"
    if code:
        return _SQLSTATES.get(code) or _SQLSTATES.get(code[:2]) or "other"
    if isinstance(error, TimeoutError):
        return "timeout"
    return _of_text(_POSTGRESQL_TEXTS, str(error)) or "connection"


_CLIENTS_OWN = range(2000, 3000)

_OPTION_PREVENTS = 1290
"""The error names the option."""

_OPTIONS = {"read-only": "read-only", "read_only": "read-only", "NO_ENGINE_SUBSTITUTION": "no engine"}

# MariaDB: "MariaDB Error Code Reference"; MySQL: "Server Error Message Reference". 2000 to 2999 are the client's.
_ERRNOS = _by_code(
    {
        "deadlock": "1213",
        "stale": "1020",
        "new table": "1412",
        "locked": "1205 3572",
        "timeout": "3024 1969 1317",
        "no table": "1146",
        "no column": "1054",
        "exists": "1050 1060",
        "unfit": "1048 1288 1347 1356 1364 1471 1526",
        "denied": "1044 1142 1143 1227 1370 1095",
        "no session": "1094",
        "login": "1045 1130 1698 1251 1820 1862 2059 3118 4151",
        "tls": "2026 3159",
        "no database": "1049 1046",
        "no engine": "1286 3161",
        "read-only": "1792 1836",
        "full": "1021 1114",
        "crowded": "1040 1203 1226",
        "connection": "1053 1927 3032 3169 4031",
    }
)


def mysql_number(error: BaseException) -> int:
    """Return the number of a driver's error, 0 if it has none: its first argument in most drivers, or ``errno``."""
    numbers = (getattr(error, "errno", None), *error.args[:1])
    return next((number for number in numbers if isinstance(number, int)), 0)


def mysql_kind(error: BaseException) -> Kind:
    """Tell what an error of MariaDB or MySQL, or of their driver, is about."""
    number = mysql_number(error)
    if number == _OPTION_PREVENTS:
        return _of_text(_OPTIONS, str(error)) or "other"
    kind = _ERRNOS.get(str(number))
    if kind is not None:
        return kind
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return "timeout"
    # Of Python's ssl. The drivers number it as a host that is not there, and aiomysql does not say more.
    if "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error.__cause__, SSLError):
        return "tls"
    return "connection" if number == 0 or number in _CLIENTS_OWN else "other"


# "Result and Error Codes" of SQLite; extended codes begin with the plain one.
_SQLITE_CODES = {
    "SQLITE_BUSY_SNAPSHOT": "stale",
    "SQLITE_BUSY": "locked",
    "SQLITE_LOCKED": "locked",
    "SQLITE_READONLY": "read-only",
    "SQLITE_PERM": "read-only",
    "SQLITE_AUTH": "denied",
    "SQLITE_FULL": "full",
    "SQLITE_CANTOPEN": "no database",
    "SQLITE_NOTADB": "no database",
    "SQLITE_CORRUPT": "no database",
    "SQLITE_IOERR": "connection",
    "SQLITE_CONSTRAINT": "unfit",
}
_SQLITE_TEXTS = {
    "no such table": "no table",
    "no column named": "no column",
    "no such column": "no column",
    "already exists": "exists",
    "there is already": "exists",
    "duplicate column name": "exists",
    " a view": "unfit",
    "does not match any PRIMARY KEY or UNIQUE constraint": "unfit",
    "unable to open database": "no database",
}


def sqlite_kind(error: BaseException) -> Kind:
    """Tell what an error of SQLite is about."""
    code = getattr(error, "sqlite_errorname", "")
    kind = _of_text(_SQLITE_CODES, code) or _of_text(_SQLITE_TEXTS, str(error))
    if kind is None and isinstance(error, TimeoutError):
        return "timeout"
    return kind or ("other" if code else "connection")


# -- dialects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of database."""

    name: Literal["postgresql", "mysql", "sqlite"]  # ``mysql``: MariaDB too
    now_us: str  # SQL for its clock, see the module
    kind: Callable[[BaseException], Kind]  # tells what an error is about
    # Awaited with each new connection, a label for messages, and seconds for each answer: checks the server and the
    # connection's settings, and sets what holds for the session.
    set_up: Callable[[Connection, str, float], Awaitable[None]]
    # Connections kept for statements. A statement takes a millisecond, so few carry many threads; more would use up the
    # server's for others. SQLite has one writer: a second connection of the same client would only compete with the
    # first, and renewals could not go first.
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
        raise ConfigurationError(f"{label} is PostgreSQL {version // 10_000}: lockkit needs 12 or later")
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
        raise ConfigurationError(f"{label} is {product} {version}: lockkit needs {oldest[0]}.{oldest[1]} or later")
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
        raise ConfigurationError(f"{label} is used through SQLite {version}: lockkit needs 3.35 or later")
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
