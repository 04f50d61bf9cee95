"""The lock table while the world behaves badly: real servers are killed, stopped, cut off, read-only and full."""

from __future__ import annotations

import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy

import lockkit
import lockkit.aio
from lockkit.backends.sql.connection import Result
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.sqlite import SqliteDriver
from lockkit.runtime import Runtime
from lockkit.testing.stopwatch import Stopwatch
from lockkit_tools.servers import MariaServer, PgBouncer, PooledPostgres, PostgresServer, require, wait_until
from tests.backends.sql_table.support import DRIVERS, Look, waits, with_driver
from tests.backends.support import Connect
from tests.programs import run_python
from tests.tries import beside, busy, until

PATIENCE = 60.0
SLACK = 1.5
"""Seconds that a busy machine may take beyond what is promised."""


@pytest.mark.parametrize(
    ("kind", "statement"),
    [("postgresql", "LOCK TABLE lockkit_locks"), ("mariadb", "LOCK TABLES lockkit_locks WRITE")],
)
def test_table_that_somebody_has_locked(
    kind: str, statement: str, request: pytest.FixtureRequest, connect: Connect
) -> None:
    """The server waits no longer than the caller; a longer wait goes on until the table is free."""
    server: PostgresServer | MariaServer = request.getfixturevalue(kind)
    client = connect(server.url)
    client.lock("locked").acquire().release()
    engine = sqlalchemy.create_engine(with_driver(server.url, DRIVERS))
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(statement))
        watch = Stopwatch()
        with pytest.raises(lockkit.BackendUnavailable):
            client.lock("locked").acquire(timeout=0)
        assert watch.stop() < 0.5 + SLACK
        waiter = beside(client.lock("locked").acquire, PATIENCE)
        time.sleep(1.5)
        assert not waiter.done()
        connection.invalidate()
    waiter.result(PATIENCE).release()
    engine.dispose()


def test_exit_inside_the_event_loop_releases(url: str) -> None:
    """The loop ends, or is left as it is, before the interpreter does: what is left to do needs none."""
    program = (
        "import asyncio, sys, lockkit.aio, lockkit.engine.engine\n"
        f"lockkit.engine.engine.EXIT_SECONDS = {PATIENCE / 2}\n"
        "async def main():\n"
        "    global client, lease\n"
        "    client = lockkit.aio.connect(sys.argv[1])\n"
        "    lease = await client.lock(sys.argv[2], ttl=600).acquire()\n"
        "    sys.exit(3) if sys.argv[2] == 'exit' else asyncio.get_running_loop().stop()\n"
        "    await asyncio.sleep(600)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except RuntimeError as error:\n"
        "    sys.exit(3)\n"
    )
    modes = ["table"] if url.startswith("sqlite") else ["table", "row", "advisory"]
    for end, mode in [("stop", modes[0]), *product(["exit"], modes), ("stop", modes[-1])]:
        done = run_python("-c", program, f"{url}?mode={mode}", end)
        assert done.returncode == 3, done.stderr
        assert "Event loop is closed" not in done.stderr
        assert "never awaited" not in done.stderr
        with lockkit.connect(url, mode=mode) as client:
            assert client.holders(end) == []


def test_read_only_database(postgresql: PostgresServer, connect: Connect) -> None:
    """As on a replica; or one that is not there. That is said at once, without a password."""
    Look(postgresql.url).run("CREATE ROLE reader LOGIN SUPERUSER PASSWORD 'right one'")
    Look(postgresql.url).run("ALTER ROLE reader SET default_transaction_read_only = on")
    url = f"postgresql://reader:right%20one@{postgresql.address}"
    for database, table, word in (
        ("postgres", "lockkit_locks", "read-only"), ("postgres", "not_there", "read-only"), ("nosuch", "x", "nosuch")
    ):  # fmt: skip
        watch = Stopwatch()
        with pytest.raises(lockkit.ConfigurationError, match=word) as caught:
            connect(f"{url}/{database}", table=table).lock("x").acquire(timeout=PATIENCE)
        assert watch.stop() < PATIENCE / 2
        assert "right one" not in f"{caught.value} {caught.value.backend} {caught.value.__cause__!r}"


