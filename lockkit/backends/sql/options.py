"""
Where lockkit connects to: from a URL with options, or an application's SQLAlchemy engine, to a `Database`.

What an engine gives its driver is only known when it connects: a listener of the event ``do_connect`` may have changed
it, for example to put a new password in. So each time lockkit connects, it has the engine's pool begin to do so, and a
listener of its own, the last one, takes down what the driver would get and stops there. Nothing is sent.

What concerns server, login and TLS is translated. The rest is about the application's use of its connections.
"""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lockkit import validation
from lockkit.backend import Host, Option
from lockkit.backends.sql.connection import Driver
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import ConfigurationError
from lockkit.url import Url, is_secret

VERIFIED = "verify-full"
"""libpq's only ``sslmode`` with which the server must prove that it is the host of the URL."""

_DRIVERS = {
    "postgresql": ("psycopg", "pip install 'lockkit[postgresql]'"),
    "mysql": ("PyMySQL", "pip install 'lockkit[mysql]'"),
    "sqlite": ("sqlite3", "it is part of Python, which was built without it"),
}
"""Of each dialect: the driver, and where to get it. Its module here has the dialect's name."""

_SUFFIXES = {
    "postgresql": {"psycopg", "psycopg_async", "psycopg2", "psycopg2cffi", "asyncpg", "pg8000"},
    "mysql": {"pymysql", "aiomysql", "asyncmy", "mysqldb", "mysqlconnector", "mariadbconnector"},
    "sqlite": {"pysqlite", "aiosqlite"},
}
"""SQLAlchemy's names of drivers. A URL with one means the same server: lockkit connects with its own driver."""


def mode_option(mode: str) -> Option:
    """Return the option that chose this backend among those of its scheme; see `lockkit.configuration.registry`."""
    return Option(
        validation.parse_choice("table", "row", "advisory"),
        "How to lock: table (a row with a ttl), row (SELECT … FOR UPDATE) or advisory.",
        mode,
    )


def as_it_is(value: object) -> object:
    """Leave an option to the driver."""
    return value


def parse_limit(value: object) -> float:
    """Parse a time limit."""
    seconds = validation.parse_seconds(value)
    if not seconds:
        message = "it must be above 0 seconds: without a limit a server that hangs would hold up its callers forever"
        raise ValueError(message)
    return seconds


def parse_connect_limit(value: object) -> int:
    """Parse a time limit that is in whole seconds."""
    return max(1, round(parse_limit(value)))


def load_driver(dialect: str, what: str) -> Any:  # noqa: ANN401 - a module
    """Import the module of a dialect's driver; `what` needs it."""
    driver, source = _DRIVERS[dialect]
    try:
        return import_module(f"lockkit.backends.sql.{dialect}")
    except ImportError as error:
        reason = " ".join(str(error).split())
        message = f"{what} needs the driver {driver}, which cannot be loaded ({reason}): {source}"
        raise ConfigurationError(message) from error


def driver_options(dialect: str) -> Mapping[str, Option]:
    """Return what the driver of a dialect takes."""
    parsers: Mapping[str, Callable[[Any], object]] = load_driver(dialect, f"a {dialect}: URL").OPTIONS
    return {name: Option(parse, "Passed on to the driver.") for name, parse in parsers.items()}


def open_database(url: Url, options: Mapping[str, Any], given: Mapping[str, Option], host: Host) -> Database:
    """Make the database of a URL. No I/O."""
    dialect = dialect_named(url.base)
    if url.driver and url.driver not in _SUFFIXES[dialect.name]:
        problem = f"lockkit connects by {_DRIVERS[dialect.name][0]}, and knows no driver {url.driver}: leave it out"
        raise _wrong(url, problem)
    arguments = {name: value for name, value in options.items() if name not in given and value is not None}
    module = load_driver(dialect.name, url.safe_text)
    name = url.path.removeprefix("/")
    driver: Driver
    if dialect.name == "sqlite":
        name = _sqlite_path(url)
        driver = module.SqliteDriver(name, arguments, adopted=False, group=options["group"])
    elif dialect.name == "postgresql":
        arguments = {**_server(url, "dbname"), **arguments}
        if arguments.get("sslrootcert"):
            # With that alone, libpq would check no host, and do without TLS if the server claims to have none.
            arguments.setdefault("sslmode", VERIFIED)
        module.keep_password_secret(arguments)
        driver = module.PsycopgDriver(lambda: arguments)
    else:
        arguments = {**_server(url, "database"), **arguments}
        driver = module.PymysqlDriver(lambda: arguments, url.safe_text)
        driver.prepare({key: arguments[key] for key in module.TLS_OPTIONS & arguments.keys()})  # type: ignore[attr-defined]
    one = url.host if len(url.hosts) == 1 else None
    return Database(driver, dialect, host.runtime, url=url.safe_text, label=label_of(url.base, one, url.port, name))


def label_of(base: str, host: str | None, port: int | None, name: str) -> str:
    """Say for messages where a database is: ``host:port/name``, or the path of a file."""
    if not host:
        return name or base
    return f"{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}/{name}"


def _server(url: Url, database: str) -> dict[str, Any]:
    """Return what a URL says of its server, by the names of the driver; `database` is the name of that argument."""
    name = url.path.removeprefix("/")
    if "/" in name:
        raise _wrong(url, "its path must be the name of a database")
    found: dict[str, Any] = {"user": url.username, "password": url.password, database: name or None}
    if len(url.hosts) <= 1:
        found |= {"host": url.host, "port": url.port}
    else:
        if database != "dbname":
            raise _wrong(url, "it must name one server: only PostgreSQL's driver looks for the primary among several")
        url.require_one_login()
        # libpq tries them in order, "34.1.1.3. Specifying Multiple Hosts".
        found["host"] = ",".join(one.host for one in url.hosts)
        found["port"] = ",".join(str(one.port or "") for one in url.hosts)
        found["target_session_attrs"] = "read-write"
    return {key: value for key, value in found.items() if value is not None}


def _sqlite_path(url: Url) -> str:
    path = url.path.removeprefix("/")
    if url.hosts or url.username:
        raise _wrong(url, "write sqlite:///relative.db or sqlite:////absolute/path.db, with three or four slashes")
    if not path or path == ":memory:" or path.startswith("file:"):
        raise _wrong(url, "a database in memory is seen by one connection only: name a file, or use memory://")
    # Now: the process may change its directory before it connects.
    return str(Path(path).absolute())


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


# -- engines -------------------------------------------------------------------------------------------------------

_taking = threading.local()
_listened: WeakSet[Any] = WeakSet()


class _Taken(Exception):
    """What the driver would have got."""

    def __init__(self, positional: list[Any], named: dict[str, Any]) -> None:
        super().__init__()
        self.positional = positional
        self.named = named


def _take(dialect: object, record: object, positional: Any, named: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
    """Listen to ``do_connect``. Other threads of the application go on connecting."""
    del dialect, record
    if getattr(_taking, "now", False):
        raise _Taken(list(positional), dict(named))


def _arguments_of(engine: Any, shown: str) -> tuple[list[Any], dict[str, Any]]:  # noqa: ANN401 - SQLAlchemy's
    """Return the arguments with which an engine would connect now."""
    _taking.now = True
    try:
        # A pool of its own: the application's may be full, or give two threads one connection.
        engine.pool.recreate().connect().close()
    except _Taken as taken:
        return taken.positional, taken.named
    except ConfigurationError:
        raise
    except Exception as error:
        # A listener or a creator failed; one for asyncio waits for an event loop.
        message = f"{shown}: its engine could not tell how it connects ({type(error).__name__}): {_INSTEAD}"
        raise ConfigurationError(message, backend=shown) from error
    finally:
        _taking.now = False
    message = f"{shown}: its engine connects by a function of the application's (creator=): {_INSTEAD}"
    raise ConfigurationError(message, backend=shown)


_INSTEAD = "lockkit opens connections of its own and needs address and login, so give it the URL of the database"


def adopt_database(client: object, host: Host) -> Database | None:
    """Make the database of an application's `Engine` or `AsyncEngine`; None if it is neither."""
    # Not imported here: an application that has an engine has imported it.
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy import Engine, event  # noqa: PLC0415 - optional

    engine = getattr(client, "sync_engine", client)
    if not isinstance(engine, Engine):
        return None
    # SQLAlchemy hides a password before the host, but not one in the query.
    public = engine.url.difference_update_query([name for name in engine.url.query if is_secret(name)])
    shown = public.render_as_string(hide_password=True)
    dialect = dialect_named(engine.dialect.name)
    if dialect.name == "sqlite" and engine.url.database in {None, "", ":memory:"}:
        message = f"{shown} is a database in memory, seen by one connection only: name a file, or use memory://"
        raise ConfigurationError(message)
    if engine not in _listened:
        _listened.add(engine)
        event.listen(engine, "do_connect", _take)
    module, arguments = load_driver(dialect.name, shown), partial(_arguments_of, engine, shown)
    driver: Driver
    if dialect.name == "postgresql":
        driver = module.PsycopgDriver(lambda: _for_psycopg(*arguments(), module.KEYWORDS, shown))
    elif dialect.name == "mysql":
        names = module.OPTIONS.keys() | {"user", "password", "database", "port"}
        driver = module.PymysqlDriver(lambda: _for_pymysql(arguments()[1], engine.dialect.driver, names, shown), shown)
    else:
        positional, named = arguments()
        options = {name: named[name] for name in ("uri", "cached_statements") if name in named}
        driver = module.SqliteDriver(positional[0], options, adopted=True)
    url = engine.url
    label = label_of(url.get_backend_name(), url.host, url.port, url.database or "")
    return Database(driver, dialect, host.runtime, url=shown, label=label, pool_size=_limit_of(engine.pool))


def _limit_of(pool: Any) -> int | None:  # noqa: ANN401 - SQLAlchemy's
    """
    Return how many connections an application's pool may have at once; None: any number.

    `QueuePool` has `size()`, but no public name for its `max_overflow`. Without it mode=row and mode=advisory may take
    more connections than the application has allowed. Test: `test_pool_that_is_used_up_says_so`.
    """
    size = getattr(pool, "size", None)
    overflow = getattr(pool, "_max_overflow", -1)
    if size is None or overflow < 0:
        return None
    return max(1, int(size()) + int(overflow))


# -- PostgreSQL ----------------------------------------------------------------------------------------------------

# Names of asyncpg and pg8000 for what libpq has, too.
_LIBPQ_NAMES = {"database": "dbname", "unix_sock": "host", "timeout": "connect_timeout"}


def _for_psycopg(positional: list[Any], named: dict[str, Any], keywords: frozenset[str], shown: str) -> dict[str, Any]:
    """Translate arguments of psycopg, psycopg2, asyncpg or pg8000 for libpq."""
    tls = named.pop("ssl", None) or named.pop("ssl_context", None)
    dsn = named.pop("dsn", None) or named.pop("conninfo", None) or next(iter(positional), "")
    found = {_LIBPQ_NAMES.get(name, name): value for name, value in named.items() if value is not None}
    if isinstance(found.get("host"), list | tuple):
        found |= {name: ",".join(map(str, found[name])) for name in ("host", "port") if isinstance(found[name], list)}
    found = {name: value for name, value in found.items() if name in keywords and name != "client_encoding"}
    if "connect_timeout" in found:
        found["connect_timeout"] = max(1, round(float(found["connect_timeout"])))
    if tls:
        found |= _sslmode(tls, shown)
    return {"conninfo": dsn, **found} if dsn else found


def _sslmode(tls: object, shown: str) -> dict[str, str]:
    """Say to libpq what the engine said to asyncpg or pg8000."""
    if isinstance(tls, str):
        return {"sslmode": tls}
    if not isinstance(tls, ssl.SSLContext):
        return {"sslmode": VERIFIED, "sslrootcert": "system"}
    if tls.verify_mode == ssl.CERT_NONE:
        return {"sslmode": "require"}
    message = (
        f"{shown}: libpq cannot use the certificates of a Python SSLContext: give lockkit the URL of the database with "
        "?sslmode=verify-full&sslrootcert=FILE"
    )
    raise ConfigurationError(message, backend=shown)


# -- MariaDB and MySQL ---------------------------------------------------------------------------------------------

_PYMYSQL_NAMES = {"db": "database", "passwd": "password", "username": "user", "ssl_verify": "ssl_verify_cert"}
_SSL_NAMES = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key", "password": "ssl_key_password"}
_SSL_MODES: Mapping[str, Mapping[str, bool]] = {
    "DISABLED": {"ssl_disabled": True},
    "REQUIRED": {"ssl": True, "ssl_verify_cert": False},
    "VERIFY_CA": {"ssl": True, "ssl_verify_identity": False},
    "VERIFY_IDENTITY": {"ssl": True, "ssl_verify_identity": True},
}


def _for_pymysql(named: dict[str, Any], driver: str, names: frozenset[str], shown: str) -> dict[str, Any]:
    """
    Translate arguments of PyMySQL, aiomysql, asyncmy, mysqlclient or Connector/Python for `PymysqlDriver`.

    The certificate is verified wherever the application names an authority, and the host where the application has it
    verified: mysqlclient and Connector/Python do not by themselves.
    """
    found = {_PYMYSQL_NAMES.get(name, name): value for name, value in named.items() if value is not None}
    mode = found.pop("ssl_mode", None)
    given = found.pop("ssl", None)
    if isinstance(given, Mapping):
        unknown = given.keys() - {*_SSL_NAMES, "check_hostname", "verify_mode"}
        if unknown:
            message = f"{shown}: lockkit does not know ssl={{{min(unknown)!r}: …}}: give it the URL of the database"
            raise ConfigurationError(message, backend=shown)
        found |= {_SSL_NAMES[name]: value for name, value in given.items() if name in _SSL_NAMES}
        found["ssl"] = bool(given)
        found["ssl_verify_cert"] = _verifies(given)
        by_default = driver != "mysqldb"
        found["ssl_verify_identity"] = bool(given.get("ca")) and given.get("check_hostname", by_default)
    elif given is not None:
        found["ssl"] = given
    elif "ssl_ca" in found:
        found.setdefault("ssl_verify_identity", False)
    if mode is not None:
        found |= _SSL_MODES.get(str(mode).upper(), {})
    return {name: value for name, value in found.items() if name in names}


def _verifies(given: Mapping[str, Any]) -> bool:
    """Tell whether PyMySQL would verify a certificate with this ``ssl``."""
    mode = given.get("verify_mode")
    if mode is None:
        return given.get("ca") is not None
    return mode not in {False, ssl.CERT_NONE} and str(mode).lower() not in {"none", "0", "false", "no"}
