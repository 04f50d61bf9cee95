"""PostgreSQL behind pgbouncer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from lockkit_tools.servers.base import Server, ServerGroup
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.postgresql import PostgresServer
from lockkit_tools.servers.readiness import ask_postgresql

PoolMode = Literal["session", "transaction", "statement"]


class PgBouncer(Server):
    """
    A connection pooler in front of a PostgreSQL server.

    Clients need no password; pgbouncer logs in at the server for them.

    Args:
        pool_mode: When a server connection goes back to the pool.
        pool_size: Server connections for each user and database.
    """

    kind = "pgbouncer"
    run_as: ClassVar[tuple[str, ...]] = ("postgres",)

    def __init__(
        self,
        server: PostgresServer,
        *,
        pool_mode: PoolMode = "transaction",
        pool_size: int = 20,
    ) -> None:
        super().__init__()
        self.server = server
        self.pool_mode = pool_mode
        self.pool_size = pool_size

    @property
    def url(self) -> str:
        """``postgresql://postgres@…/postgres`` through the pooler."""
        return f"postgresql://postgres@{self.address}/postgres"

    def command(self) -> Sequence[str]:
        return [str(find_program("pgbouncer")), str(self.directory / "pgbouncer.ini")]

    def prepare(self) -> None:
        """Writes pgbouncer.ini and the file of users."""
        password = (self.server.password or "").replace('"', '""')
        users = self.write("users", f'"postgres" "{password}"\n')
        lines = {
            "listen_addr": self.host,
            "listen_port": str(self.port),
            "unix_socket_dir": str(self.directory),
            "auth_type": "trust",
            "auth_file": str(users),
            "pool_mode": self.pool_mode,
            "default_pool_size": str(self.pool_size),
            "max_client_conn": "500",
            # By default it looks after 15 s whether a server that was down is back.
            "server_login_retry": "0.1",
        }
        target = f"host={self.server.host} port={self.server.port}"
        self.write(
            "pgbouncer.ini",
            f"[databases]\n* = {target}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in lines.items()),
        )

    def ask(self) -> str | None:
        """Ready when it asks to log in."""
        return ask_postgresql(self.host, self.port)


class PooledPostgres(ServerGroup):
    """
    A PostgreSQL server and a pgbouncer in front of it; `url` leads through the latter.

    Args:
        pool_mode: When a server connection goes back to the pool.
        pool_size: Server connections for each user and database.
    """

    kind = "pgbouncer"

    def __init__(self, *, pool_mode: PoolMode = "transaction", pool_size: int = 20) -> None:
        self.server = PostgresServer()
        self.bouncer = PgBouncer(self.server, pool_mode=pool_mode, pool_size=pool_size)

    @property
    def servers(self) -> Sequence[Server]:
        return [self.server, self.bouncer]

    @property
    def url(self) -> str:
        """The URL through pgbouncer."""
        return self.bouncer.url
