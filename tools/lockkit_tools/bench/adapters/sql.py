"""
SQL databases: bare drivers as baselines for each of lockkit's modes, and sqlalchemy-dlock.

Each baseline does the least that a fenced lock takes. mode=table: one statement takes a row if it is free, raises its
token and sets its expiry; another frees it. mode=row and mode=advisory, where the session is the lock: lock, on a
connection of the lock's own; raise the token on another one, where it is committed apart; and end the transaction. The
same driver and statements as lockkit's, without what makes them safe: limits of time, looks whether the session still
holds, lost answers. One without a token leaves the second step out.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from contextlib import ExitStack
from importlib import import_module
from typing import Any, ClassVar

from lockkit.url import parse
from lockkit_tools.bench.adapters.base import Adapter, Bracket, Library

_TABLE, _ROWS, _TOKENS = "lockkit_bench_baseline", "lockkit_bench_rows", "lockkit_bench_tokens"
_COLUMNS = "token bigint NOT NULL, expires_at_us bigint NOT NULL"
_PAUSE_MAX = 0.002
_WAIT_SECONDS = 3600  # on MariaDB: GET_LOCK refuses to wait without limit
_NOW_POSTGRESQL = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
_NOW_MYSQL = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_NOW_SQLITE = (
    "(CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000)"
)


class _Raw(Adapter):
    """What the baselines have in common."""

    leaves_something = True
    limited: ClassVar[str]  # has a statement give up after 5 s, should a process that was killed still lock the table
    tables: ClassVar[str] = _TABLE
    _connection: Library

    async def open(self) -> None:
        self._connection = self.connect()
        self.make_tables()

    def connect(self) -> Library:
        """Give something that runs statements, each committed: ``execute``, ``close``."""
        raise NotImplementedError

    def make_tables(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._connection.close()

    async def erase(self) -> None:
        for statement in (self.limited, f"DROP TABLE {self.tables}"):
            self._connection.execute(statement)


class _Postgresql(_Raw):
    """psycopg 3, which prepares statements by itself."""

    limited = "SET lock_timeout = '5s'"

    def connect(self) -> Library:
        return import_module("psycopg").connect(**_arguments(self.url, "dbname"), autocommit=True)

    def create(self, *tables: str) -> None:
        """Create tables; CREATE … IF NOT EXISTS is not atomic."""
        self._connection.execute("SELECT pg_advisory_lock(1)")
        for table in tables:
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        self._connection.execute("SELECT pg_advisory_unlock(1)")


class _Mysql(_Raw):
    """PyMySQL."""

    limited = "SET lock_wait_timeout = 5"

    def connect(self) -> Library:
        return _Cursor(import_module("pymysql").connect(**_arguments(self.url, "database"), autocommit=True))


class _Cursor:
    """A connection of PyMySQL that has ``execute``, as psycopg's have."""

    def __init__(self, connection: Library) -> None:
        self._cursor = connection.cursor()
        self.execute = self._cursor.execute
        self.close = connection.close

    @property
    def lastrowid(self) -> int:
        return int(self._cursor.lastrowid)


def _arguments(url: str, database: str) -> dict[str, Any]:
    """Give what a driver is to connect with. Options of the query are lockkit's own."""
    parsed = parse(url)
    wanted = {"host": parsed.host, "port": parsed.port, "user": parsed.username, "password": parsed.password}
    wanted[database] = parsed.path.removeprefix("/") or None
    return {name: value for name, value in wanted.items() if value is not None}


# -- a lock table ------------------------------------------------------------------------------------------------------