def test_primary_behind_servers_that_do_not_answer(postgresql: PostgresServer, connect: Connect) -> None:
    """To wait for both takes longer than one call may, so one of the next calls finds it."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        mute = "".join(f"127.0.0.1:{one.getsockname()[1]}," for one in (first, second))
        client = connect(postgresql.url.replace(postgresql.address, f"{mute}{postgresql.address}"))
        client.lock("x").acquire(timeout=PATIENCE).release()


@pytest.mark.parametrize("pool_mode", ["transaction", "session", "statement"])
def test_locks_are_held_and_handed_over(postgresql: PostgresServer, connect: Connect, pool_mode: Any) -> None:  # noqa: ANN401 - a literal
    """Behind pgbouncer: waiters look now and then; nothing is set for sessions that others get next."""
    require("pgbouncer", local=True)
    with PgBouncer(postgresql, pool_mode=pool_mode, pool_size=4) as pooler:
        client, other = connect(pooler.url), connect(pooler.url)
        for _ in range(10):  # beyond the number from which statements are prepared
            client.lock("x").acquire().release()
        lease = client.lock("x", ttl=600).acquire()
        waiter = beside(other.lock("x", ttl=600).acquire, PATIENCE)
        wait_until(lambda: None if waits(other, "x") else "nobody waits")
        lease.extend()
        lease.release()
        assert waiter.result(PATIENCE).token > lease.token
        waiter.result().release()
        client.close()
        other.close()

        with psycopg.connect(pooler.url, autocommit=True, prepare_threshold=None) as next_one:
            for name in ("statement_timeout", "lock_timeout"):
                assert next_one.execute(f"SHOW {name}".encode()).fetchone() == ("0",)


def test_statement_and_its_values_reach_the_same_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind pgbouncer. Else the values meet what another client has prepared there, and may lock that instead."""
    require("postgresql", "pgbouncer", local=True)
    errors: list[BaseException] = []  # also of statements that lockkit repeats
    run = Database._run_on

    async def noting(self: Database, *arguments: Any) -> Result:
        try:
            return await run(self, *arguments)
        except BaseException as error:
            errors.append(error)
            raise

    def cycles(name: str) -> None:
        for _ in range(10):
            with client.lock(name, timeout=PATIENCE):
                client.holders(name)

    with PooledPostgres(pool_mode="transaction", pool_size=3) as pooled:
        with lockkit.connect(pooled.server.url) as direct:
            direct.lock("table").acquire(PATIENCE).release()
        monkeypatch.setattr(Database, "_run_on", noting)
        with lockkit.connect(pooled.url) as client, ThreadPoolExecutor(4) as pool:
            list(pool.map(cycles, "abcd"))

    assert errors == []


class TestSqlite:
    """A file."""

    def test_read_only_file(self, tmp_path: Path) -> None:
        """Said to be so, whether the table is there or not."""
        path = tmp_path / "locks.db"
        path.touch()
        engine = sqlalchemy.create_engine(f"sqlite:///file:{path}?uri=true&mode=ro")
        for _ in range(2):
            refused = pytest.raises(lockkit.ConfigurationError, match="read-only")
            with lockkit.from_client(engine) as client, refused:
                client.lock("x").acquire(timeout=PATIENCE)
            with lockkit.connect(f"sqlite:///{path}") as writer:
                writer.lock("x").acquire().release()

    def test_full_disk(self, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is granted, and why is said; it may get better, so it is no error of configuration."""
        path = tmp_path / "locks.db"
        with lockkit.connect(f"sqlite:///{path}") as writer:
            writer.lock("x").acquire().release()
        open_file = SqliteDriver.open

        def open_small(self: SqliteDriver, runtime: Runtime) -> Any:  # noqa: ANN401 - private
            opened: Any = open_file(self, runtime)
            opened.dbapi.execute("PRAGMA max_page_count = 1")
            return opened

        monkeypatch.setattr(SqliteDriver, "open", open_small)
        client = connect(f"sqlite:///{path}")
        client.lock("x").acquire().release()

        def refusal() -> str:
            with pytest.raises(lockkit.BackendUnavailable) as caught:  # noqa: PT012 - one of many tries
                for number in range(2000):
                    client.lock(f"{'long name ' * 20} {number}").acquire(timeout=0).release()
            return str(caught.value)

        until(lambda: "no space left" in refusal())  # a busy disk may be another reason

    @pytest.mark.parametrize("journal", ["WAL", "DELETE"])
    @pytest.mark.parametrize("replaced", [False, True])
    def test_file_that_is_removed_or_replaced(self, tmp_path: Path, journal: str, *, replaced: bool) -> None:
        """The locks in it are gone for all: nobody goes on in a file without a name."""
        path = tmp_path / "locks.db"
        make_file(path, journal)
        with lockkit.connect(f"sqlite:///{path}") as client, lockkit.connect(f"sqlite:///{path}") as other:
            lease = client.lock("x", ttl=600, raise_on_lost=False).acquire()
            free = client.lock("free").acquire()
            assert lease.confirm()
            for file in tmp_path.iterdir():
                file.unlink()
            if replaced:
                make_file(path, journal)
            second = other.lock("x", ttl=600).acquire(timeout=PATIENCE)

            assert not lease.confirm()
            with pytest.raises(lockkit.LockLost):
                free.release()
            assert busy(client.lock("x"))
            second.release()
            newest = client.lock("x").acquire(timeout=PATIENCE)
            assert newest.token > second.token > lease.token
            newest.release()

    @pytest.mark.parametrize("journal", ["DELETE", "MEMORY", "OFF", "WAL"])
    def test_long_transaction_of_another_program(self, tmp_path: Path, connect: Connect, journal: str) -> None:
        """Nothing is renewed meanwhile: a lease is held while its ttl lasts. All goes on afterwards."""
        path = tmp_path / "locks.db"
        make_file(path, journal)
        client, other = connect(f"sqlite:///{path}"), connect(f"sqlite:///{path}")
        short, long = client.lock("short", ttl=1.0).acquire(PATIENCE), client.lock("long", ttl=600).acquire(PATIENCE)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for some in (client, other):
                with pytest.raises(lockkit.BackendUnavailable, match="by another transaction"):
                    some.lock("new").acquire(timeout=0.1)
            assert short.wait_lost(PATIENCE)
            connection.execute("COMMIT")

        assert long.confirm()
        assert busy(other.lock("long"))
        with other.lock("short", timeout=PATIENCE) as after:
            assert after.token > short.token
        long.release()


def make_file(path: Path, journal: str) -> None:
    """Make an empty database in this mode."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("VACUUM")
