"""From the error of a database or its driver to a `LockError`, by two tables: what it is about, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from ssl import SSLError
from typing import Literal

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

Kind = Literal[
    "deadlock",
    "stale",
    "new table",
    "unprepared",
    "locked",
    "timeout",
    "no table",
    "no column",
    "exists",
    "unfit",
    "denied",
    "login",
    "tls",
    "no database",
    "no session",
    "read-only",
    "no engine",
    "full",
    "crowded",
    "encoding",
    "no transaction",
    "connection",
    "other",
]
"""
What an error is about.

- `CONFLICTS`: the database gave the statement, and its transaction, up for others: it did nothing, retry.

  - ``deadlock``: others waited for what it had locked.
  - ``stale``: its transaction began before others wrote what it would overwrite.
  - ``new table``: its transaction began before a table was made or altered.
  - ``unprepared``: others dropped what the connection had prepared, or made its table anew. The connection forgets it.

- ``locked``: it waited for a lock of the database as long as it may.
- ``timeout``: the server or lockkit ended it for taking too long; whether it took effect is unknown.
- ``unfit``: what has the table's name cannot be written as a lock table is: a view, or a table made otherwise.
- ``tls``: client and server do not agree on encryption, or one does not trust the other's certificate.
- ``no session``: the session that was to be ended is not there.
- ``no engine``: tables cannot be made with InnoDB.
- ``encoding``: the database has no such character in its encoding.
- ``no transaction``: a pooler lends its sessions for one statement only.
- ``connection``: there is none, or it ended; whether the statement took effect is unknown.
- ``other``: not in the tables.
"""


class MissingTable(ConfigurationError):
    """The table is not there. A backend catches it, and makes the table or says what to do."""


class AlreadyThere(ConfigurationError):
    """The table or column to be made is there already: nothing is left to do."""


CONFLICTS: frozenset[Kind] = frozenset({"deadlock", "stale", "new table", "unprepared"})
"""See `Kind`."""

_CONFLICT = "gave the statement up for others repeatedly: is it overloaded?"
_ADVICE: dict[Kind, tuple[Callable[[str], LockError], str]] = {
    **dict.fromkeys(CONFLICTS, (BackendUnavailable, _CONFLICT)),
    "locked": (BackendUnavailable, "is locked by another transaction for longer than a statement may wait"),
    "timeout": (
        BackendUnavailable,
        "did not answer in time: is it overloaded, stopped, cut off, or locked by another transaction?",
    ),
    "no table": (MissingTable, "has no such table"),
    "no column": (
        ConfigurationError,
        "has a table or a view of this name that lacks a column: run lockkit migrate, or give another table=",
    ),
    "exists": (AlreadyThere, "has something else of this name: give another table="),
    "unfit": (
        ConfigurationError,
        "has something of this name that is no table of lockkit's, such as a view: rename that, or give another table=",
    ),
    "denied": (
        ConfigurationError,
        "denies this user a right: SELECT, INSERT, UPDATE and DELETE are needed, and CREATE or lockkit migrate before",
    ),
    "login": (ConfigurationError, "refuses the login: see user name, password and the server's rules for this host"),
    "tls": (
        ConfigurationError,
        "cannot be connected to with these settings for TLS: check the certificates, and the driver's options for TLS",
    ),
    "no database": (
        ConfigurationError,
        "cannot be opened: check the name of the database, and that it, or the directory of its file, exists",
    ),
    "no session": (BackendUnavailable, "has no such session"),
    "read-only": (
        ConfigurationError,
        "is read-only here, and a lock must be written: give the primary, and a user that may write there",
    ),
    "no engine": (ConfigurationError, "makes no tables with InnoDB, which locks need: see its storage engines"),
    "full": (BackendUnavailable, "has no space left on its disk: nothing can be locked until there is some"),
    "crowded": (BackendUnavailable, "has no room for another connection: see its max_connections"),
    "encoding": (
        ConfigurationError,
        "cannot store a character of this name in the database's encoding: use other names, or a database in UTF-8",
    ),
    "no transaction": (
        ConfigurationError,
        "is a pooler that takes no transactions: set its pool mode to transaction or session, or use mode=table",
    ),
    "connection": (
        BackendUnavailable,
        "cannot be reached, or ended the connection: is it running, and reachable from here?",
    ),
    "other": (BackendUnavailable, "refused the statement"),
}


def translate(kind: Kind, text: str, label: str) -> LockError:
    """Make a `LockError` of an error of a database."""
    make, advice = _ADVICE[kind]
    return make(f"{label} {advice} ({text})")


# "Appendix A. PostgreSQL Error Codes": whole codes first, then classes.
_SQLSTATES: dict[str, Kind] = {
    "40001": "stale",
    "40P01": "deadlock",
    "55P03": "locked",
    "57014": "timeout",
    "42P01": "no table",
    "3F000": "no table",
    "42703": "no column",
    "42P07": "exists",
    "42710": "exists",
    "42701": "exists",
    "23505": "exists",
    "42804": "unfit",
    "42809": "unfit",
    "42P10": "unfit",
    "55000": "unfit",
    "42501": "denied",
    "3D000": "no database",
    "25006": "read-only",
    "53100": "full",
    "53300": "crowded",
    "26000": "unprepared",
    "0A000": "unprepared",
    "42P05": "unprepared",
    "22P05": "encoding",
    "22021": "encoding",
    "23": "unfit",
    "28": "login",
    "08": "connection",
    "57": "connection",
    "25": "connection",
}

# psycopg has no code for a connection that was refused, or ended by a pooler.
_POSTGRESQL_TEXTS: tuple[tuple[str, Kind], ...] = (
    ("too many ", "crowded"),
    ("remaining connection slots", "crowded"),
    ("password authentication failed", "login"),
    ("no password supplied", "login"),
    ("pg_hba.conf", "login"),
    ("authentication failed", "login"),
    ("authentication method requirement", "login"),
    ("permission denied", "login"),
    ("role ", "login"),
    ("certificate", "tls"),
    ("private key", "tls"),
    ("does not support SSL", "tls"),
    ("does not exist", "no database"),
    ("not currently accepting connections", "no database"),
    ("statement pooling mode", "no transaction"),
)


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's code, of any driver: ``sqlstate``, ``pgcode`` or the field C of pg8000's; "" if none."""
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not code and error.args and isinstance(error.args[0], dict):
        code = error.args[0].get("C")
    return code or ""


