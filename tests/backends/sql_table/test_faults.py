"""The lock table while the world behaves badly: real servers are killed, stopped, cut off, read-only and full."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
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
from lockkit.sync import Client, Lease
from lockkit.testing.stopwatch import Stopwatch
from lockkit_tools.servers import MariaServer, PooledPostgres, PostgresServer, require, wait_until
from tests.backends.sql_table.support import DRIVERS, Connect, Look, counted, demote, waits, with_driver
from tests.programs import run_python
from tests.tries import busy, until

pytestmark = pytest.mark.timeout(180)

PATIENCE = 60.0


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """For tests that leave it in good order."""
    require("postgresql", local=True)
    with PostgresServer(password="right one") as server:  # noqa: S106 - of a throw-away server
        yield server


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def kept(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """A server for tests that end connections only."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


def in_background(client: Client, name: str = "x") -> tuple[threading.Thread, list[Lease]]:
    """Wait for a lock in a thread; return once it waits at the backend."""
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(client.lock(name, ttl=600).acquire(timeout=PATIENCE)))
    thread.start()
    wait_until(lambda: None if waits(client, name) else "nobody waits")
    return thread, got


def test_primary_that_was_demoted_is_left_for_the_one_that_took_over(connect: Connect) -> None:
    """Kept connections that may only read any more are replaced; nothing is reported to those who lock."""
    require("postgresql", local=True)
    with PostgresServer() as server:
        client = connect(server.url)
        lease, released = (client.lock(name, ttl=600).acquire(timeout=PATIENCE) for name in ("x", "y"))
        demote(server)

        released.release()
        with client.lock("y", ttl=600, timeout=PATIENCE) as another:
            assert another.token > released.token
        lease.extend()
        lease.release()


SLACK = 1.5
"""Seconds that a busy machine may take beyond what is promised."""


def took(call: Callable[[], object]) -> float:
    """Tell how long a call took that the database did not answer."""
    watch = Stopwatch()
    with pytest.raises(lockkit.BackendUnavailable):
        call()
    return watch.stop()


class TestNoAnswer:
    """The caller's time is over while the database says nothing: the call is back."""

    def test_table_that_somebody_has_locked(self, kept: PostgresServer | MariaServer, connect: Connect) -> None:
        """The server waits no longer than the caller; a longer wait goes on until the table is free."""
        client = connect(kept.url)
        client.lock("locked").acquire().release()
        lock_table = (
            "LOCK TABLE lockkit_locks" if isinstance(kept, PostgresServer) else "LOCK TABLES lockkit_locks WRITE"
        )
        engine = sqlalchemy.create_engine(with_driver(kept.url, DRIVERS))
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(lock_table))
            assert took(lambda: client.lock("locked").acquire(timeout=0)) < 0.5 + SLACK
            waiter = threading.Thread(target=lambda: client.lock("locked").acquire(timeout=PATIENCE).release())
            waiter.start()
            time.sleep(1.5)
            assert waiter.is_alive()
            connection.invalidate()
        waiter.join(PATIENCE)
        assert not waiter.is_alive()
        engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "sqlite"])
