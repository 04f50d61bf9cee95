"""From a URL with options, or an application's engine, to a `Database`."""

from __future__ import annotations

import inspect
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sqlalchemy
from sqlalchemy import URL, Engine, NullPool
from sqlalchemy.exc import InvalidRequestError, NoSuchModuleError

from lockkit import validation
from lockkit.backend import Host, Option
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import dialect_named
from lockkit.backends.sql.mysql import DRIVERS as MYSQL_DRIVERS
from lockkit.backends.sql.mysql import TLS_OPTIONS, Guard
from lockkit.errors import ConfigurationError
from lockkit.url import Url

VERIFIED = "verify-full"
"""libpq's only ``sslmode`` with which the server must prove that it is the host of the URL."""

# lockkit uses the first that is installed. The page on URLs promises this order.
_DRIVERS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("postgresql", "blocking"): ("psycopg",),
        ("postgresql", "asyncio"): ("psycopg",),
        ("mysql", "blocking"): ("pymysql",),
        ("mysql", "asyncio"): ("aiomysql", "asyncmy"),
        ("sqlite", "blocking"): ("sqlite3",),
        ("sqlite", "asyncio"): ("aiosqlite",),
    }
)
_EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sql"}
_SPELLED = {"sqlite3": "pysqlite"}  # modules with another name in SQLAlchemy


def mode_option(mode: str) -> Option:
    """Return the option that chose this backend among those of its scheme; see `lockkit.configuration.registry`."""
    return Option(
        validation.parse_choice("table", "row", "advisory"),
        "How to lock: table (a row with a ttl), row (SELECT … FOR UPDATE) or advisory.",
        mode,
    )


@cache
def driver_options(dialect: str) -> Mapping[str, Option]:
    """Return what the installed drivers of a dialect take: `open_database` checks for the one that it uses."""
    installed = {driver for kind in ("blocking", "asyncio") for driver in _find_drivers(dialect, kind)}
    if not installed:
        needed = " or ".join(_DRIVERS[dialect, "blocking"])
        message = f"{dialect}: URLs need the driver {needed}, which is not installed: {_hint(dialect)}"
        raise ConfigurationError(message)
    try:
        names = {name for driver in installed for name in _keywords(driver)}
    except ImportError as error:
        message = f"a driver of {dialect}: URLs cannot be loaded ({_in_one_line(error)}): {_hint(dialect)}"
        raise ConfigurationError(message) from error
    return {name: Option(_PARSERS.get(name, _as_it_is), "Passed on to the driver.") for name in names}


def _find_drivers(dialect: str, kind: str) -> list[str]:
    return [driver for driver in _DRIVERS[dialect, kind] if find_spec(driver) is not None]


@cache
def _keywords(driver: str) -> frozenset[str]:
    """Return the names of what a driver takes, except what lockkit decides itself."""
    if driver in {"psycopg", "psycopg_async"}:
        # libpq's own list, "34.1.2. Parameter Key Words".
        names = {one.keyword.decode() for one in _submodule("psycopg", "pq").Conninfo.get_defaults()}
    elif driver in {"sqlite3", "pysqlite", "aiosqlite"}:
        names = {"cached_statements"}  # not timeout, which is the option of the client's locks
    elif driver == "pg8000":
        names = {*inspect.signature(import_module(driver).connect).parameters}
    else:
        module = _submodule(driver, "connections" if driver == "pymysql" else "connection")
        names = {*inspect.signature(module.Connection.__init__).parameters, *TLS_OPTIONS}
    return frozenset(names - _NOT_PASSED_ON)


def _submodule(package: str, name: str) -> Any:  # noqa: ANN401 - a module
    """
    Import a module of a driver, the package first.

    A thread that imports the module while another one imports the package, which needs the module, deadlocks with it,
    and Python ends such a deadlock by giving one of them a module that is not ready.
    """
    import_module(package)
    return import_module(f"{package}.{name}")


_NOT_PASSED_ON = {
    "self", "user", "password", "passwd", "db", "database", "dbname", "port", "autocommit", "cursorclass", "conv",
    "defer_connect", "loop", "echo", "init_command", "sql_mode", "charset", "client_encoding", "client_flag",
    "use_unicode", "collation", "options", "replication", "named_pipe", "compress", "cursor_cls", "local_infile",
}  # fmt: skip


