"""One MariaDB server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from lockkit_tools.servers._template import make_or_copy
from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.readiness import ask_mysql


class MariaServer(Server):
    """
    A MariaDB server on 127.0.0.1 with the user and database ``lockkit``.

    See `Server` for its options, e.g. ``settings={"default-time-zone": "+09:00"}``.
    """

    kind = "mariadb"
    tidies_up: ClassVar[bool] = True
    run_as: ClassVar[tuple[str, ...]] = ("mysql",)

    @property
    def url(self) -> str:
        """``mariadb://lockkit@…/lockkit``; with TLS it asks for a checked certificate."""
        password = f":{quote(self.password, safe='')}" if self.password is not None else ""
        query = f"?ssl_ca={self.certificates.ca}" if self.tls else ""
        return f"mariadb://lockkit{password}@{self.address}/lockkit{query}"

    def execute(self, statement: str) -> str:
        """Runs SQL as the user ``lockkit``, who may do everything, through the `mariadb` program."""
        client = str(find_program("mariadb", "mysql"))
        where = ("--protocol=TCP", f"--host={self.host}", f"--port={self.port}", "--user=lockkit")
        return self.run(
            *(client, "--no-defaults", *where, "--batch", "--skip-column-names"),
            *(f"--execute={statement}", "lockkit"),
            MYSQL_PWD=self.password or "",
        ).strip()

    def command(self) -> Sequence[str]:
        program = find_program("mariadbd", "mysqld")
        return [str(program), f"--defaults-file={self.directory / 'my.cnf'}"]

    def prepare(self) -> None:
        """Makes the system tables if there are none, and writes the configuration."""
        lines = [f"{name} = {value}" for name, value in self._configuration().items()]
        self.write("my.cnf", "[mysqld]\n" + "\n".join(lines) + "\n")
        self.write("init.sql", self._first_statements())
        if not (self.data / "mysql").exists():
            self._fill_data()

    def ask(self) -> str | None:
        """Ready when it greets."""
        return ask_mysql(self.host, self.port)

    def _fill_data(self) -> None:
        program = find_program("mariadb-install-db", "mysql_install_db")
        # The settings too: some, such as the size of a page, are for ever.
        make_or_copy(self.data, lambda: self._make_tables(program), program, self.user(), sorted(self.settings.items()))

    def _make_tables(self, program: Path) -> None:
        self.run(
            *(str(program), f"--defaults-file={self.directory / 'my.cnf'}"),
            *("--auth-root-authentication-method=normal", "--skip-test-db"),
        )

    def _first_statements(self) -> str:
        """SQL that the server runs at each start before it listens."""
        password = (self.password or "").replace("\\", "\\\\").replace("'", "\\'")
        return (
            "CREATE DATABASE IF NOT EXISTS lockkit;\n"
            f"CREATE USER IF NOT EXISTS 'lockkit'@'%' IDENTIFIED BY '{password}';\n"
            "GRANT ALL PRIVILEGES ON *.* TO 'lockkit'@'%' WITH GRANT OPTION;\n"
        )

    def _configuration(self) -> dict[str, str]:
        return {
            "datadir": str(self.data),
            "bind-address": self.host,
            "port": str(self.port),
            "socket": str(self.directory / "mariadb.sock"),
            "pid-file": str(self.directory / "mariadb.pid"),
            "tmpdir": str(self.directory),
            "init-file": str(self.directory / "init.sql"),
            # A lookup that fails takes seconds, and clients are on 127.0.0.1 only.
            "skip-name-resolve": "1",
            "max-connections": "200",
            # `ask` leaves before it logs in; many such tries would block the host.
            "max-connect-errors": "1000000",
            # 2: a commit is written to the system's cache, which outlives the process.
            "innodb-flush-log-at-trx-commit": "1" if self.durable else "2",
            # The log's flushes are not all: CREATE and DROP TABLE flush files, for half a second on a busy disk.
            **({} if self.durable else {"innodb-flush-method": "nosync"}),
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "16M",
            **(self._tls_configuration() if self.tls else {}),
            **self.settings,
        }

    def _tls_configuration(self) -> dict[str, str]:
        made = self.certificates
        files = {"ssl-ca": made.ca, "ssl-cert": made.server, "ssl-key": made.server_key}
        # Copies: the server's account cannot read the others.
        return {name: str(self.write(f"{name}.pem", file.read_text())) for name, file in files.items()}
