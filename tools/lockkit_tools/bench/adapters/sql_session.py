"""
mode=row and mode=advisory by hand, through bare drivers.

A baseline does what a fenced lock takes at the least where the session is the lock: lock, on a connection of the lock's
own; raise the token on another one, where it is committed apart; and end the transaction. Its statements are those of
lockkit, without what makes them safe: limits of time, looks whether the session still holds, lost answers. One without
a token leaves the second step out.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

from lockkit.url import parse
from lockkit_tools.bench.adapters.base import BlockingAdapter
from lockkit_tools.bench.adapters.sql import LIMITED_MYSQL, LIMITED_POSTGRESQL, NOW_MYSQL, NOW_POSTGRESQL, arguments

_ROWS = "lockkit_bench_rows"
_TOKENS = "lockkit_bench_tokens"
_WAIT_SECONDS = 3600


class _RawSession(BlockingAdapter):
    """Locks of an open session."""

    leaves_something = True
    fenced: ClassVar[bool] = True
    limited: ClassVar[str]

    async def open(self) -> None:
        self._sessions: list[Any] = []
        self._apart = self.connect()

    def connect(self) -> Any:  # noqa: ANN401 - a driver's
        """Give something that runs statements: ``execute``, ``close``."""
        raise NotImplementedError

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        session = self.connect()
        self._sessions.append(session)
        return _RawLock(self, session, name)

    def prepare(self, session: Any, name: str) -> tuple[str, str]:  # noqa: ANN401 - a driver's
        """Give what locks and what frees."""
        raise NotImplementedError

    def next_token(self, name: str) -> int:
        """Raise the token of a lock, committed."""
        raise NotImplementedError

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.token) if self.fenced else None

    async def close(self) -> None:
        for session in [*self._sessions, self._apart]:
            session.close()

    async def erase(self) -> None:
        for statement in (self.limited, f"DROP TABLE {_ROWS}, {_TOKENS}"):
            self._apart.execute(statement)


class _RawLock:
    """The database's own queue."""

    def __init__(self, adapter: _RawSession, session: Any, name: str) -> None:  # noqa: ANN401 - a driver's
        self._adapter = adapter
        self._execute = session.execute
        self._name = name
        self._take, self._free = adapter.prepare(session, name)
        self.token = 0

    def __enter__(self) -> Self:
        self._execute(self._take)
        if self._adapter.fenced:
            self.token = self._adapter.next_token(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._execute(self._free)


class _RawPostgresql(_RawSession):
    """psycopg 3. BEGIN and what locks are one round trip; nothing waits for the disk."""

    limited = LIMITED_POSTGRESQL

    async def open(self) -> None:
        await super().open()
        execute = self._apart.execute
        execute("SELECT pg_advisory_lock(1)")  # CREATE … IF NOT EXISTS is not atomic
        execute(f'CREATE TABLE IF NOT EXISTS {_ROWS} (name text COLLATE "C" PRIMARY KEY)')
        execute(
            f'CREATE TABLE IF NOT EXISTS {_TOKENS} (name text COLLATE "C" PRIMARY KEY, token bigint NOT NULL)'
            " WITH (fillfactor = 50)"
        )
        execute("SELECT pg_advisory_unlock(1)")
        self._raise = (
            f"INSERT INTO {_TOKENS} AS l VALUES (%s, {NOW_POSTGRESQL})"
            " ON CONFLICT (name) DO UPDATE SET token = greatest(l.token + 1, excluded.token) RETURNING token"
        )

    def connect(self) -> Any:  # noqa: ANN401 - a driver's
        connection = import_module("psycopg").connect(**arguments(parse(self.url), "dbname"), autocommit=True)
        connection.execute("SET synchronous_commit = off")
        return connection

    def next_token(self, name: str) -> int:
        return int(self._apart.execute(self._raise, (name,)).fetchone()[0])


class RawPostgresqlRow(_RawPostgresql):
    """``SELECT … FOR UPDATE``."""

    def prepare(self, session: Any, name: str) -> tuple[str, str]:  # noqa: ANN401 - a driver's
        session.execute(f"INSERT INTO {_ROWS} VALUES (%s) ON CONFLICT DO NOTHING", (name,))
        literal = import_module("psycopg.sql").quote(name)
        return f"BEGIN;SELECT 1 FROM {_ROWS} WHERE name = {literal} FOR UPDATE", "COMMIT"


class RawPostgresqlAdvisory(_RawPostgresql):
    """``pg_advisory_xact_lock``."""

    def prepare(self, session: Any, name: str) -> tuple[str, str]:  # noqa: ANN401 - a driver's
        del session
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        return f"BEGIN;SELECT pg_advisory_xact_lock({key})", "COMMIT"


class RawPostgresqlRowUnfenced(RawPostgresqlRow):
    """Without a token."""

    fenced = False


class RawPostgresqlAdvisoryUnfenced(RawPostgresqlAdvisory):
    """Without a token."""

    fenced = False


class _RawMysql(_RawSession):
    """PyMySQL."""

    limited = LIMITED_MYSQL

    async def open(self) -> None:
        await super().open()
        key = "name varbinary(255) PRIMARY KEY"
        self._apart.execute(f"CREATE TABLE IF NOT EXISTS {_ROWS} ({key}) ENGINE=InnoDB")
        self._apart.execute(f"CREATE TABLE IF NOT EXISTS {_TOKENS} ({key}, token bigint NOT NULL) ENGINE=InnoDB")
        self._raise = (
            f"INSERT INTO {_TOKENS} VALUES (%s, LAST_INSERT_ID({NOW_MYSQL}))"
            " ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(GREATEST(token + 1, VALUES(token)))"
        )

    def connect(self) -> Any:  # noqa: ANN401 - a driver's
        return _Cursor(import_module("pymysql").connect(**arguments(parse(self.url), "database"), autocommit=True))

    def next_token(self, name: str) -> int:
        self._apart.execute(self._raise, (name,))
        return int(self._apart.lastrowid)


class _Cursor:
    """A connection of PyMySQL that has ``execute``, as psycopg's have."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - a driver's
        self._connection = connection
        self._cursor = connection.cursor()
        self.execute = self._cursor.execute

    @property
    def lastrowid(self) -> int:
        return int(self._cursor.lastrowid)

    def close(self) -> None:
        self._connection.close()


class RawMysqlRow(_RawMysql):
    """``SELECT … FOR UPDATE``, in a transaction that is open without a statement of its own."""

    def prepare(self, session: Any, name: str) -> tuple[str, str]:  # noqa: ANN401 - a driver's
        session.execute(f"INSERT IGNORE INTO {_ROWS} VALUES (%s)", (name,))
        session.execute("SET SESSION autocommit = 0, innodb_lock_wait_timeout = 3600")
        session.execute("COMMIT")
        return f"SELECT 1 FROM {_ROWS} WHERE name = X'{name.encode().hex()}' FOR UPDATE", "COMMIT"


class RawMysqlAdvisory(_RawMysql):
    """``GET_LOCK``."""

    def prepare(self, session: Any, name: str) -> tuple[str, str]:  # noqa: ANN401 - a driver's
        del session
        key = hashlib.sha256(name.encode()).hexdigest()[:48]
        return f"SELECT GET_LOCK('{key}', {_WAIT_SECONDS})", f"SELECT RELEASE_LOCK('{key}')"


class RawMysqlRowUnfenced(RawMysqlRow):
    """Without a token."""

    fenced = False


class RawMysqlAdvisoryUnfenced(RawMysqlAdvisory):
    """Without a token."""

    fenced = False