class _Table(_Raw):
    """A lock table. Asks again after a short pause while the lock is busy."""

    now: ClassVar[str]
    mark: ClassVar[str] = "%s"  # of a parameter in a statement
    greatest: ClassVar[str] = "greatest"

    def lock(self, name: str) -> Library:
        take, free = (
            self.taking(),
            f"UPDATE {_TABLE} SET owner = NULL, expires_at_us = 0 WHERE name = %s AND owner = %s",
        )
        free, owner = free.replace("%s", self.mark), ""

        def enter() -> int:
            nonlocal owner
            owner = secrets.token_hex(16)
            while not (token := self.taken(take, name, owner)):
                time.sleep(secrets.randbelow(1000) / 1000 * _PAUSE_MAX)
            return token

        return Bracket(enter, lambda: self._connection.execute(free, (name, owner)))

    def taking(self) -> str:
        """Give the statement that takes a lock if it is free."""
        return (
            f"INSERT INTO {_TABLE} AS l VALUES ({self.mark}, {self.mark}, {self.now}, {self.now} + {self.ttl_us})"
            f" ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = {self.greatest}(l.token + 1,"
            " excluded.token), expires_at_us = excluded.expires_at_us"
            " WHERE l.owner IS NULL OR l.expires_at_us <= excluded.token RETURNING token"
        )

    def taken(self, take: str, name: str, owner: str) -> int:
        """Try once; give the token, or 0."""
        rows = self._connection.execute(take, (name, owner)).fetchall()
        return int(rows[0][0]) if rows else 0

    @property
    def ttl_us(self) -> int:
        return int(self.ttl * 1e6)


class RawPostgresqlTable(_Table, _Postgresql):
    """psycopg 3."""

    now = _NOW_POSTGRESQL

    def make_tables(self) -> None:
        columns = f'name text COLLATE "C" PRIMARY KEY, owner text, {_COLUMNS}'
        self.create(f"{_TABLE} ({columns}) WITH (fillfactor = 50)")


class RawSqliteTable(_Table):
    """Python's sqlite3, on the same file and so in the same journal mode."""

    limited = "PRAGMA busy_timeout = 5000"
    now, mark, greatest = _NOW_SQLITE, "?", "max"

    def connect(self) -> Library:
        return sqlite3.connect(parse(self.url).path.removeprefix("/"), isolation_level=None, timeout=60)

    def make_tables(self) -> None:
        columns = f"name text PRIMARY KEY, owner text, {_COLUMNS}"
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({columns}) WITHOUT ROWID")


class RawMysqlTable(_Table, _Mysql):
    """PyMySQL."""

    now = _NOW_MYSQL

    def make_tables(self) -> None:
        columns = f"name varbinary(255) PRIMARY KEY, owner varbinary(255), {_COLUMNS}"
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({columns}) ENGINE=InnoDB")

    def taking(self) -> str:
        ours = "owner IS NULL OR expires_at_us <= VALUES(token)"
        return (
            f"INSERT INTO {_TABLE} VALUES (%s, %s, LAST_INSERT_ID({self.now}), {self.now} + {self.ttl_us})"
            f" ON DUPLICATE KEY UPDATE token = IF({ours},"
            " LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), token + LAST_INSERT_ID(0)),"
            f" owner = IF({ours}, VALUES(owner), owner),"
            " expires_at_us = IF(owner = VALUES(owner), VALUES(expires_at_us), expires_at_us)"
        )

    def taken(self, take: str, name: str, owner: str) -> int:
        self._connection.execute(take, (name, owner))
        return int(self._connection.lastrowid)


# -- an open session ---------------------------------------------------------------------------------------------------


class _Session(_Raw):
    """Locks of an open session, which wait in the database's own queue. `_connection` raises tokens, committed."""

    tables = f"{_ROWS}, {_TOKENS}"
    fenced: ClassVar[bool] = True

    async def open(self) -> None:
        self._sessions: list[Library] = []
        await super().open()

    def lock(self, name: str) -> Library:
        session = self.connect()
        self._sessions.append(session)
        take, free = self.prepare(session, name)

        def enter() -> int | None:
            session.execute(take)
            return self.next_token(name) if self.fenced else None

        return Bracket(enter, lambda: session.execute(free))

    def prepare(self, session: Library, name: str) -> tuple[str, str]:
        """Give what locks and what frees."""
        raise NotImplementedError

    def next_token(self, name: str) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        for session in self._sessions:
            session.close()
        await super().close()


class _PostgresqlSession(_Session, _Postgresql):
    """BEGIN and what locks are one round trip; nothing waits for the disk."""

    def connect(self) -> Library:
        connection = super().connect()
        connection.execute("SET synchronous_commit = off")
        return connection

    def make_tables(self) -> None:
        key = 'name text COLLATE "C" PRIMARY KEY'
        self.create(f"{_ROWS} ({key})", f"{_TOKENS} ({key}, token bigint NOT NULL) WITH (fillfactor = 50)")

    def next_token(self, name: str) -> int:
        row = self._connection.execute(
            f"INSERT INTO {_TOKENS} AS l VALUES (%s, {_NOW_POSTGRESQL})"
            " ON CONFLICT (name) DO UPDATE SET token = greatest(l.token + 1, excluded.token) RETURNING token",
            (name,),
        ).fetchone()
        return int(row[0])


