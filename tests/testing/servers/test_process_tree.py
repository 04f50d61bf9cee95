"""
Servers of many processes: all of them are paused, killed and cleaned up.

What single kinds of servers can do (replicas, TLS, failovers, lost data) is proven by the tests of the backends.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Self

import pytest

from lockkit_tools.servers import PostgresServer, require, wait_until
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

    def __exit__(self, *_: object) -> None:
        self.connection.close()


class TestPostgres:
    """One server for most tests: making it takes the longest."""

    @pytest.fixture
    def server(self, postgres: PostgresServer) -> PostgresServer:
        """The shared server, started again if the last test stopped it."""
        return postgres.start()

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
