"""
Databases, faces and other processes for the tests of what works inside an application's transactions.

`start` starts one such process: see `work` and `hold`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import lockkit
from lockkit.sql import lock_in
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.forked import Forked, arguments, say

PATIENCE = 100.0
"""Seconds that another process may take on a busy machine."""

DRIVERS = {
    "postgresql": ("postgresql+psycopg", "postgresql+psycopg"),
    "mariadb": ("mariadb+pymysql", "mariadb+aiomysql"),
    "sqlite": ("sqlite", "sqlite+aiosqlite"),
}


@dataclass(frozen=True, slots=True)
class Base:
    """
    One database, asked on one face or the other.

    Attributes:
        kind: ``postgresql``, ``mariadb`` or ``sqlite``.
        place: What follows ``://`` in its URL.
    """

    kind: str
    place: str

    @property
    def url(self) -> str:
        """For the blocking face."""
        return f"{DRIVERS[self.kind][0]}://{self.place}"

    @contextmanager
    def engine(self, **options: Any) -> Iterator[sa.Engine]:
        """A blocking engine, disposed of at the end."""
        engine = sa.create_engine(self.url, **options)
        try:
            yield engine
        finally:
            engine.dispose()

    def aio(self, body: Callable[[Any], Awaitable[Any]], *, driver: str = "", **options: Any) -> Any:  # noqa: ANN401 - what is asked
        """Give a coroutine function an asyncio engine; give its result."""

        async def main() -> Any:  # noqa: ANN401 - see above
            engine = create_async_engine(f"{driver or DRIVERS[self.kind][1]}://{self.place}", **options)
            try:
                return await body(engine)
            finally:
                await engine.dispose()

        return asyncio.run(main())

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement, committed; give its rows if it has any."""
        with self.engine() as engine, engine.begin() as connection:
            result = connection.execute(sa.text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []


@contextmanager
def provided(kind: str, directory: Path) -> Iterator[Base]:
    """A database of a kind, with its server running."""
    if kind == "sqlite":
        yield Base(kind, f"/{directory / 'data.db'}")
        return
    require(kind, local=True)
    server = PostgresServer() if kind == "postgresql" else MariaServer()
    with server:
        yield Base(kind, server.url.partition("://")[2])


class Bases(dict[str, Base]):
    """Databases by kind, each made when it is first asked for: starting a server takes seconds."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        """Make nothing yet; what is made ends with the stack."""
        super().__init__()
        self._directory = directory
        self._stack = stack

    def __missing__(self, kind: str) -> Base:
        """Make it."""
        self[kind] = self._stack.enter_context(provided(kind, self._directory))
        return self[kind]


# What SQLAlchemy imports for the blocking face.
IMPORTS = (
    *("psycopg", "sqlalchemy.dialects.postgresql.psycopg", "pymysql", "sqlalchemy.dialects.mysql.pymysql"),
    *("sqlite3", "sqlalchemy.dialects.sqlite.pysqlite"),
)


def start(order: str, *arguments: object) -> Forked:
    """Start another process; it says a line when it is ready, and goes on when it gets one."""
    return Forked("tests.storage.sql.support:main", [order, *map(str, arguments)], IMPORTS)


def work(url: str, journal: str, times: str, isolation: str) -> None:
    """
    Add 1 to a number under a lock, again and again, and roll back every third time; say how often it was kept.

    While it holds the lock it writes the token to a file that all share: so the file has them in the order of grants.
    """
    engine = sa.create_engine(url, isolation_level=isolation or None)
    chance = random.Random(os.getpid())
    kept = 0
    with engine.connect():
        say("ready")
    sys.stdin.readline()
    with Path(journal).open("a", buffering=1) as file:
        done = 0
        while done < int(times):
            with engine.connect() as connection:
                try:
                    lock = lock_in(connection, "number")
                    (value,) = connection.execute(sa.text("SELECT value FROM numbers")).one()
                    connection.execute(sa.text("UPDATE numbers SET value = :value"), {"value": value + 1})
                except lockkit.LockTimeout:
                    connection.rollback()
                    continue
                done += 1
                file.write(f"{lock.token}\n")
                if chance.random() < 1 / 3:
                    connection.rollback()
                else:
                    connection.commit()
                    kept += 1
    engine.dispose()
    say(kept)


def hold(url: str, name: str) -> None:
    """Take a lock in a transaction and say the token; go on with the next line: commit."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        say(lock_in(connection, name).token)
        sys.stdin.readline()
    say("committed")


def main() -> None:
    """Do what was ordered."""
    ordered, *given = arguments()
    orders: dict[str, Callable[..., None]] = {"hold": hold, "work": work}
    orders[ordered](*given)
