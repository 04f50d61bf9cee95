"""What the tests of mode=row and mode=advisory share: their servers, and looks behind the scenes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockkit import aio, url
from lockkit.backends.sql_session.backend import SessionBackend
from lockkit.configuration import registry
from lockkit.sync import Client, Lease
from lockkit_tools.servers import MariaServer, PostgresServer, wait_until
from tests.backends.sql_table.support import Look
from tests.backends.support import StubHost

MODES = ["row", "advisory"]
TTL = 3.0
LONG = 120.0
PATIENCE = 60.0


@dataclass
class ModeServer:
    """
    A server in one of the two modes.

    Attributes:
        server: It.
        mode: Which.
    """

    server: PostgresServer | MariaServer
    mode: str

    @property
    def url(self) -> str:
        """Of the backend."""
        return f"{self.server.url}?mode={self.mode}"

    @property
    def is_postgresql(self) -> bool:
        """Whether it is PostgreSQL."""
        return isinstance(self.server, PostgresServer)

    @property
    def leases(self) -> str:
        """Name of the table of leases."""
        return "lockkit_rows_leases" if self.mode == "row" else "lockkit_advisory"

    def look(self) -> Look:
        """See the database as somebody else does."""
        return Look(self.server.url)

    def end(self, pid: int) -> None:
        """End a session, as an administrator does."""
        self.server.execute(f"SELECT pg_terminate_backend({pid})" if self.is_postgresql else f"KILL {pid}")

    def has_session(self, pid: int) -> bool:
        """Whether the server still has a session."""
        where = f"pg_stat_activity WHERE pid = {pid}" if self.is_postgresql else f"processlist WHERE id = {pid}"
        schema = "pg_catalog" if self.is_postgresql else "information_schema"
        return self.server.execute(f"SELECT count(*) FROM {schema}.{where}") != "0"  # noqa: S608 - ours


@contextmanager
def running(function: Callable[[], object]) -> Iterator[list[Any]]:
    """Run a function in a thread meanwhile; what it returns is in the list afterwards."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()), daemon=True)
    thread.start()
    yield got
    thread.join(PATIENCE)
    assert not thread.is_alive()


def pid_of(lease: Lease | aio.Lease) -> int:
    """Give the server's number of the session that is this lease."""
    session = lease._record.grant.state.session
    assert session is not None
    return int(session.pid)


def waiting_pid(client: Client, name: str) -> int:
    """Give the server's number of the session in which this client waits."""
    (request,) = [request for request in client._engine.acquisitions.waiting if request.name == name]
    return int(request.state.session.pid)


def open_backend(place: ModeServer, host: StubHost) -> SessionBackend:
    """Make the backend itself, without an engine around it."""
    backend, _ = registry.open_backend(url.parse(place.url), {}, host)
    return backend  # type: ignore[return-value]


def until_waiting(client: Client | aio.Client, name: str, count: int = 1) -> None:
    """Return once so many acquisitions of this client wait for the lock, at the backend or behind one that does."""

    def ask() -> str | None:
        acquisitions = client._engine.acquisitions
        at_backend = [r for r in list(acquisitions.waiting) if r.name == name and r.state and r.state.queued]
        waiting = len(at_backend) + acquisitions.queues.behind(name) if at_backend else 0
        return None if waiting >= count else f"{waiting} wait"

    wait_until(ask)
