"""PostgreSQL, MariaDB and MySQL, asked through their drivers; SQLite, whose file is looked at."""

from __future__ import annotations

import sqlite3
import time
from abc import abstractmethod
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from lockkit.url import Url, parse
from lockkit_tools.bench.machine import file_system
from lockkit_tools.bench.observer import Observer

_CONNECT_SECONDS = 5


class _SqlObserver(Observer):
    """
    One connection of our own, outside of the count.

    Raises:
        ConnectionError: The server cannot be asked.
    """

    driver: str

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        self._module: Any = import_module(self.driver)
        try:
            self._connection: Any = self._connect(parsed)
        except self._module.Error as error:
            # The driver's own text may quote what it was given; the subject's error says enough.
            message = f"cannot ask {parsed.redacted()}: {type(error).__name__}"
            raise ConnectionError(message) from None
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        return {"connections": self._count_connections()}

    @abstractmethod
    def _connect(self, url: Url) -> Any:  # noqa: ANN401 - the driver's
        """Connect."""

    @abstractmethod
    def _count_connections(self) -> int:
        """Count the sessions that began after ours: those of an earlier subject may still be closing."""

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


class PostgresObserver(_SqlObserver):
    """
    Connections only.

    PostgreSQL's sessions hand in their statistics about once a second, and idle ones after ten: commands in a window of
    some seconds cannot be counted there.
    """

    driver = "psycopg"

    def about(self) -> dict[str, str]:
        names = ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
        settings = {name: value for name, value in self._ask("SELECT name, setting FROM pg_settings") if name}
        about = {"server": "PostgreSQL", "version": settings["server_version"].split()[0]}
        about |= {name: settings[name] for name in names if name in settings}
        return about | _disk(settings.get("data_directory"))

    def _connect(self, url: Url) -> Any:  # noqa: ANN401 - the driver's
        options = {name: value for name, value in url.query if name.startswith("ssl")}
        host = url.hosts[0]
        return self._module.connect(
            host=host.host,
            port=host.port or 5432,
            user=host.username,
            password=host.password,
            dbname=url.path.strip("/") or host.username,
            connect_timeout=_CONNECT_SECONDS,
            autocommit=True,
            **options,
        )

    def _count_connections(self) -> int:
        ours = "(SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())"
        later = f"backend_type = 'client backend' AND backend_start > {ours}"
        ((count,),) = self._ask(f"SELECT count(*) FROM pg_stat_activity WHERE {later}")
        return int(count)


class MysqlObserver(_SqlObserver):
    """Counts every statement of everybody: meant for a server that nobody else uses meanwhile."""

    driver = "pymysql"

    def begin(self) -> None:
        super().begin()
        self._commands = self._status("Questions")

    def end(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        commands = self._status("Questions") - self._commands - 1  # our second question counts itself
        return {"commands_per_second": commands / seconds, **super().end()}

    def about(self) -> dict[str, str]:
        names = ("innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "innodb_flush_method")
        settings = dict(self._ask("SHOW GLOBAL VARIABLES"))
        about = {"server": "MariaDB" if "MariaDB" in settings["version"] else "MySQL"}
        about["version"] = settings["version"].partition("-")[0]
        about |= {name: settings[name] for name in names if name in settings}
        return about | _disk(settings.get("datadir"))

    def _connect(self, url: Url) -> Any:  # noqa: ANN401 - the driver's
        host = url.hosts[0]
        return self._module.connect(
            host=host.host,
            port=host.port or 3306,
            user=host.username,
            password=host.password or "",
            database=url.path.strip("/"),
            connect_timeout=_CONNECT_SECONDS,
            ssl_disabled=True,
            autocommit=True,
        )

    def _count_connections(self) -> int:
        ((count,),) = self._ask("SELECT count(*) FROM information_schema.processlist WHERE id > CONNECTION_ID()")
        return int(count)

    def _status(self, name: str) -> int:
        ((_, value),) = self._ask(f"SHOW GLOBAL STATUS LIKE '{name}'")
        return int(value)


class SqliteObserver(Observer):
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


def _disk(directory: str | None) -> dict[str, str]:
    """Name the file system of a server's directory, if the server is here and we may look."""
    found = file_system(Path(directory)) if directory else ""
    return {"data on": found} if found else {}
