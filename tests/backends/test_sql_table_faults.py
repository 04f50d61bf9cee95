"""The lock table while the world behaves badly: real servers are killed, stopped, cut off, read-only and full."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event

import lockkit
import lockkit.aio
from lockkit.testing.servers import FaultProxy, MariaServer, PooledPostgres, PostgresServer, require, wait_until
from tests.backends.sql_table_support import Look, waits

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from lockkit.sync import Client, Lease

    Connect: TypeAlias = Callable[..., Client]

pytestmark = pytest.mark.timeout(180)

TTL = 3.0
PATIENCE = 60.0


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """For tests that leave it in good order."""
    require("postgresql", local=True)
    with PostgresServer(password="right one") as server:  # noqa: S106 - of a throw-away server
        yield server


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """A server of this test's own, to be ill-treated."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def kept(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """A server for tests that end connections only."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda url, **options: clients.enter_context(lockkit.connect(url, **options))


def in_background(client: Client, name: str = "x") -> tuple[threading.Thread, list[Lease]]:
    """Wait for a lock in a thread; return once it waits at the backend."""
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(client.lock(name, ttl=600).acquire(timeout=PATIENCE)))
    thread.start()
    wait_until(lambda: None if waits(client, name) else "nobody waits")
    return thread, got


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_dead_or_frozen_server_ends_the_lease_by_its_deadline(
    server: PostgresServer | MariaServer, connect: Connect, fault: str
) -> None:
    """Loss is told in time though nothing answers, a call is bounded, and the client recovers by itself."""
    client = connect(server.url)
    lease = client.lock("x", ttl=TTL).acquire()
    reasons: list[str] = []
    lease.on_lost(lambda _, reason: reasons.append(reason))
    getattr(server, fault)()
    struck = time.monotonic()

    with pytest.raises(lockkit.BackendUnavailable):
        client.lock("y").acquire(timeout=0)
    assert time.monotonic() - struck < 30  # each of its waits has a limit; the machine may be busy
    assert lease.wait_lost(PATIENCE)
    wait_until(lambda: None if reasons == ["expired"] else f"told {reasons}")

    server.start() if fault == "kill" else server.resume()
    again = client.lock("x", ttl=600).acquire(timeout=PATIENCE)
    assert again.token > lease.token
    again.release()


def test_lease_outlives_a_restart_of_the_server(server: PostgresServer | MariaServer, connect: Connect) -> None:
    """The row is there after a crash; the holder goes on, and a waiter gets the lock when it is released."""
    client, other = connect(server.url), connect(server.url)
    lease = client.lock("x", ttl=30).acquire()
    thread, got = in_background(other)

    server.restart(crash=True)

    assert lease.confirm()
    lease.extend()
    assert got == []
    lease.release()
    thread.join(PATIENCE)
    assert got[0].token > lease.token
    got[0].release()


def test_ended_connections_of_holder_and_waiter(kept: PostgresServer | MariaServer, connect: Connect) -> None:
    """An administrator ends all sessions: nothing is lost, no wake-up either."""
    client, other = connect(kept.url), connect(kept.url)
    lease = client.lock("x", ttl=600).acquire()
    thread, got = in_background(other)
    for _ in range(3):
        if isinstance(kept, PostgresServer):
            kept.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'"
            )
        else:
            for number in kept.execute(
                "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user = 'lockkit'"
            ).split():
                kept.execute(f"KILL {number}")
        time.sleep(0.3)
    wait_until(lambda: None if waits(other, "x") else "nobody waits")

    assert lease.confirm()
    lease.release()
    thread.join(20)
    assert got[0].token > lease.token
    got[0].release()


def test_release_and_renewal_outlive_an_idle_cut(kept: PostgresServer | MariaServer, connect: Connect) -> None:
    """A kept connection that something on the way has cut is replaced, also for what is sent once."""
    with FaultProxy(kept.host, kept.port) as proxy:
        client = connect(kept.url.replace(kept.address, proxy.address))
        lock = client.lock("x", ttl=600)
        for reset in (True, False):
            lease = lock.acquire(timeout=0)
            proxy.cut(reset=reset)
            time.sleep(0.1)
            lease.release()
            proxy.cut(reset=reset)
            time.sleep(0.1)


