"""What the tests of mode=row and mode=advisory share: their servers, and looks behind the scenes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from lockkit import aio, url
from lockkit.backends.sql_session.backend import SessionBackend
from lockkit.configuration import registry
from lockkit.sync import Client, Lease
from lockkit_tools.servers import MariaServer, PostgresServer, wait_until
from tests.backends.support import StubHost
from tests.tries import beside

MODES = ["row", "advisory"]
TTL = 3.0
LONG = 120.0
PATIENCE = 60.0


@dataclass
class ModeServer:
    """A server in one of the modes."""

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
        return {"table": "lockkit_locks", "row": "lockkit_rows_leases"}.get(self.mode, "lockkit_advisory")

    def end(self, pid: int) -> None:
        """End a session, as an administrator does."""
        self.server.execute(f"SELECT pg_terminate_backend({pid})" if self.is_postgresql else f"KILL {pid}")


def queued(client: Client, name: str, *, read: bool = False, ttl: float = LONG) -> Future[Lease]:
    """Acquire a lock in another thread; return once that waits for it."""
    lock = client.rwlock(name, ttl=ttl).read() if read else client.lock(name, ttl=ttl)
    got = beside(lock.acquire, PATIENCE)
    until_waiting(client, name)
    return got


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