class RawPostgresqlRow(_PostgresqlSession):
    """``SELECT … FOR UPDATE``."""

    def prepare(self, session: Library, name: str) -> tuple[str, str]:
        session.execute(f"INSERT INTO {_ROWS} VALUES (%s) ON CONFLICT DO NOTHING", (name,))
        literal = import_module("psycopg.sql").quote(name)
        return f"BEGIN;SELECT 1 FROM {_ROWS} WHERE name = {literal} FOR UPDATE", "COMMIT"


class RawPostgresqlAdvisory(_PostgresqlSession):
    """``pg_advisory_xact_lock``."""

    def prepare(self, session: Library, name: str) -> tuple[str, str]:
        del session
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        return f"BEGIN;SELECT pg_advisory_xact_lock({key})", "COMMIT"


class _MysqlSession(_Session, _Mysql):
    def make_tables(self) -> None:
        key = "name varbinary(255) PRIMARY KEY"
        for table in (f"{_ROWS} ({key})", f"{_TOKENS} ({key}, token bigint NOT NULL)"):
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ENGINE=InnoDB")

    def next_token(self, name: str) -> int:
        self._connection.execute(
            f"INSERT INTO {_TOKENS} VALUES (%s, LAST_INSERT_ID({_NOW_MYSQL}))"
            " ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(GREATEST(token + 1, VALUES(token)))",
            (name,),
        )
        return int(self._connection.lastrowid)


class RawMysqlRow(_MysqlSession):
    """``SELECT … FOR UPDATE``, in a transaction that is open without a statement of its own."""

    def prepare(self, session: Library, name: str) -> tuple[str, str]:
        session.execute(f"INSERT IGNORE INTO {_ROWS} VALUES (%s)", (name,))
        session.execute("SET SESSION autocommit = 0, innodb_lock_wait_timeout = 3600")
        session.execute("COMMIT")
        return f"SELECT 1 FROM {_ROWS} WHERE name = X'{name.encode().hex()}' FOR UPDATE", "COMMIT"


class RawMysqlAdvisory(_MysqlSession):
    """``GET_LOCK``."""

    def prepare(self, session: Library, name: str) -> tuple[str, str]:
        del session
        key = hashlib.sha256(name.encode()).hexdigest()[:48]
        return f"SELECT GET_LOCK('{key}', {_WAIT_SECONDS})", f"SELECT RELEASE_LOCK('{key}')"


def _unfenced(adapter: type[_Session]) -> type[_Session]:
    """Leave the token out."""
    return type(f"{adapter.__name__}Unfenced", (adapter,), {"fenced": False})


RawPostgresqlRowUnfenced = _unfenced(RawPostgresqlRow)
RawPostgresqlAdvisoryUnfenced = _unfenced(RawPostgresqlAdvisory)
RawMysqlRowUnfenced = _unfenced(RawMysqlRow)
RawMysqlAdvisoryUnfenced = _unfenced(RawMysqlAdvisory)


# -- sqlalchemy-dlock --------------------------------------------------------------------------------------------------


class Dlock(Adapter):
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
        # On PostgreSQL it polls once a second if it gets a limit, and otherwise waits at the server.
        self._limit = None if url.base == "postgresql" else _WAIT_SECONDS
        self._make: Library = import_module("sqlalchemy_dlock").create_sadlock

    def lock(self, name: str) -> Library:
        held = ExitStack()

        def enter() -> Library:
            with ExitStack() as entering:
                connection = entering.enter_context(self._engine.connect())
                lock = entering.enter_context(self._make(connection, name, contextual_timeout=self._limit))
                held.push(entering.pop_all())
                return lock

        return Bracket(enter, held.close)

    async def close(self) -> None:
        self._engine.dispose()


class DlockKept(Dlock):
    """
    The same on a connection that each lock object keeps, in one transaction from the first lock to the end.

    Those that waiters still use at the end go with the process: to close them under their hands would fail.
    """

    def lock(self, name: str) -> Library:
        return self._make(self._engine.connect(), name, contextual_timeout=self._limit)