def postgresql_kind(error: BaseException) -> Kind:
    """See `Kind`."""
    code = sqlstate(error)
    if code == "0A000" and "cached plan" not in str(error):
        return "other"
    if code:
        return _SQLSTATES.get(code) or _SQLSTATES.get(code[:2]) or "other"
    if isinstance(error, TimeoutError):
        return "timeout"
    text = str(error)
    return next((kind for part, kind in _POSTGRESQL_TEXTS if part in text), "connection")


_CLIENTS_OWN = range(2000, 3000)

_OPTION_PREVENTS = 1290
"""The error names the option."""

_OPTIONS: tuple[tuple[str, Kind], ...] = (
    ("read-only", "read-only"),
    ("read_only", "read-only"),
    ("NO_ENGINE_SUBSTITUTION", "no engine"),
)

# MariaDB: "MariaDB Error Code Reference"; MySQL: "Server Error Message Reference". 2000 to 2999 are the client's.
_ERRNOS: dict[int, Kind] = {
    1213: "deadlock",
    1020: "stale",
    1412: "new table",
    1243: "unprepared",
    1615: "unprepared",
    1205: "locked",
    3572: "locked",
    3024: "timeout",
    1969: "timeout",
    1146: "no table",
    1054: "no column",
    1050: "exists",
    1060: "exists",
    1048: "unfit",
    1288: "unfit",
    1347: "unfit",
    1356: "unfit",
    1364: "unfit",
    1471: "unfit",
    1526: "unfit",
    1044: "denied",
    1142: "denied",
    1143: "denied",
    1227: "denied",
    1370: "denied",
    1095: "denied",
    1094: "no session",
    1045: "login",
    1130: "login",
    1698: "login",
    1251: "login",
    1820: "login",
    1862: "login",
    2026: "tls",
    2059: "login",
    3118: "login",
    3159: "tls",
    4151: "login",
    1049: "no database",
    1046: "no database",
    1286: "no engine",
    3161: "no engine",
    1792: "read-only",
    1836: "read-only",
    1021: "full",
    1114: "full",
    1040: "crowded",
    1203: "crowded",
    1226: "crowded",
    1053: "connection",
    1317: "timeout",
    1927: "connection",
    3032: "connection",
    3169: "connection",
    4031: "connection",
}


