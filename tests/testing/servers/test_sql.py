"""PostgreSQL, pgbouncer and MariaDB servers, without their drivers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import pytest

from lockkit_tools.servers import (
    MariaServer,
    PgBouncer,
    PooledPostgres,
    PostgresServer,
    ServerError,
    require,
    wait_until,
)
from lockkit_tools.servers._process import tree


class Session:
    """A PostgreSQL session of a few lines, for a server that asks for no password."""

    def __init__(self, server: PostgresServer) -> None:
        self.connection = socket.create_connection((server.host, server.port), 30)
        words = b"user\0postgres\0database\0postgres\0\0"
        self.connection.sendall((len(words) + 8).to_bytes(4) + (3 << 16).to_bytes(4) + words)
        self.read_until_ready()

    def send(self, statement: bytes) -> None:
        """Sends a query without waiting for the answer."""
        self.connection.sendall(b"Q" + (len(statement) + 5).to_bytes(4) + statement + b"\0")

    def read_until_ready(self) -> bytes:
        """Reads up to the message that the server waits for the next query."""
        answer = b""
        while not answer.endswith(b"Z\0\0\0\5I"):
            data = self.connection.recv(4096)
            if not data:
                raise ConnectionError("the session was ended")
            answer += data
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()


class TestPostgres:
    """One server for most tests: making it takes the longest."""

    @pytest.fixture
    def server(self, postgres: PostgresServer) -> PostgresServer:
        """The shared server, started again if the last test stopped it."""
        return postgres.start()

    def test_committed_row_survives_a_crash(self, server: PostgresServer) -> None:
        """Also without fsync: what the process wrote is in the system's cache."""
        server.execute("CREATE TABLE kept (i int); INSERT INTO kept VALUES (7)")

        server.restart(crash=True)

        assert server.execute("SELECT i FROM kept") == "7"

    def test_restart_without_data_is_empty(self, server: PostgresServer) -> None:
        """The cluster is made anew."""
        server.execute("CREATE TABLE gone (i int)")

        server.restart(keep_data=False)

        assert server.execute("SELECT count(*) FROM pg_class WHERE relname = 'gone'") == "0"

    def test_paused_server_stops_open_sessions_too(self, server: PostgresServer) -> None:
        """Each session is a process of its own below the server."""
        with Session(server) as session:
            server.pause()
            session.connection.settimeout(0.3)
            session.send(b"SELECT 'awake'")
            with pytest.raises(TimeoutError):
                session.read_until_ready()

            server.resume()

            session.connection.settimeout(30)
            assert b"awake" in session.read_until_ready()

    def test_kill_leaves_no_process(self, server: PostgresServer) -> None:
        """Sessions and background processes die with the server."""
        with Session(server) as session:
            pids = [entry.pid for entry in tree(server.pid)]
            assert len(pids) > 2

            server.kill()

            with pytest.raises(ConnectionError):
                session.read_until_ready()
        wait_until(lambda: next((f"{pid} is there" for pid in pids if tree(pid)), None))

    def test_killed_server_leaves_no_shared_memory(self) -> None:
        """The kernel would keep it until the machine restarts."""
        with PostgresServer() as server:
            segment = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            assert segment in segments()
            server.kill()

        assert segment not in segments()

    def test_wrong_statement_is_an_error(self, server: PostgresServer) -> None:
        """Of psql, with what the server said."""
        with pytest.raises(ServerError, match="no_such_table"):
            server.execute("SELECT * FROM no_such_table")

    def test_fsync_is_off_unless_durable(self, server: PostgresServer) -> None:
        """Tests need no disk flushes."""
        assert server.execute("SHOW fsync") == "off"
        assert server.url == f"postgresql://postgres@{server.address}/postgres"


