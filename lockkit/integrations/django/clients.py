"""Clients by the aliases of ``settings.LOCKKIT``, and what each alias means."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.db import connections

from lockkit import aio
from lockkit.errors import ConfigurationError
from lockkit.integrations.django.transactions import DjangoClient
from lockkit.integrations.migrations import beside_file, is_in_memory
from lockkit.sync import Client, connect, from_client

if TYPE_CHECKING:
    from sqlalchemy import URL

__all__ = ["aio_client", "client", "from_connection"]

_DRIVERS = {
    "psycopg": "postgresql+psycopg",
    "psycopg2": "postgresql+psycopg2",
    "MySQLdb": "mysql+mysqldb",
    "pymysql": "mysql+pymysql",
}
"""SQLAlchemy's names of the modules that Django's backends connect with."""

_NOT_IN_QUERY = frozenset(
    (
        *("dbname", "database", "db", "user", "password", "passwd", "host", "port", "unix_socket"),  # in the URL itself
        *("client_encoding", "charset", "conv", "client_flag", "cursor_factory", "context", "prepare_threshold"),
        *("init_command", "sql_mode", "collation", "use_unicode", "compress", "local_infile"),
    )
)
"""Parameters of Django's connection that lockkit does not need in a query."""

_SSL_MODES = {
    "DISABLED": {"ssl_disabled": 1},
    "REQUIRED": {"ssl": 1, "ssl_verify_cert": 0},
    "VERIFY_CA": {"ssl": 1, "ssl_verify_identity": 0},
    "VERIFY_IDENTITY": {"ssl": 1, "ssl_verify_identity": 1},
}
"""mysqlclient's ``ssl_mode`` in lockkit's URL, as `lockkit.backends.sql.options` has it for engines."""

CONNECT_SECONDS = 10
"""How long a connection to the database may take, unless the database's OPTIONS say otherwise."""

DEFAULT = "default"
"""The alias that is used where none is given."""

_clients: dict[str, DjangoClient] = {}
_aio_clients: dict[asyncio.AbstractEventLoop, dict[str, aio.Client]] = {}


def client(alias: str = DEFAULT) -> DjangoClient:
    """
    Return this process's client of an alias. Safe to use from many threads and after a fork.

    What it holds is released when the process exits. So do not close it; if you do, the next call makes another one.

    Args:
        alias: A key of ``settings.LOCKKIT``. Without that setting, ``lockkit.connect()`` decides for "default".

    Raises:
        ConfigurationError: There is no such alias, or its entry is wrong.
    """
    found = _clients.get(alias)
    if found is None or _is_closed(found):
        made = new_client(alias)
        if _clients.get(alias) is found:
            _clients.pop(alias, None)
        # Two threads may make one each. The one that comes second uses the first's; neither has connected yet.
        found = _clients.setdefault(alias, made)
    return found


def aio_client(alias: str = DEFAULT) -> aio.Client:
    """
    Return the running event loop's client of an alias. Its locks know nothing of transactions, nor do async views.

    Args:
        alias: As for `client`.

    Raises:
        ConfigurationError: There is no such alias, or its entry is wrong.
        RuntimeError: No event loop runs in this thread.
    """
    loop = asyncio.get_running_loop()
    if loop not in _aio_clients:
        for ended in [one for one in list(_aio_clients) if one.is_closed()]:
            _aio_clients.pop(ended, None)
    clients = _aio_clients.setdefault(loop, {})
    if alias not in clients or _is_closed(clients[alias]):
        found = service(alias)
        if found.database is not None:
            message = f"settings.LOCKKIT[{alias!r}] is a Django database, which has no async connections: give a URL"
            raise ConfigurationError(message)
        clients[alias] = aio.connect(found.url, profile=found.profile, **found.options)
    return clients[alias]


def _is_closed(client: Client | aio.Client) -> bool:
    """Tell whether `close()` was called. One that grants nothing more because the process exits is not replaced."""
    return client._engine.client.close_by < inf  # noqa: SLF001 - clients do not tell


def new_client(alias: str) -> DjangoClient:
    """
    Make a client of an alias, which the caller closes.

    Raises:
        ConfigurationError: There is no such alias, or its entry is wrong.
    """
    found = service(alias)
    if found.database is None:
        return DjangoClient(connect(found.url, profile=found.profile, **found.options))
    return from_connection(_database(found.database), **found.options)