def test_closing_releases_a_thousand_leases_with_one_statement(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a client that waits for one of them gets it."""
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path}/locks.db"
        if kind != "sqlite":
            require(kind, local=True)
            url = stack.enter_context(PostgresServer() if kind == "postgresql" else MariaServer()).url
        client, other = lockkit.connect(url, ttl=600), stack.enter_context(lockkit.connect(url))
        leases = [client.lock(f"name {number}").acquire() for number in range(1200)]
        thread, got = in_background(other, "name 700")
        with counted(monkeypatch) as seen:
            client.close()
        assert len([text for text in seen if "owner = NULL" in text]) == 2
        thread.join(PATIENCE)
        got[0].release()
        assert Look(url).run("SELECT count(*) FROM lockkit_locks WHERE owner IS NOT NULL") == [(0,)]
        assert not any(lease.held for lease in leases)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "sqlite"])
def test_exit_inside_the_event_loop_releases(kind: str, tmp_path: Path) -> None:
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
    with ExitStack() as stack:
        urls = [f"sqlite:///{tmp_path}/locks.db"]
        if kind != "sqlite":
            require(kind, local=True)
            made = stack.enter_context(PostgresServer() if kind == "postgresql" else MariaServer())
            urls = [f"{made.url}?mode={mode}" for mode in ("table", "row", "advisory")]
        for url, end in product(urls, ("exit", "stop")):
            done = run_python("-c", program, url, end)
            assert done.returncode == 3, done.stderr
            assert "Event loop is closed" not in done.stderr
            assert "never awaited" not in done.stderr
            with lockkit.connect(url) as client:
                assert client.holders(end) == []


class TestRefused:
    """What retrying cannot mend is said at once, without a password."""

    def refusal(self, client: Client) -> str:
        """Acquire, and give the message of the refusal."""
        began = time.monotonic()
        with pytest.raises(lockkit.ConfigurationError) as caught:
            client.lock("x").acquire(timeout=PATIENCE)
        assert time.monotonic() - began < PATIENCE / 2
        shown = f"{caught.value} {caught.value.backend} {caught.value.__cause__!r}"
        assert "right one" not in shown
        assert "wrong" not in shown
        return str(caught.value)

    def test_database_that_is_not_there(self, postgresql: PostgresServer, connect: Connect) -> None:
        """By its name."""
        url = postgresql.url.removesuffix("/postgres") + "/nosuch"
        assert "nosuch" in self.refusal(connect(url))

    def test_read_only_database(self, postgresql: PostgresServer, connect: Connect) -> None:
        """As on a replica."""
        Look(postgresql.url).run("CREATE ROLE reader LOGIN SUPERUSER PASSWORD 'right one'")
        Look(postgresql.url).run("ALTER ROLE reader SET default_transaction_read_only = on")
        url = f"postgresql://reader:right%20one@{postgresql.address}/postgres"

        assert "read-only" in self.refusal(connect(url))
        assert "read-only" in self.refusal(connect(url, table="not_there"))


class TestPooler:
    """PostgreSQL behind pgbouncer."""

    @pytest.fixture(params=["transaction", "session", "statement"])
    def pooled(self, request: pytest.FixtureRequest) -> Iterator[PooledPostgres]:
        """In each of its modes."""
        require("postgresql", "pgbouncer", local=True)
        with PooledPostgres(pool_mode=request.param, pool_size=4) as group:
            yield group

    def test_locks_are_held_and_handed_over(self, pooled: PooledPostgres, connect: Connect) -> None:
        """Waiters look now and then; nothing is set for sessions that others get next."""
        client, other = connect(pooled.url), connect(pooled.url)
        for _ in range(10):  # beyond the number from which statements are prepared
            client.lock("x").acquire().release()
        lease = client.lock("x", ttl=600).acquire()
        thread, got = in_background(other)
        lease.extend()
        lease.release()
        thread.join(PATIENCE)
        assert got[0].token > lease.token
        got[0].release()
        client.close()
        other.close()

        with psycopg.connect(pooled.url, autocommit=True, prepare_threshold=None) as next_one:
            for name in ("statement_timeout", "lock_timeout"):
                assert next_one.execute(f"SHOW {name}".encode()).fetchone() == ("0",)

    def test_statement_and_its_values_reach_the_same_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the values meet what another client has prepared there, and may lock that instead."""
        require("postgresql", "pgbouncer", local=True)
        with PooledPostgres(pool_mode="transaction", pool_size=3) as pooled:
            with lockkit.connect(pooled.server.url) as direct:
                direct.lock("table").acquire(PATIENCE).release()
            errors = errors_of_statements(monkeypatch)
            lock_in_four_threads(pooled.url)

        assert errors == []


def errors_of_statements(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Note from now on what statements raise, also those that lockkit repeats."""
    errors: list[BaseException] = []
    run = Database._run_on

    async def noting(self: Database, *arguments: Any) -> Result:
        try:
            return await run(self, *arguments)
        except BaseException as error:
            errors.append(error)
            raise

    monkeypatch.setattr(Database, "_run_on", noting)
    return errors


def lock_in_four_threads(url: str) -> None:
    """Use several connections at once."""
    with lockkit.connect(url) as client:

        def cycles(name: str) -> None:
            for _ in range(10):
                with client.lock(name, timeout=PATIENCE):
                    client.holders(name)

        threads = [threading.Thread(target=cycles, args=(f"n{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)


class TestSqlite:
    """A file."""

    def test_read_only_file(self, tmp_path: Path) -> None:
        """Said to be so, whether the table is there or not."""
        path = tmp_path / "locks.db"
        path.touch()
        engine = sqlalchemy.create_engine(f"sqlite:///file:{path}?uri=true&mode=ro")
        with (
            lockkit.from_client(engine) as client,
            pytest.raises(lockkit.ConfigurationError, match="read-only"),
        ):
            client.lock("x").acquire(timeout=PATIENCE)
        with lockkit.connect(f"sqlite:///{path}") as writer:
            writer.lock("x").acquire().release()
        with (
            lockkit.from_client(engine) as client,
            pytest.raises(lockkit.ConfigurationError, match="read-only"),
        ):
            client.lock("x").acquire(timeout=PATIENCE)

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

    def test_directory_that_is_not_there(self, tmp_path: Path, connect: Connect) -> None:
        """Is not made."""
        with pytest.raises(lockkit.ConfigurationError, match="cannot be opened"):
            connect(f"sqlite:///{tmp_path}/nosuch/locks.db").ping()

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
            remove_files(tmp_path)
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


def remove_files(directory: Path) -> None:
    """Remove a database and what SQLite keeps beside it."""
    for file in directory.iterdir():
        file.unlink()


def make_file(path: Path, journal: str) -> None:
    """Make an empty database in this mode."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("VACUUM")
