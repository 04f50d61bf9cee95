"""One PostgreSQL server."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from lockkit_tools.servers._template import make_or_copy
from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.readiness import ask_postgresql


class PostgresServer(Server):
    """
    A PostgreSQL server on 127.0.0.1 with the superuser and database ``postgres``.

    See `Server` for its options, e.g. ``settings={"timezone": "'Asia/Tokyo'"}``.
    """

    kind = "postgresql"
    # "Fast" shutdown: ends sessions.  SIGTERM would wait until clients leave by themselves.
    stop_signal: ClassVar[int] = signal.SIGINT
    tidies_up: ClassVar[bool] = True
    run_as: ClassVar[tuple[str, ...]] = ("postgres",)

    @property
    def url(self) -> str:
        """``postgresql://postgres@…/postgres``; with TLS it asks for a checked certificate."""
        return self.url_at(self.address)

    def url_at(self, address: str) -> str:
        """The URL through another address that leads here: a proxy's, a pooler's."""
        password = f":{quote(self.password, safe='')}" if self.password is not None else ""
        query = f"?sslmode=verify-full&sslrootcert={self.certificates.ca}" if self.tls else ""
        return f"postgresql://postgres{password}@{address}/postgres{query}"

    def execute(self, statement: str) -> str:
        """Runs SQL as the superuser, through the `psql` program."""
        options = ("--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1")
        where = ("--host", self.host, "--port", str(self.port), "--username", "postgres")
        psql = str(find_program("psql"))
        return self.run(
            *(psql, *options, *where, "--dbname", "postgres", "--command", statement),
            PGPASSWORD=self.password or "",
        ).strip()

    def command(self) -> Sequence[str]:
        return [str(self._program("postgres")), "-D", str(self.data)]

    def prepare(self) -> None:
        """Makes the database cluster if there is none, and writes the configuration."""
        if not (self.data / "PG_VERSION").exists():
            self._make_cluster()
        lines = [f"{name} = {value}" for name, value in self._configuration().items()]
        self.write("data/lockkit.conf", "\n".join(lines) + "\n")

    def ask(self) -> str | None:
        """Ready when it asks to log in."""
        return ask_postgresql(self.host, self.port)

    def close(self) -> None:
        self.request_close()
        self.stop()
        if self._directory is not None:
            self._remove_shared_memory()
        super().close()

    def _remove_shared_memory(self) -> None:
        """
        Removes the segment of 56 bytes that PostgreSQL guards its data directory with.

        A server that was killed leaves it to its next start, which does not come.
        """
        lock_file = self.data / "postmaster.pid"
        if not lock_file.exists():
            return
        # The seventh line holds the segment's key and id; it is not there in the first moments.
        lines = lock_file.read_text().splitlines()
        if len(lines) > 6 and lines[6].split():
            # It may be gone already: a start that failed has removed it.
            subprocess.run(["ipcrm", "-m", lines[6].split()[1]], check=False, capture_output=True)

    def _program(self, name: str) -> Path:
        """A program of the same version as `postgres`: PATH may have a link to that only."""
        beside = find_program("postgres").resolve().with_name(name)
        return beside if beside.exists() else find_program(name)

    def _make_cluster(self) -> None:
        make_or_copy(self.data, self._initdb, self._program("initdb"), self.user(), self.password)

    def _initdb(self) -> None:
        password_file = self.write("password", self.password or "-")
        self.run(
            *(str(self._program("initdb")), "-D", str(self.data), "--username=postgres"),
            *("--encoding=UTF8", "--no-locale", "--no-sync", f"--pwfile={password_file}"),
            f"--auth={'trust' if self.password is None else 'scram-sha-256'}",
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("include 'lockkit.conf'\n")

    def _configuration(self) -> dict[str, str]:
        switch = "on" if self.durable else "off"
        lines = {
            "listen_addresses": f"'{self.host}'",
            "port": str(self.port),
            "unix_socket_directories": f"'{self.directory}'",
            "max_connections": "200",
            "fsync": switch,
            "full_page_writes": switch,
            # Else a commit waits in the server's own memory, and a crash loses it.
            "synchronous_commit": "on",
            # Shared memory in files below the data directory: elsewhere a server that is
            # killed leaves it behind.
            "dynamic_shared_memory_type": "mmap",
            # One that clients have no use for, and that shows up in every pg_stat_activity.
            "max_logical_replication_workers": "0",
        }
        if self.tls:
            lines |= self._tls_configuration()
        return lines | self.settings

    def _tls_configuration(self) -> dict[str, str]:
        # PostgreSQL insists on a key that only its own account can read.
        self.write("data/server.key", self.certificates.server_key.read_text())
        self.write("data/server.crt", self.certificates.server.read_text())
        return {"ssl": "on", "ssl_cert_file": "'server.crt'", "ssl_key_file": "'server.key'"}