def _as_it_is(value: object) -> object:
    return value


def _parse_limit(value: object) -> float:
    seconds = validation.parse_seconds(value)
    if not seconds:
        message = "it must be above 0 seconds: without a limit a server that hangs would hold up its callers forever"
        raise ValueError(message)
    return seconds


def _parse_connect_limit(value: object) -> int:
    return max(1, round(_parse_limit(value)))


def _parse_tls(value: object) -> object:
    return value if isinstance(value, ssl.SSLContext) else validation.parse_bool(value)


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "connect_timeout": _parse_connect_limit,
    "read_timeout": _parse_limit,
    "write_timeout": _parse_limit,
    "cached_statements": validation.parse_int(0),
    "ssl": _parse_tls,
    "ssl_disabled": validation.parse_bool,
    "ssl_verify_cert": validation.parse_bool,
    "ssl_verify_identity": validation.parse_bool,
}


def open_database(url: Url, options: Mapping[str, Any], given: Mapping[str, Option], host: Host) -> Database:
    """Make the database of a URL. No I/O."""
    dialect = dialect_named(url.base)
    kind = "asyncio" if host.runtime.kind == "asyncio" else "blocking"
    driver = url.driver or _installed(dialect.name, kind, url)
    arguments = {name: value for name, value in options.items() if name not in given and value is not None}
    _check_arguments(url, driver, arguments)
    if dialect.name == "sqlite":
        target = URL.create(f"sqlite+{driver}", database=_sqlite_path(url))
    else:
        target = _server_url(url, dialect.name, driver, arguments)
    if (sslmode := postgresql_sslmode(arguments)) is not None:
        arguments["sslmode"] = sslmode
    if driver == "psycopg":
        _keep_password_secret(arguments)
    guard = None
    if driver in MYSQL_DRIVERS:
        tls = {name: arguments.pop(name) for name in TLS_OPTIONS & arguments.keys()}
        guard = Guard(tls, url.safe_text)
    # No pool: SQLAlchemy only makes the connections.
    defaults = dialect.arguments.get(driver, {})
    try:
        engine = _engine_for(kind)(target, poolclass=NullPool, connect_args={**defaults, **arguments})
    except ImportError as error:
        hint = _hint(dialect.name)
        if driver != _DRIVERS[dialect.name, kind][0]:
            hint = f"install it, or leave +{driver} out ({hint})"
        message = f"the driver {driver} for {url.safe_text} cannot be loaded ({_in_one_line(error)}): {hint}"
        raise ConfigurationError(message, backend=url.safe_text) from error
    except NoSuchModuleError as error:
        message = f"{url.safe_text}: SQLAlchemy knows no driver {driver} for {dialect.title}"
        raise ConfigurationError(message, backend=url.safe_text) from error
    except InvalidRequestError as error:  # create_async_engine, about a driver that blocks
        raise _other_api(url.safe_text, driver, kind) from error
    if engine.dialect.is_async != (kind == "asyncio"):
        raise _other_api(url.safe_text, driver, kind)
    arguments = {**defaults, **arguments}
    return Database(engine, host.runtime, url.safe_text, adopted=False, arguments=arguments, guard=guard)


def postgresql_sslmode(options: Mapping[str, Any]) -> str | None:
    """
    Return the ``sslmode`` of a URL; None leaves it to libpq.

    With ``sslrootcert`` alone, libpq would check no host, and would do without TLS if the server claims to have none.
    """
    sslmode: str | None = options.get("sslmode") or (VERIFIED if options.get("sslrootcert") else None)
    return sslmode


def _keep_password_secret(arguments: dict[str, Any]) -> None:
    """
    Have libpq send no password in clear text to an unverified server.

    By default libpq does so when asked: "34.1.2. Parameter Key Words", ``require_auth`` (since version 16).
    """
    verified = str(arguments.get("sslmode", "")).startswith("verify-")
    with suppress(ImportError):  # it cannot be loaded, which the caller reports
        if not verified and "require_auth" in _keywords("psycopg"):
            arguments.setdefault("require_auth", "!password")