_MYSQL_SESSION_ENDS = frozenset({1053, 1927, 4031})
"""What the server says when it ends a session: it stops, by KILL, after ``wait_timeout``."""


def mysql_number(error: BaseException) -> int:
    """Return the number of a driver's error, 0 if it has none: its first argument in most drivers, or ``errno``."""
    numbers = (getattr(error, "errno", None), *error.args[:1])
    return next((number for number in numbers if isinstance(number, int)), 0)


def is_mysql_session_end(error: BaseException) -> bool:
    """Tell whether an error is what MariaDB or MySQL say when they end a session."""
    return mysql_number(error) in _MYSQL_SESSION_ENDS


def mysql_kind(error: BaseException) -> Kind:
    """See `Kind`."""
    number = mysql_number(error)
    if number == _OPTION_PREVENTS:
        return next((kind for option, kind in _OPTIONS if option in str(error)), "other")
    kind = _ERRNOS.get(number)
    if kind is not None:
        return kind
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return "timeout"
    # Of Python's ssl. The drivers number it as a host that is not there, and aiomysql does not say more.
    if "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error.__cause__, SSLError):
        return "tls"
    return "connection" if number == 0 or number in _CLIENTS_OWN else "other"


# "Result and Error Codes" of SQLite; extended codes begin with the plain one.
_SQLITE_CODES: tuple[tuple[str, Kind], ...] = (
    ("SQLITE_BUSY_SNAPSHOT", "stale"),
    ("SQLITE_BUSY", "locked"),
    ("SQLITE_LOCKED", "locked"),
    ("SQLITE_READONLY", "read-only"),
    ("SQLITE_PERM", "read-only"),
    ("SQLITE_AUTH", "denied"),
    ("SQLITE_FULL", "full"),
    ("SQLITE_CANTOPEN", "no database"),
    ("SQLITE_NOTADB", "no database"),
    ("SQLITE_CORRUPT", "no database"),
    ("SQLITE_IOERR", "connection"),
    ("SQLITE_CONSTRAINT", "unfit"),
)
_SQLITE_TEXTS: tuple[tuple[str, Kind], ...] = (
    ("no such table", "no table"),
    ("no column named", "no column"),
    ("no such column", "no column"),
    ("already exists", "exists"),
    ("there is already", "exists"),
    ("duplicate column name", "exists"),
    (" a view", "unfit"),
    ("does not match any PRIMARY KEY or UNIQUE constraint", "unfit"),
    ("unable to open database", "no database"),
)


def sqlite_kind(error: BaseException) -> Kind:
    """See `Kind`."""
    code = getattr(error, "sqlite_errorname", "")
    for start, kind in _SQLITE_CODES:
        if code.startswith(start):
            return kind
    text = str(error)
    for part, kind in _SQLITE_TEXTS:
        if part in text:
            return kind
    if isinstance(error, TimeoutError):
        return "timeout"
    return "other" if code else "connection"