def segments() -> list[str]:
    """The ids of this machine's shared memory segments."""
    lines = subprocess.run(["ipcs", "-m"], check=True, capture_output=True, text=True).stdout
    return [line.split()[1] for line in lines.splitlines() if len(line.split()) > 4]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server."""
    require("postgresql", local=True)
    with PostgresServer() as server:
        yield server


def test_postgres_with_every_option() -> None:
    """Password, TLS, durable, settings: all at once, as making a cluster takes a second."""
    require("postgresql", local=True)
    settings = {"timezone": "'Asia/Tokyo'", "default_transaction_isolation": "'serializable'"}
    with PostgresServer(password="it's", tls=True, durable=True, settings=settings) as server:  # noqa: S106
        assert server.url.startswith("postgresql://postgres:it%27s@127.0.0.1:")
        assert f"sslrootcert={server.certificates.ca}" in server.url
        assert server.execute("SHOW fsync") == "on"
        assert server.execute("SHOW timezone") == "Asia/Tokyo"
        encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert server.execute(encrypted) == "t"
        server.restart(keep_data=False, crash=True)
        assert server.execute(encrypted) == "t"

        server.password = "other"  # noqa: S105 - of a throw-away server
        with pytest.raises(ServerError, match="password authentication failed"):
            server.execute("SELECT 1")


def test_pgbouncer_leads_to_the_server() -> None:
    """Sessions share server connections, and survive a restart of the pooler's server."""
    require("pgbouncer", local=True)
    with PooledPostgres(password="secret", pool_size=1) as pooled:  # noqa: S106 - as above
        through = PostgresServer(port=pooled.bouncer.port)
        backends = {through.execute("SELECT pg_backend_pid()") for _ in range(3)}
        assert len(backends) == 1
        assert pooled.url == f"postgresql://postgres@{pooled.bouncer.address}/postgres"

        pooled.server.restart()

        assert through.execute("SELECT 1") == "1"
        through.close()


def test_pgbouncer_takes_its_server_of_the_moment(postgres: PostgresServer) -> None:
    """A pooler can be put in front of a server that runs already."""
    require("pgbouncer", local=True)
    with PgBouncer(postgres.start(), pool_mode="session") as bouncer:
        through = PostgresServer(port=bouncer.port)
        assert through.execute("SHOW port") == str(postgres.port)
        through.close()


class TestMaria:
    """MariaDB."""

    @pytest.fixture
    def server(self, maria: MariaServer) -> MariaServer:
        """The shared server, started again if the last test stopped it."""
        return maria.start()

    def test_committed_row_survives_a_crash(self, server: MariaServer) -> None:
        """The log is written at commit, though not flushed to the disk."""
        server.execute("CREATE TABLE kept (i int); INSERT INTO kept VALUES (7)")

        server.restart(crash=True)

        assert server.execute("SELECT i FROM kept") == "7"

    def test_restart_without_data_is_empty(self, server: MariaServer) -> None:
        """The system tables are made anew, user and database included."""
        server.execute("CREATE TABLE gone (i int)")

        server.restart(keep_data=False)

        assert server.execute("SHOW TABLES") == ""

    def test_url_has_user_and_password(self, server: MariaServer) -> None:
        """Quotes in a password are data."""
        assert server.url == f"mariadb://lockkit:p%27%5Cw@{server.address}/lockkit"
        assert server.execute("SELECT CURRENT_USER()") == "lockkit@%"

    def test_paused_server_does_not_greet(self, server: MariaServer) -> None:
        """SIGSTOP, and on again."""
        server.pause()
        with socket.create_connection((server.host, server.port), 0.3) as connection:
            with pytest.raises(TimeoutError):
                connection.recv(1)

            server.resume()

            connection.settimeout(30)
            assert connection.recv(1)


@pytest.fixture(scope="module")
def maria() -> Iterator[MariaServer]:
    """A MariaDB server."""
    require("mariadb", local=True)
    with MariaServer(password="p'\\w") as server:  # noqa: S106 - as above
        yield server


@pytest.mark.skipif(sys.platform != "linux", reason="registers a handler of glibc's")
def test_programs_of_a_server_are_started_without_fork_handlers() -> None:
    """Those of gRPC start threads in the child, which crash it before it has become the program."""
    require("postgresql", local=True)
    program = (
        "import ctypes\n"
        "from lockkit_tools.servers import PostgresServer\n"
        "with PostgresServer() as server:\n"
        "    libc = ctypes.CDLL(None)\n"
        "    libc.__register_atfork(None, None, ctypes.cast(libc.abort, ctypes.c_void_p), None)\n"
        "    print(server.execute('SELECT 6 * 7'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr
