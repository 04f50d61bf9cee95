"""From a URL with options, or an application's engine, to a `Database`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockkit import validation
from lockkit.backend import Host, Option
from lockkit.backends.sql.connection import Driver
from lockkit.backends.sql.database import Database, label_of
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import ConfigurationError
from lockkit.url import Url

VERIFIED = "verify-full"
"""libpq's only ``sslmode`` with which the server must prove that it is the host of the URL."""

_DRIVERS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "postgresql": ("lockkit.backends.sql.postgresql", "psycopg", "pip install 'lockkit[postgresql]'"),
        "mysql": ("lockkit.backends.sql.mysql", "PyMySQL", "pip install 'lockkit[mysql]'"),
        "sqlite": ("lockkit.backends.sql.sqlite", "sqlite3", "it is part of Python, which was built without it"),
    }
)
"""Of each dialect: the module, the driver, and where to get it."""

_SUFFIXES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "postgresql": frozenset(("psycopg", "psycopg_async", "psycopg2", "psycopg2cffi", "asyncpg", "pg8000")),
        "mysql": frozenset(("pymysql", "aiomysql", "asyncmy", "mysqldb", "mysqlconnector", "mariadbconnector")),
        "sqlite": frozenset(("pysqlite", "aiosqlite")),
    }
)
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
    module, driver, source = _DRIVERS[dialect]
    try:
        return import_module(module)
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
        problem = f"lockkit connects by {_DRIVERS[dialect.name][1]}, and knows no driver {url.driver}: leave it out"
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
