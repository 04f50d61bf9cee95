"""
What servers say about themselves: commands and connections while they are used, version and durability.

One observer for each kind of server, by the URL's scheme.
"""

from __future__ import annotations

import re
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from lockkit.url import parse
from lockkit_tools.bench.addresses import addresses, why_not_through
from lockkit_tools.bench.machine import file_system
from lockkit_tools.bench.redis_connection import connect_to, node_urls
from lockkit_tools.servers.readiness import etcd_metrics, four_letters

_CONNECT_SECONDS = 5


class Observer:
    """A server that cannot be asked: no figures. A context manager; made before those who use the server connect."""

    _began = 0.0
    _commands: float | None = None

    def __init__(self, url: str) -> None:
        """Connect; of this class: to nothing."""

    @classmethod
    def can_ask(cls, url: str) -> bool:
        """Whether the server of a URL can be asked, as far as the URL says."""
        del url
        return True

    def begin(self) -> None:
        """Count from now on."""
        self._commands = self.commands()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        """Give ``commands_per_second`` since `begin`, and the ``connections`` that are new since this was made."""
        seconds = time.monotonic() - self._began
        commands, connections = self.commands(), self.connections()
        seen = {} if connections is None else {"connections": max(0.0, connections)}
        if commands is not None and self._commands is not None:
            seen["commands_per_second"] = max(0.0, commands - self._commands) / seconds
        return seen

    def commands(self) -> float | None:
        """
        Give all commands so far, of everybody: meant for a server that nobody else uses meanwhile.

        But for our own questions; None if the server does not tell.
        """
        return None

    def connections(self) -> float | None:
        """Give those that are new since this was made: those of an earlier subject may still be closing."""
        return None

    def about(self) -> dict[str, str]:
        """Give version and settings that matter for speed and durability."""
        return {}

    def close(self) -> None:
        """Disconnect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Redis(Observer):
    """One Redis node, or several independent ones, asked over raw sockets: their sums."""

    @classmethod
    def can_ask(cls, url: str) -> bool:
        return parse(url).driver is None

    def __init__(self, url: str) -> None:
        with ExitStack() as stack:
            self._nodes = [stack.enter_context(connect_to(one)) for one in node_urls(url)]
            self._ids = [int(str(node.call("CLIENT", "ID"))) for node in self._nodes]
            self._stack = stack.pop_all()
        self.close = self._stack.close  # type: ignore[method-assign]

    def about(self) -> dict[str, str]:
        node = self._nodes[0]
        server, persistence = node.info("server"), node.info("persistence")
        version = server.get("valkey_version") or server["redis_version"]
        about = {"server": server.get("server_name", "Redis"), "version": version, **_nodes(self._nodes)}
        about["appendonly"] = "yes" if persistence.get("aof_enabled") == "1" else "no"
        for name in ("appendfsync", "save") if about["appendonly"] == "yes" else ("save",):
            if answer := node.call_list("CONFIG", "GET", name):
                about[name] = str(answer[1]) or "never"
        return about

    def connections(self) -> float | None:
        pairs = zip(self._ids, self._nodes, strict=True)
        return sum(
            int(line.split()[0].removeprefix("id=")) > ours
            for ours, node in pairs
            for line in node.call_str("CLIENT", "LIST").splitlines()
        )

    def commands(self) -> float | None:
        return sum(
            int(text.partition("calls=")[2].partition(",")[0])
            for node in self._nodes
            for name, text in node.info("commandstats").items()
            if name != "cmdstat_info"  # ours
        )


class _Members(Observer):
    """Sums over all members of a quorum. Those with certificates are not asked."""

    @classmethod
    def can_ask(cls, url: str) -> bool:
        return not why_not_through(url)

    def __init__(self, url: str) -> None:
        self._addresses = addresses(url)
        self._at_first = self._connections_now()

    def connections(self) -> float | None:
        now = self._connections_now()
        return None if now is None or self._at_first is None else now - self._at_first

    @abstractmethod
    def _connections_now(self) -> float | None:
        """Count them all; None if a member does not tell."""


class _ZooKeeper(_Members):
    """
    By the words ``mntr``, ``srvr`` and ``conf``, where ``4lw.commands.whitelist`` allows them.

    Packets are counted, so that the pings of sessions are commands too.
    """

    def about(self) -> dict[str, str]:
        host, port = self._addresses[0]
        version = re.search(r"version: ([\d.]+)", four_letters(host, port, "srvr"))
        conf = dict(line.split("=", 1) for line in four_letters(host, port, "conf").splitlines() if "=" in line)
        about = {"server": "ZooKeeper", "version": version[1] if version else "", **_nodes(self._addresses)}
        return about | _disk(conf.get("dataLogDir"))

    def commands(self) -> float | None:
        return self._sum("zk_packets_received")

    def _connections_now(self) -> float | None:
        return self._sum("zk_num_alive_connections")

    def _sum(self, name: str) -> float | None:
        total = 0.0
        for host, port in self._addresses:
            lines = [line.split("\t") for line in four_letters(host, port, "mntr").splitlines() if "\t" in line]
            seen = {words[0]: words[1] for words in lines}
            if name not in seen:
                return None  # not on the list of words that it answers
            total += float(seen[name])
        return total


class _Etcd(_Members):
    """
    By its metrics.

    Messages that came in over gRPC are counted, so that keep-alives of leases are commands too; connections are the
    growth of its open files.
    """

    def about(self) -> dict[str, str]:
        metrics = etcd_metrics(*self._addresses[0])
        version = next((name for name in metrics if name.startswith("etcd_server_version{")), "")
        about = {"server": "etcd", "version": version.partition('"')[2].partition('"')[0], **_nodes(self._addresses)}
        if syncs := float(metrics.get("etcd_disk_wal_fsync_duration_seconds_count", 0)):
            each_ms = float(metrics["etcd_disk_wal_fsync_duration_seconds_sum"]) / syncs * 1000
            about["fsync of the log"] = f"{each_ms:.2f} ms on average"
        return about

    def commands(self) -> float | None:
        return self._sum("grpc_server_msg_received_total")

    def _connections_now(self) -> float | None:
        return self._sum("process_open_fds")

    def _sum(self, prefix: str) -> float:
        members = [etcd_metrics(*address) for address in self._addresses]
        return sum(float(value) for one in members for name, value in one.items() if name.startswith(prefix))


class _Sql(Observer):
    """One connection of our own, outside of the count."""

    driver: ClassVar[str]
    database: ClassVar[str]
    """What the driver calls the name of a database."""
    more: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    newer: ClassVar[str]
    """Counts the sessions that began after ours."""

    @classmethod
    def can_ask(cls, url: str) -> bool:
        """Not a server with certificates, or behind a Unix socket."""
        return find_spec(cls.driver) is not None and not why_not_through(url)

    def __init__(self, url: str) -> None:
        parsed, module = parse(url), import_module(self.driver)
        ((host, port),) = addresses(url)[:1]
        user, password = parsed.hosts[0].username, parsed.hosts[0].password
        where = {"host": host, "port": port, self.database: parsed.path.strip("/") or user, **self.more}
        who = {"user": user, "password": password or "", "connect_timeout": _CONNECT_SECONDS}
        try:
            self._connection: Any = module.connect(**where, **who, autocommit=True)
        except module.Error as error:
            # The driver's own text may quote what it was given; the subject's error says enough.
            raise ConnectionError(f"cannot ask {parsed.redacted()}: {type(error).__name__}") from None
        self.close = self._connection.close  # type: ignore[method-assign]

    def connections(self) -> float | None:
        ((count,),) = self._ask(self.newer)
        return int(count)

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


class _Postgresql(_Sql):
    """
    Connections only.

    PostgreSQL's sessions hand in their statistics about once a second, and idle ones after ten: commands in a window of
    some seconds cannot be counted there.
    """

    driver, database = "psycopg", "dbname"
    newer = (
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND backend_start >"
        " (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())"
    )

    def about(self) -> dict[str, str]:
        settings = dict(self._ask("SELECT name, setting FROM pg_settings"))
        about = {"server": "PostgreSQL", "version": settings["server_version"].split()[0]}
        about |= _of(settings, "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
        return about | _disk(settings.get("data_directory"))


class _Mysql(_Sql):
    driver, database = "pymysql", "database"
    more: ClassVar[Mapping[str, Any]] = MappingProxyType({"ssl_disabled": True})
    newer = "SELECT count(*) FROM information_schema.processlist WHERE id > CONNECTION_ID()"
    _asked = 0

    def commands(self) -> float | None:
        self._asked += 1  # our questions count themselves
        ((_, value),) = self._ask("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(value) - self._asked

    def about(self) -> dict[str, str]:
        settings = dict(self._ask("SHOW GLOBAL VARIABLES"))
        about = {"server": "MariaDB" if "MariaDB" in settings["version"] else "MySQL"}
        about["version"] = settings["version"].partition("-")[0]
        about |= _of(settings, "innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "innodb_flush_method")
        return about | _disk(settings.get("datadir"))


class _Sqlite(Observer):
    """A file: nobody is asked."""

    def __init__(self, url: str) -> None:
        self._path = Path(parse(url).path.removeprefix("/"))

    def about(self) -> dict[str, str]:
        about = {"server": "SQLite", "version": sqlite3.sqlite_version}
        if self._path.is_file():
            with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as connection:
                ((mode,),) = connection.execute("PRAGMA journal_mode")
                about["journal_mode"] = mode
        return about | _disk(str(self._path.parent))


class _Directory(Observer):
    """Lock files: what they lie on."""

    def __init__(self, url: str) -> None:
        self._path = Path(parse(url).path)

    def about(self) -> dict[str, str]:
        found = file_system(self._path)
        return {"files on": found} if found else {}


def _disk(directory: str | None) -> dict[str, str]:
    """Name the file system of a server's directory, if the server is here and we may look."""
    found = file_system(Path(directory)) if directory else ""
    return {"data on": found} if found else {}


def _of(settings: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: settings[name] for name in names if name in settings}


def _nodes(nodes: Sequence[object]) -> dict[str, str]:
    return {"nodes": str(len(nodes))} if len(nodes) > 1 else {}


_BY_SCHEME: Mapping[str, type[Observer]] = MappingProxyType(
    {
        **dict.fromkeys(("redis", "valkey", "unix", "redlock"), _Redis),
        **dict.fromkeys(("zookeeper", "zk"), _ZooKeeper),
        **dict.fromkeys(("etcd", "etcd3"), _Etcd),
        **dict.fromkeys(("mysql", "mariadb"), _Mysql),
        "postgresql": _Postgresql,
        "sqlite": _Sqlite,
        "file": _Directory,
    }
)


def watch(url: str) -> Observer:
    """
    Make the observer for a URL; one that gives no figures where the server cannot be asked.

    Raises:
        OSError: The server does not answer, or does not let us in.
    """
    kind = _BY_SCHEME.get(parse(url).base, Observer) if url else Observer
    return kind(url) if kind.can_ask(url) else Observer(url)