def from_connection(connection: Any, **options: Any) -> DjangoClient:  # noqa: ANN401 - Django has no types
    """
    Make a client whose locks are rows of a Django database, on connections of its own with that database's settings.

    So a lock neither joins a transaction of the application nor ends with it. For SQLite, which has one writer at a
    time, the locks are files in the directory ``DATABASE-lockkit``.

    Args:
        connection: ``django.db.connection``, or one of ``django.db.connections``.
        **options: As for ``lockkit.connect``.

    Raises:
        ConfigurationError: Not such a connection, the database is in memory or of an unknown kind, an option is wrong,
            or SQLAlchemy is missing.
    """
    settings = getattr(connection, "settings_dict", None)
    if settings is None:
        message = f"from_connection needs a connection of django.db.connections, not {type(connection).__name__}"
        raise ConfigurationError(message)
    if options.get("mode", "table") != "table":
        raise ConfigurationError(
            f"locks in a Django database are rows of a lock table, not of mode={options['mode']!r}: "
            "give the URL of the database with that mode instead"
        )
    if connection.vendor == "sqlite":
        return DjangoClient(connect(_beside(settings), **options))
    driver = _driver(connection)
    url = _url(driver, settings)
    from sqlalchemy import NullPool, create_engine, event  # noqa: PLC0415 - an extra

    engine = create_engine(url, poolclass=NullPool)

    def as_django_connects(dialect: object, record: object, positional: object, named: dict[str, Any]) -> None:
        del dialect, record, positional
        named.update(connect_timeout=CONNECT_SECONDS)
        named.update(connection.get_connection_params())

    event.listen(engine, "do_connect", as_django_connects)
    return DjangoClient(from_client(engine, **options))


def environment_of(alias: str) -> dict[str, str]:
    """
    Return environment variables, the password included, by which another process finds the locks in a Django database.

    Raises:
        ConfigurationError: There is no such database, it is in memory or of an unknown kind, or one of its OPTIONS
            cannot be in a URL.
    """
    connection = _database(alias)
    settings = connection.settings_dict
    if connection.vendor == "sqlite":
        return {"LOCKKIT_URL": _beside(settings)}
    driver, parameters = _driver(connection), connection.get_connection_params()
    others = {name: value for name, value in parameters.items() if name not in _NOT_IN_QUERY}
    # An `ssl` of the application stays, and is refused below: its certificates must not be lost.
    others = {**_SSL_MODES.get(str(others.pop("ssl_mode", "")).upper(), {}), **others}
    # Where it may choose the schema, and so the lock table. libpq reads it; no URL of lockkit has it.
    server_options = {"PGOPTIONS": others.pop("options")} if "options" in others else {}
    wrong = [name for name, value in others.items() if not isinstance(value, str | int | float)]
    if wrong:
        raise ConfigurationError(
            f"settings.DATABASES[{alias!r}] has the option {wrong[0]!r}, which is neither text nor a number: another "
            "process can only get a URL. Give LOCKKIT an alias with the URL of the database"
        )
    host = str(settings["HOST"] or "")
    if host.startswith("/") and connection.vendor == "mysql":
        host, others["unix_socket"] = "", host
    login = ":".join(_quoted(settings[key]) for key in ("USER", "PASSWORD") if settings[key])
    where = ":".join(
        [f"[{host}]" if ":" in host else _quoted(host), *([str(settings["PORT"])] if settings["PORT"] else [])]
    )
    query = "&".join(f"{name}={_quoted(value)}" for name, value in others.items())
    url = f"{driver}://{login and login + '@'}{where}/{_quoted(settings['NAME'] or '')}{query and '?' + query}"
    return {"LOCKKIT_URL": url, **server_options}


def _quoted(value: object) -> str:
    return quote(str(value), safe="")


def _database(alias: str) -> Any:  # noqa: ANN401 - Django has no types
    if alias not in connections:
        raise ConfigurationError(f"settings.DATABASES has no alias {alias!r}")
    return connections[alias]


def _beside(settings: dict[str, Any]) -> str:
    name = str(settings["NAME"])
    if is_in_memory(name):
        message = 'the database is in memory, so it cannot hold locks: use LOCKKIT = {"default": "memory://"}'
        raise ConfigurationError(message)
    return beside_file(name)


def _driver(connection: Any) -> str:  # noqa: ANN401 - Django has no types
    """Return SQLAlchemy's name of the driver with which Django connects."""
    driver = _DRIVERS.get(connection.Database.__name__.partition(".")[0])
    if driver is None:
        raise ConfigurationError(
            f"lockkit cannot lock in a database of Django's backend {connection.settings_dict['ENGINE']!r}: it knows "
            "PostgreSQL, MySQL, MariaDB and SQLite. Give the URL of another lock service"
        )
    return driver