def _other_api(url: str, driver: str, kind: str) -> ConfigurationError:
    api, other = ("lockkit.aio", "lockkit") if kind == "asyncio" else ("lockkit", "lockkit.aio")
    message = f"{url}: the driver {driver} is one for {other}, not for {api}: leave it out to get one that fits"
    return ConfigurationError(message, backend=url)


def _installed(dialect: str, kind: str, url: Url) -> str:
    found = _find_drivers(dialect, kind)
    if not found:
        message = f"{url.safe_text} needs the driver {' or '.join(_DRIVERS[dialect, kind])}: {_hint(dialect)}"
        raise ConfigurationError(message, backend=url.safe_text)
    return _SPELLED.get(found[0], found[0])


def _hint(dialect: str) -> str:
    return f"pip install 'lockkit[{_EXTRAS[dialect]}]'"


def _in_one_line(error: ImportError) -> str:
    return " ".join(str(error).split())


def _check_arguments(url: Url, driver: str, arguments: Mapping[str, Any]) -> None:
    """Refuse options of other drivers: the registry cannot tell them apart."""
    try:
        known = _keywords(driver)
    except ImportError:
        return  # a driver unknown to lockkit, or one that is missing, which the caller reports
    for name in arguments:
        if name not in known:
            nearest = validation.nearest(name, sorted(known))
            message = f"unknown option {name!r} for {url.safe_text}{nearest}: the driver {driver} does not take it"
            raise ConfigurationError(message, backend=url.safe_text)


def _server_url(url: Url, dialect: str, driver: str, arguments: dict[str, Any]) -> URL:
    if len(url.hosts) > 1:
        if driver != "psycopg":
            raise _wrong(url, "it must name one server: only PostgreSQL's driver looks for the primary among several")
        url.require_one_login()
        # libpq tries them in order, "34.1.1.3. Specifying Multiple Hosts".
        arguments["host"] = ",".join(one.host for one in url.hosts)
        arguments["port"] = ",".join(str(one.port or "") for one in url.hosts)
        arguments.setdefault("target_session_attrs", "read-write")
    database = url.path.removeprefix("/")
    if "/" in database:
        raise _wrong(url, "its path must be the name of a database")
    return URL.create(
        f"{dialect}+{driver}",
        username=url.username,
        password=url.password,
        host=url.host if len(url.hosts) == 1 else None,
        port=url.port if len(url.hosts) == 1 else None,
        database=database or None,
    )


def _sqlite_path(url: Url) -> str:
    path = url.path.removeprefix("/")
    if url.hosts or url.username:
        raise _wrong(url, "write sqlite:///relative.db or sqlite:////absolute/path.db, with three or four slashes")
    if not path or path == ":memory:" or path.startswith("file:"):
        raise _wrong(url, "a database in memory is seen by one connection only: name a file, or use memory://")
    # Now: the process may change its directory before it connects.
    return str(Path(path).absolute())


def _engine_for(kind: str) -> Callable[..., Engine]:
    """Return what makes an engine for this runtime. SQLAlchemy's part for asyncio takes a third of its import."""
    if kind != "asyncio":
        return sqlalchemy.create_engine
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - only where it is needed

    return lambda *arguments, **named: create_async_engine(*arguments, **named).sync_engine


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


def adopt_database(engine: object, host: Host) -> Database | None:
    """Make the database of an application's engine; None if it is no engine."""
    asyncio = host.runtime.kind == "asyncio"
    # Not imported here: an application that has one has imported it.
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    inner = engine.sync_engine if module is not None and isinstance(engine, module.AsyncEngine) else engine
    if not isinstance(inner, Engine):
        return None
    if (inner is not engine) != asyncio:
        api, wanted, other = (
            ("lockkit.aio", "an AsyncEngine", "lockkit") if asyncio else ("lockkit", "an Engine", "lockkit.aio")
        )
        message = f"{api}.from_client needs {wanted}: {type(engine).__name__} is for {other}.from_client"
        raise ConfigurationError(message)
    shown = inner.url.render_as_string(hide_password=True)
    if inner.dialect.name == "sqlite" and inner.url.database in {None, "", ":memory:"}:
        message = f"{shown} is a database in memory, seen by one connection only: name a file, or use memory://"
        raise ConfigurationError(message)
    return Database(inner, host.runtime, shown, adopted=True)