class TestLostAnswers:
    """The statement was carried out, and its answer never came."""

    @pytest.fixture
    def proxy(self, postgresql: PostgresServer) -> Iterator[FaultProxy]:
        """Stands between client and server."""
        with FaultProxy(postgresql.host, postgresql.port) as proxy:
            yield proxy

    def test_grant_is_had_all_the_same(self, postgresql: PostgresServer, proxy: FaultProxy, connect: Connect) -> None:
        """Asked again under the same owner, on a new connection."""
        client = connect(postgresql.url_at(proxy.address))
        client.lock("lost").acquire().release()
        dropped = proxy.drop_next_reply(match=b"lockkit_locks")

        lease = client.lock("lost").acquire(timeout=0)

        assert dropped.wait(PATIENCE)
        owner, token, _ = Look(postgresql.url).row("lost")
        assert (owner, token) == (lease.owner, lease.token)
        lease.release()

    def test_grant_to_a_client_that_is_cut_off_is_undone(
        self, postgresql: PostgresServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """Nobody waits for its ttl, once the client reaches the server again."""
        client, other = connect(postgresql.url_at(proxy.address)), connect(postgresql.url)
        client.lock("cut").acquire().release()
        proxy.blackhole(to_server=False)

        with pytest.raises(lockkit.BackendUnavailable):
            client.lock("cut", ttl=600).acquire(timeout=0)

        proxy.heal()
        proxy.cut()
        other.lock("cut").acquire(timeout=PATIENCE).release()

    def test_release_is_sent_once_and_can_be_called_again(
        self, postgresql: PostgresServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """A release whose answer was lost raises; the second one touches nobody else's lock."""
        client, other = connect(postgresql.url_at(proxy.address)), connect(postgresql.url)
        lease = client.lock("once").acquire()
        dropped = proxy.drop_next_reply(match=b"freed")

        with pytest.raises(lockkit.BackendUnavailable):
            lease.release()

        assert dropped.wait(PATIENCE)
        newer = other.lock("once").acquire(timeout=0)
        lease.release()
        assert newer.confirm()
        newer.release()

    def test_cancellations_leave_nothing(self, postgresql: PostgresServer) -> None:
        """Whenever an asyncio acquisition is cancelled, no row is held and no connection lost."""

        async def scenario() -> None:
            async with lockkit.aio.connect(postgresql.url) as client:
                await client.ping()
                for number in range(300):
                    task = asyncio.create_task(client.lock("cancelled", ttl=600).acquire())
                    await asyncio.sleep(0.0001 * (number % 20))
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await (await task).release()
                lease = await client.lock("cancelled").acquire(timeout=10)
                await lease.release()

        asyncio.run(scenario())
        assert Look(postgresql.url).row("cancelled")[0] is None


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

    def test_wrong_password(self, postgresql: PostgresServer, connect: Connect) -> None:
        """The same for a user who is not there."""
        for user in ("postgres:wr%6Fng", "nobody:wr%6Fng"):
            url = f"postgresql://{user}@{postgresql.address}/postgres"
            assert "refuses the login" in self.refusal(connect(url))

    def test_database_that_is_not_there(self, postgresql: PostgresServer, connect: Connect) -> None:
        """By its name."""
        url = postgresql.url.removesuffix("/postgres") + "/nosuch"
        assert "nosuch" in self.refusal(connect(url))

    def test_missing_rights(self, postgresql: PostgresServer, connect: Connect) -> None:
        """To the table, and to make it."""
        look = Look(postgresql.url)
        look.run("CREATE ROLE poor LOGIN PASSWORD 'right one'")
        connect(postgresql.url).lock("x").acquire().release()
        url = f"postgresql://poor:right%20one@{postgresql.address}/postgres"

        assert "denies this user a right" in self.refusal(connect(url))
        look.run("CREATE SCHEMA closed")
        message = self.refusal(connect(url, table="closed.locks"))
        assert "no table closed.locks, and it cannot be made" in message or "denies this user a right" in message

    def test_read_only_database(self, postgresql: PostgresServer, connect: Connect) -> None:
        """As on a replica."""
        Look(postgresql.url).run("CREATE ROLE reader LOGIN SUPERUSER PASSWORD 'right one'")
        Look(postgresql.url).run("ALTER ROLE reader SET default_transaction_read_only = on")
        url = f"postgresql://reader:right%20one@{postgresql.address}/postgres"

        assert "read-only" in self.refusal(connect(url))
        assert "read-only" in self.refusal(connect(url, table="not_there"))

    def test_nobody_listens_at_the_port(self, connect: Connect) -> None:
        """That is no error of configuration: it may come."""
        for scheme in ("postgresql", "mariadb"):
            with pytest.raises(lockkit.BackendUnavailable, match=r"127\.0\.0\.1:9"):
                connect(f"{scheme}://127.0.0.1:9/x").ping()


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
        thread.join(20)
        assert got[0].token > lease.token
        got[0].release()
        client.close()
        other.close()

        with psycopg.connect(pooled.url, autocommit=True, prepare_threshold=None) as next_one:
            for name in ("statement_timeout", "lock_timeout"):
                assert next_one.execute(f"SHOW {name}".encode()).fetchone() == ("0",)


class TestSqlite:
    """A file."""

    def engine(self, path: Path, *pragmas: str, query: str = "") -> sqlalchemy.Engine:
        """Make an engine whose connections begin with these."""
        engine = sqlalchemy.create_engine(f"sqlite:///file:{path}?uri=true{query}")

        @event.listens_for(engine, "connect")
        def begin(connection: sqlite3.Connection, record: object) -> None:
            del record
            for pragma in pragmas:
                connection.execute(f"PRAGMA {pragma}")

        return engine

    def test_read_only_file(self, tmp_path: Path) -> None:
        """Said to be so, whether the table is there or not."""
        path = tmp_path / "locks.db"
        sqlalchemy.create_engine(f"sqlite:///{path}").connect().close()
        engine = self.engine(path, query="&mode=ro")
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

    def test_full_disk(self, tmp_path: Path) -> None:
        """Nothing is granted, and why is said; it may get better, so it is no error of configuration."""
        path = tmp_path / "locks.db"
        with lockkit.connect(f"sqlite:///{path}") as writer:
            writer.lock("x").acquire().release()
        with lockkit.from_client(self.engine(path, "max_page_count = 1")) as client:
            client.lock("x").acquire().release()

            def fill() -> None:
                for number in range(2000):
                    client.lock(f"{'long name ' * 20} {number}").acquire(timeout=0).release()

            with pytest.raises(lockkit.BackendUnavailable, match="no space left"):
                fill()

    def test_directory_that_is_not_there(self, tmp_path: Path, connect: Connect) -> None:
        """Is not made."""
        with pytest.raises(lockkit.ConfigurationError, match="cannot be opened"):
            connect(f"sqlite:///{tmp_path}/nosuch/locks.db").ping()

    def test_somebody_elses_long_transaction(self, tmp_path: Path, connect: Connect) -> None:
        """While another writer holds the file nothing is granted, and a wait goes on until it is over."""
        client = connect(f"sqlite:///{tmp_path}/locks.db")
        client.lock("x").acquire().release()
        with sqlalchemy.create_engine(f"sqlite:///{tmp_path}/locks.db").connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(lockkit.BackendUnavailable, match="is locked by another transaction"):
                client.lock("x").acquire(timeout=0)
            connection.rollback()
        client.lock("x").acquire(timeout=PATIENCE).release()

    @pytest.mark.slow
    def test_sixteen_processes_on_one_file(self, tmp_path: Path) -> None:
        """Nobody is told that the database is locked, and nobody's update is lost."""
        program = (
            "import sys, pathlib, lockkit\n"
            "file = pathlib.Path(sys.argv[2])\n"
            "with lockkit.connect(sys.argv[1], ttl=60) as client:\n"
            "    for _ in range(3):\n"
            f"        with client.lock('x', timeout={PATIENCE}) as lease:\n"
            "            number, token = map(int, file.read_text().split())\n"
            "            assert lease.token > token\n"
            "            file.write_text(f'{number + 1} {lease.token}')\n"
        )
        counter = tmp_path / "counter"
        counter.write_text("0 0")
        command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/locks.db", str(counter)]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(16)]
        failures = [process.communicate(timeout=150)[1] for process in processes]

        assert [failure for failure in failures if failure] == []
        assert counter.read_text().split()[0] == "48"