def _url(driver: str, settings: dict[str, Any]) -> URL:
    """Make the URL of a database, without its OPTIONS."""
    try:
        from sqlalchemy import URL  # noqa: PLC0415 - an extra
    except ImportError as error:
        extra = driver.partition("+")[0]
        message = f"locks in a Django database need SQLAlchemy: pip install 'lockkit[sql,{extra}]'"
        raise ConfigurationError(message) from error
    return URL.create(
        driver,
        username=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
        host=settings["HOST"] or None,
        port=int(settings["PORT"]) if str(settings["PORT"]).isdigit() else None,
        database=settings["NAME"] or None,
    )


def _close_all(*, setting: str, **_: object) -> None:
    """Close the clients of settings that a test has changed."""
    if setting == "LOCKKIT":
        for alias in list(_clients):
            _clients.pop(alias).close()
        _aio_clients.clear()


setting_changed.connect(_close_all, dispatch_uid="lockkit")


# -- settings.LOCKKIT --------------------------------------------------------------------------------------------------

_KEYS = ("URL", "PROFILE", "DATABASE")

_NOT_OPTIONS = frozenset({"url", "profile", "client", "connection"})
"""What the functions that make a client get from the entry itself."""


@dataclass(frozen=True, slots=True)
class Service:
    """One entry of ``settings.LOCKKIT``. At most one of url, profile and database is given."""

    alias: str  # its key
    url: str | None = field(default=None, repr=False)  # as for ``lockkit.connect``; may contain a password
    profile: str | None = None  # as for ``lockkit.connect``
    database: str | None = None  # alias of a database of ``settings.DATABASES``
    options: dict[str, Any] = field(default_factory=dict, repr=False)  # as for ``lockkit.connect``; may have passwords


def aliases() -> list[str]:
    """Return the aliases of ``settings.LOCKKIT``."""
    return list(_table())


def service(alias: str) -> Service:
    """Return what an alias means."""
    table = _table()
    if alias not in table:
        known = f"only {', '.join(map(repr, table))}" if table else "it is empty"
        raise ConfigurationError(f"settings.LOCKKIT has no alias {alias!r}, {known}")
    entry, where = table[alias], f"settings.LOCKKIT[{alias!r}]"
    if isinstance(entry, str):
        entry = {"URL": entry}
    if not isinstance(entry, Mapping):
        message = f"{where} must be a URL, or a dict with one of {', '.join(_KEYS)}, not {type(entry).__name__}"
        raise ConfigurationError(message)
    unknown = [key for key in entry if key not in {*_KEYS, "OPTIONS"}]
    if unknown:
        meant = difflib.get_close_matches(str(unknown[0]).upper(), (*_KEYS, "OPTIONS"), n=1)
        hint = f" (did you mean {meant[0]!r}?)" if meant else ""
        message = f"{where} has the unknown key {unknown[0]!r}{hint}: it takes {', '.join(_KEYS)} and OPTIONS"
        raise ConfigurationError(message)
    given = {key.lower(): entry[key] for key in _KEYS if key in entry}
    options = entry.get("OPTIONS", {})
    if not all(isinstance(value, str) for value in given.values()) or not isinstance(options, Mapping):
        raise ConfigurationError(f"{where}: {', '.join(_KEYS)} must be strings, and OPTIONS a dict")
    wrong = [name for name in options if not isinstance(name, str) or name in _NOT_OPTIONS]
    if wrong:
        raise ConfigurationError(f"{where}: OPTIONS takes options of lockkit.connect() such as 'ttl', not {wrong[0]!r}")
    if len(given) > 1:
        raise ConfigurationError(f"{where} must have only one of {', '.join(_KEYS)}")
    return Service(alias, options=dict(options), **given)


def _table() -> Mapping[str, object]:
    """Return the setting; without it, ``lockkit.connect()`` decides: LOCKKIT_URL, a profile, files of this machine."""
    table = getattr(django_settings, "LOCKKIT", None)
    if table is None:
        names = [name for name in dir(django_settings) if name.isupper()]
        for name in difflib.get_close_matches("LOCKKIT", names, n=1, cutoff=0.75):
            raise ConfigurationError(f'settings.{name} has no effect: write LOCKKIT = {{"default": …}}')
        return {DEFAULT: {}}
    if not isinstance(table, Mapping):
        message = f'settings.LOCKKIT must be a dict such as {{"default": "redis://…"}}, not {type(table).__name__}'
        raise ConfigurationError(message)
    return table
