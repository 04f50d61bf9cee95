"""Servers, tables and looks behind the scenes for the tests of the lock table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import NullPool, text

from lockkit.backends.sql.database import Database
from lockkit.backends.sql_table import backend as sql_table
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, PostgresServer
from tests.tries import until

if TYPE_CHECKING:
    from lockkit.backends.sql.connection import Connection, Parameter, Result, Statement

DRIVERS = {"postgresql": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}


def with_driver(url: str, drivers: dict[str, str]) -> str:
    """Write a URL as SQLAlchemy wants it."""
    scheme, _, rest = url.partition(":")
    return f"{scheme}+{drivers[scheme]}:{rest}"


class Look:
    """What is in a database, seen by somebody else: a plain connection for each question."""

    def __init__(self, url: str) -> None:
        self._engine = sqlalchemy.create_engine(with_driver(url, DRIVERS), poolclass=NullPool)

    def run(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement, committed; give its rows."""
        with self._engine.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

    def row(self, name: str, table: str = "lockkit_locks") -> tuple[str | None, int, int]:
        """Give owner, token and expires_at_us of a lock."""
        ((owner, token, expires_at_us),) = self.run(
            f"SELECT owner, token, expires_at_us FROM {table} WHERE name = :name",  # noqa: S608 - a test's own name
            name=name,
        )
        return owner.decode() if isinstance(owner, bytes) else owner, token, expires_at_us


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Take down the statements that go to the database meanwhile: their first words."""
    seen: list[str] = []
    run = Database._run_on

    async def counting(
        self: Database, connection: Connection, statement: Statement, parameters: Sequence[Parameter], until: float
    ) -> Result:
        seen.append(statement.text)
        return await run(self, connection, statement, parameters, until)

    with monkeypatch.context() as patch:
        patch.setattr(sql_table, "REAP_SHARE", 0.0)
        patch.setattr(Database, "_run_on", counting)
        yield seen


class Standby(PostgresServer):
    """A copy of a server that follows it, perhaps through a proxy."""

    def __init__(self, primary: PostgresServer, via: FaultProxy | None = None) -> None:
        super().__init__(password=primary.password, durable=primary.durable, settings=primary.settings)
        self._primary = primary
        self._via = via or primary

    def _make_cluster(self) -> None:
        where = ("-h", self._via.host, "-p", str(self._via.port), "-U", "postgres")
        options = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        copy = str(self._program("pg_basebackup"))
        self.run(copy, *where, "-D", str(self.data), *options, PGPASSWORD=self._primary.password or "")


def demote(server: PostgresServer) -> None:
    """Have all present sessions only read, as those of a demoted primary do. New ones find the one that took over."""
    with psycopg.connect(server.url, autocommit=True) as present:
        server.execute("ALTER ROLE postgres SET default_transaction_read_only = off")
        server.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        server.execute("SELECT pg_reload_conf()")
        until(lambda: present.execute("SHOW transaction_read_only").fetchone() == ("on",))


def waits(client: Client, name: str) -> bool:
    """Tell whether an acquisition of this client waits at the backend."""
    return any(request.name == name for request in list(client._engine.acquisitions.waiting))


def now_us() -> int:
    """Wall clock of this machine, which is the servers' too."""
    return time.time_ns() // 1000
