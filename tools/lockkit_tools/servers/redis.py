"""One Redis (or Valkey) node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote, urlencode

from lockkit.units import Seconds
from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.resp import Reply, RespConnection
from lockkit_tools.servers.tls import Certificates


class RedisProgram(Server):
    """What a node and a Sentinel have in common: the program, which rewrites its file, and its protocol."""

    file: ClassVar[str]
    """Name of the configuration file."""
    login: tuple[str, str] | None = None

    @abstractmethod
    def configuration(self) -> list[tuple[str, str]]:
        """The lines of a new file."""

    def connect(self, *, timeout: Seconds = 5.0) -> RespConnection:
        """A connection for administration, logged in; close it after use."""
        ca = self.certificates.ca if self.tls else None
        connection = RespConnection((self.host, self.port), ca=ca, timeout=timeout)
        credentials = self.login or (("default", self.password) if self.password else None)
        try:
            if credentials is not None:
                connection.call("AUTH", *credentials)
        except BaseException:
            connection.close()
            raise
        return connection

    def call(self, *words: str | int | bytes) -> Reply:
        """The answer to one command, on a connection of its own."""
        with self.connect() as connection:
            return connection.call(*words)

    def command(self) -> Sequence[str]:
        return [str(find_program("redis-server", "valkey-server")), str(self.directory / self.file)]

    def prepare(self) -> None:
        """
        Writes the configuration, unless it is there.

        The server rewrites its file when a Sentinel gives it another role, a Sentinel what it learnt; a restart must
        not take that back.  `erase` removes it.
        """
        if not (self.directory / self.file).exists():
            self.write(self.file, "".join(f"{name} {value}\n" for name, value in self.configuration()))

    def erase(self) -> None:
        """Removes data and configuration, as if it were set up anew."""
        super().erase()
        (self.directory / self.file).unlink(missing_ok=True)


class RedisServer(RedisProgram):
    """
    A Redis node on 127.0.0.1, without persistence unless asked for.

    Args:
        users: Further users: name to ACL rules, e.g. ``{"app": "on >secret ~* &* +@all"}``.
            With them, `login` says as whom `url` and we connect.
        login: ``(user, password)`` for `url`; None: the default user.
        appendonly: Keep an append-only file, so that a restart keeps the data.
        appendfsync: When that file is flushed to the disk.
        maxmemory: Limit as Redis writes it (``"2mb"``); with ``noeviction`` unless
            `settings` say otherwise.
        replica_of: The server to copy; asked for its address at each start.
        unix_socket: Listen on a Unix socket too (`socket_path`).
        certificates: What to use with `tls`; None makes them for this server.  Nodes that
            one client trusts by one file must share them.
        options: See `Server`. With `tls` it listens with TLS only.
    """

    kind = "redis"
    file = "redis.conf"

    def __init__(
        self,
        *,
        users: Mapping[str, str] | None = None,
        login: tuple[str, str] | None = None,
        appendonly: bool = False,
        appendfsync: Literal["always", "everysec", "no"] = "everysec",
        maxmemory: str | None = None,
        replica_of: RedisServer | None = None,
        unix_socket: bool = False,
        certificates: Certificates | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.users = dict(users or {})
        self.login = login
        self.appendonly = appendonly
        self.appendfsync = appendfsync
        self.maxmemory = maxmemory
        self.replica_of = replica_of
        self.unix_socket = unix_socket
        self._shared_certificates = certificates

    @property
    def url(self) -> str:
        """``redis://…/0``; with TLS ``rediss://`` and the authority's certificate."""
        if not self.tls:
            return f"redis://{self.userinfo}{self.address}/0"
        return f"rediss://{self.userinfo}{self.address}/0?{self.tls_query}"

    @property
    def socket_path(self) -> Path:
        """The Unix socket (with `unix_socket`)."""
        return self.directory / "redis.sock"

    @property
    def socket_url(self) -> str:
        """``unix://…`` (with `unix_socket`)."""
        return f"unix://{self.userinfo}{self.socket_path}?db=0"

    @property
    def certificates(self) -> Certificates:
        """See `Server.certificates`; those that were given, if any were."""
        return self._shared_certificates or super().certificates

    @property
    def tls_query(self) -> str:
        """The part of `url` that makes clients trust this server's certificate."""
        return urlencode({"ssl_ca_certs": str(self.certificates.ca)})

    @property
    def userinfo(self) -> str:
        """``user:password@`` for a URL; empty without a password."""
        if self.login is not None:
            user, password = self.login
            return f"{quote(user, safe='')}:{quote(password, safe='')}@"
        return f":{quote(self.password, safe='')}@" if self.password is not None else ""

    def role(self) -> str:
        """``"master"`` or ``"slave"``, as the server sees itself."""
        with self.connect() as connection:
            return connection.info("replication")["role"]

    def ask(self) -> str | None:
        """Ready when it answers PING, is the process that we started, and is in sync."""
        with self.connect() as connection:
            # While it loads its data it answers PING with an error.
            connection.call("PING")
            process_id = int(connection.info("server")["process_id"])
            if process_id != self.pid:
                return f"process {process_id} answers at our port"
            replication = connection.info("replication")
        # After a failover a replica may come back as what a Sentinel made of it: a master.
        if self.replica_of is None or replication["role"] == "master" or replication["master_link_status"] == "up":
            return None
        return "the replica has not caught up with its master"

    def configuration(self) -> list[tuple[str, str]]:
        if "cluster-enabled" in self.settings:
            # Of its peers: by default the clients' + 10000, which may not be free.
            self.settings["cluster-port"] = str(self.port_for("peers"))
        lines = [
            ("bind", self.host),
            ("port", "0" if self.tls else str(self.port)),
            ("dir", str(self.data)),
            ("daemonize", "no"),
            ("save", '""'),
            ("appendonly", "yes" if self.appendonly else "no"),
            ("appendfsync", self.appendfsync),
            # Another user of this machine must not be kept out by "protected mode"; a
            # test server is reached over loopback only.
            ("protected-mode", "no"),
            # A replica in a test should not wait 5 s for others to join its first copy.
            ("repl-diskless-sync-delay", "0"),
        ]
        if self.password is not None:
            lines += [("requirepass", quoted(self.password))]
        lines += [("user", f"{name} {rules}") for name, rules in self.users.items()]
        if self.maxmemory is not None:
            lines += [("maxmemory", self.maxmemory), ("maxmemory-policy", "noeviction")]
        if self.unix_socket:
            lines += [("unixsocket", str(self.socket_path)), ("unixsocketperm", "700")]
        if self.tls:
            lines += [
                ("tls-port", str(self.port)),
                ("tls-cert-file", str(self.certificates.server)),
                ("tls-key-file", str(self.certificates.server_key)),
                ("tls-ca-cert-file", str(self.certificates.ca)),
                ("tls-auth-clients", "optional"),
                ("tls-replication", "yes"),
            ]
        if (master := self.replica_of) is not None:
            lines += [("replicaof", f"{master.host} {master.port}")]
            if master.password is not None:
                lines += [("masterauth", quoted(master.password))]
        return lines + list(self.settings.items())


def quoted(value: str) -> str:
    """A value as redis.conf wants it: with spaces, ``#`` and quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
