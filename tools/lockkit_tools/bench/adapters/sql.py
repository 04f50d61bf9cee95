"""
SQL databases: the lock table by hand through bare drivers as baselines, and sqlalchemy-dlock.

A baseline does the least that a fenced lock with a ttl needs: one statement takes a row if it is free, raises its token
and sets its expiry; another frees it. The same driver, autocommit, one connection, no handling of lost answers.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

from lockkit.url import Url, parse
from lockkit_tools.bench.adapters.base import BlockingAdapter

_TABLE = "lockkit_bench_baseline"
_COLUMNS = "token bigint NOT NULL, expires_at_us bigint NOT NULL"
_PAUSE_MAX = 0.002
_WAIT_SECONDS = 3600  # sqlalchemy-dlock's on MariaDB: GET_LOCK refuses to wait without limit
LIMITED_POSTGRESQL = "SET lock_timeout = '5s'"
LIMITED_MYSQL = "SET lock_wait_timeout = 5"
NOW_POSTGRESQL = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
NOW_MYSQL = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_NOW_SQLITE = (
    "(CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000)"
)


class _RawTable(BlockingAdapter):
    """
    A lock table by hand.

    Attributes:
        limited: Has a statement give up after 5 s, should a process that was killed still lock the table.
    """

    leaves_something = True
    limited: ClassVar[str]
    _connection: Any

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawLock(self, name)

    def taken(self, name: str, owner: str) -> int:
        """Try once; give the token, or 0."""
        raise NotImplementedError

    def freed(self, name: str, owner: str) -> None:
        """Release."""
        raise NotImplementedError

    async def close(self) -> None:
        self._connection.close()

    async def erase(self) -> None:
        for statement in (self.limited, f"DROP TABLE {_TABLE}"):
            self._connection.cursor().execute(statement)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.token)


class _RawLock:
    """Asks again after a short pause while the lock is busy."""

    def __init__(self, table: _RawTable, name: str) -> None:
        self._table = table
        self._name = name
        self._owner = ""
        self.token = 0

    def __enter__(self) -> Self:
        owner = self._owner = secrets.token_hex(16)
        while not (token := self._table.taken(self._name, owner)):
            time.sleep(secrets.randbelow(1000) / 1000 * _PAUSE_MAX)
        self.token = token
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.freed(self._name, self._owner)


class RawPostgresqlTable(_RawTable):
    """psycopg 3, which prepares the two statements by itself."""

    limited = LIMITED_POSTGRESQL

    async def open(self) -> None:
        self._connection = import_module("psycopg").connect(**arguments(parse(self.url), "dbname"), autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(1)")  # CREATE … IF NOT EXISTS is not atomic
        self._connection.execute(
            f'CREATE TABLE IF NOT EXISTS {_TABLE} (name text COLLATE "C" PRIMARY KEY, owner text, {_COLUMNS})'
            " WITH (fillfactor = 50)"
        )
        self._connection.execute("SELECT pg_advisory_unlock(1)")
        ttl_us = int(self.ttl * 1e6)
        self._take = (
            f"INSERT INTO {_TABLE} AS l VALUES (%s, %s, {NOW_POSTGRESQL}, {NOW_POSTGRESQL} + {ttl_us})"
            " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = greatest(l.token + 1, excluded.token),"
            " expires_at_us = excluded.expires_at_us WHERE l.owner IS NULL OR l.expires_at_us <= excluded.token"
            " RETURNING token"
        )
        self._free = f"UPDATE {_TABLE} SET owner = NULL, expires_at_us = 0 WHERE name = %s AND owner = %s"

    def taken(self, name: str, owner: str) -> int:
        row = self._connection.execute(self._take, (name, owner)).fetchone()
        return int(row[0]) if row else 0

    def freed(self, name: str, owner: str) -> None:
        self._connection.execute(self._free, (name, owner))


class RawMysqlTable(_RawTable):
    """PyMySQL."""

    limited = LIMITED_MYSQL

    async def open(self) -> None:
        self._connection = import_module("pymysql").connect(**arguments(parse(self.url), "database"), autocommit=True)
        self._cursor = self._connection.cursor()
        self._cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {_TABLE}"
            f" (name varbinary(255) PRIMARY KEY, owner varbinary(255), {_COLUMNS}) ENGINE=InnoDB"
        )
        ours = "owner IS NULL OR expires_at_us <= VALUES(token)"
        self._take = (
            f"INSERT INTO {_TABLE} VALUES (%s, %s, LAST_INSERT_ID({NOW_MYSQL}), {NOW_MYSQL} + {int(self.ttl * 1e6)})"
            f" ON DUPLICATE KEY UPDATE token = IF({ours},"
            " LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), token + LAST_INSERT_ID(0)),"
            f" owner = IF({ours}, VALUES(owner), owner),"
            " expires_at_us = IF(owner = VALUES(owner), VALUES(expires_at_us), expires_at_us)"
        )
        self._free = f"UPDATE {_TABLE} SET owner = NULL, expires_at_us = 0 WHERE name = %s AND owner = %s"

    def taken(self, name: str, owner: str) -> int:
        self._cursor.execute(self._take, (name, owner))
        return int(self._cursor.lastrowid)

    def freed(self, name: str, owner: str) -> None:
        self._cursor.execute(self._free, (name, owner))


class RawSqliteTable(_RawTable):
    """Python's sqlite3, on the same file and so in the same journal mode."""

    limited = "PRAGMA busy_timeout = 5000"

    async def open(self) -> None:
        path = parse(self.url).path.removeprefix("/")
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=60)
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS {_TABLE} (name text PRIMARY KEY, owner text, {_COLUMNS}) WITHOUT ROWID"
        )
        self._take = (
            f"INSERT INTO {_TABLE} AS l VALUES (?, ?, {_NOW_SQLITE}, {_NOW_SQLITE} + {int(self.ttl * 1e6)})"
            " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = max(l.token + 1, excluded.token),"
            " expires_at_us = excluded.expires_at_us WHERE l.owner IS NULL OR l.expires_at_us <= excluded.token"
            " RETURNING token"
        )
        self._free = f"UPDATE {_TABLE} SET owner = NULL, expires_at_us = 0 WHERE name = ? AND owner = ?"

    def taken(self, name: str, owner: str) -> int:
        rows = self._connection.execute(self._take, (name, owner)).fetchall()
        return int(rows[0][0]) if rows else 0

    def freed(self, name: str, owner: str) -> None:
        self._connection.execute(self._free, (name, owner))


