"""From the error of a database or its driver to a `LockError`, by two tables: what it is about, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLError
from typing import TypeAlias

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

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
    "no database": "cannot be opened: check the name of the database, and that it, or the directory of its file, "
    "exists",
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