class Dlock(BlockingAdapter):
    """sqlalchemy-dlock as its README has it: each section locks on a connection from the pool of the engine."""

    async def open(self) -> None:
        sqlalchemy = import_module("sqlalchemy")
        url = parse(self.url)
        drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
        target = sqlalchemy.URL.create(
            drivers[url.base], url.username, url.password, url.host, url.port, url.path.removeprefix("/")
        )
        # By default 15 connections at the most: of 100 waiters 85 would wait for a connection, not for the lock.
        self._engine = sqlalchemy.create_engine(target, max_overflow=-1)
        self._make: Any = import_module("sqlalchemy_dlock").create_sadlock

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _DlockSections(self, name)

    def connect(self) -> Any:  # noqa: ANN401 - SQLAlchemy's
        """Take a connection from the pool."""
        return self._engine.connect()

    def made(self, connection: Any, name: str) -> AbstractContextManager[Any]:  # noqa: ANN401 - SQLAlchemy's
        """Make a lock of the library's."""
        # On PostgreSQL it polls once a second if it gets a limit, and otherwise waits at the server.
        limit = None if parse(self.url).base == "postgresql" else _WAIT_SECONDS
        lock: AbstractContextManager[Any] = self._make(connection, name, contextual_timeout=limit)
        return lock

    async def close(self) -> None:
        self._engine.dispose()


class _DlockSections:
    def __init__(self, adapter: Dlock, name: str) -> None:
        self._adapter = adapter
        self._name = name
        self._entered = ExitStack()

    def __enter__(self) -> Any:  # noqa: ANN401 - a library's lock
        with ExitStack() as entered:
            connection = entered.enter_context(self._adapter.connect())
            lock = entered.enter_context(self._adapter.made(connection, self._name))
            self._entered = entered.pop_all()
            return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()


class DlockKept(Dlock):
    """
    The same on a connection that each lock object keeps, in one transaction from the first lock to the end.

    Those that waiters still use at the end go with the process: to close them under their hands would fail.
    """

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return self.made(self.connect(), name)


def arguments(url: Url, database: str) -> dict[str, Any]:
    """Give what a driver is to connect with. Options of the query are lockkit's own."""
    wanted = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    wanted[database] = url.path.removeprefix("/") or None
    return {name: value for name, value in wanted.items() if value is not None}
