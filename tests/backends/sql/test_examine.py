"""The doctor on SQL databases, each with one thing set wrongly."""

from __future__ import annotations

import os
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

import lockkit
from lockkit.backends.sql import examine as sql_examine
from lockkit.doctor import Severity, examine
from lockkit.runtime import wall_clock
from lockkit.url import parse
from lockkit_tools.servers import MariaServer, PgBouncer, PostgresServer, wait_until
from tests.backends.sql_table.support import Standby
from tests.doctor.support import SECRET, complaints, found


def lock_once(url: str) -> None:
    """Makes the table, as the first lock does."""
    with lockkit.connect(url) as client, client.lock("a", timeout=10):
        pass


def as_user(url: str, user: str) -> str:
    """The same server for somebody else with the same password."""
    return url.replace(f"{urlsplit(url).username}:", f"{user}:", 1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server that is set up well."""
    with PostgresServer(password=SECRET, durable=True, settings={"max_connections": "40"}) as server:
        lock_once(server.url)
        yield server


@contextmanager
def altered(server: PostgresServer, name: str, value: str) -> Iterator[None]:
    """A setting for a while."""
    server.execute(f"ALTER SYSTEM SET {name} = {value}")
    server.execute("SELECT pg_reload_conf()")
    # New sessions have it when the postmaster has read it, which a query of one of them tells.
    wait_until(lambda: None if server.execute(f"SHOW {name}") == value.strip("'") else "not read yet")
    try:
        yield
    finally:
        server.execute(f"ALTER SYSTEM RESET {name}")
        server.execute("SELECT pg_reload_conf()")
        wait_until(lambda: None if server.execute(f"SHOW {name}") != value.strip("'") else "not read yet")


def test_silent_in_every_mode(postgres: PostgresServer, maria: MariaServer) -> None:
    """Nothing at all is found where all is well. Each mode has tables of its own."""
    for server, version in ((postgres, "PostgreSQL "), (maria, "MariaDB")):
        for mode in ("table", "row", "advisory"):
            url = f"{server.url}?mode={mode}"
            lock_once(url)

            diagnosis = examine(url)

            assert diagnosis.findings == ()
            assert version in diagnosis.facts["version"]
            assert SECRET not in repr(diagnosis)


@pytest.mark.parametrize(
    ("name", "value", "id_"),
    [("fsync", "off", "postgresql-fsync-off"), ("default_transaction_read_only", "on", "sql-read-only")],
)
def test_postgresql_settings(postgres: PostgresServer, name: str, value: str, id_: str) -> None:
    """One wrong setting is one finding."""
    with altered(postgres, name, value):
        assert found(postgres.url)[id_].check.severity is Severity.ERROR
    assert found(postgres.url) == {}


def test_postgresql_connections_nearly_used_up(postgres: PostgresServer) -> None:
    """Above nine tenths of max_connections."""
    with ExitStack() as stack:
        for _ in range(36):
            stack.enter_context(psycopg.connect(postgres.url))
        assert "of 40 connections" in found(postgres.url)["sql-connections"].seen


def test_postgresql_rights_missing(postgres: PostgresServer) -> None:
    """Names what is missing, and the command that gives it."""
    postgres.execute(f"CREATE ROLE few LOGIN PASSWORD '{SECRET}'; GRANT SELECT ON lockkit_locks TO few")
    url = as_user(postgres.url, "few")

    finding = found(url)["sql-rights"]
    assert "INSERT, UPDATE, DELETE" in finding.seen
    postgres.execute(finding.fix)
    assert found(url) == {}

    postgres.execute("REVOKE CREATE ON SCHEMA public FROM public")
    assert "may not make it" in found(f"{url}?table=another")["sql-table-missing"].seen
    postgres.execute("CREATE SCHEMA apart; GRANT ALL ON SCHEMA apart TO few")
    assert set(found(f"{url}?table=apart.another")) == {"sql-table-to-be-made"}
    assert "may not make it" in found(f"{postgres.url}?table=nowhere.another")["sql-table-missing"].seen


def test_postgresql_table_missing(postgres: PostgresServer) -> None:
    """Made by the first lock, unless that is forbidden; the doctor makes none."""
    url = f"{postgres.url}?table=another"

    assert set(found(url)) == {"sql-table-to-be-made"}
    assert "auto_create is off" in found(f"{url}&auto_create=off")["sql-table-missing"].seen
    assert postgres.execute("SELECT to_regclass('another') IS NULL") == "t"


def test_postgresql_table_of_another_version(postgres: PostgresServer) -> None:
    """Without a column that lockkit needs."""
    postgres.execute("CREATE TABLE old AS SELECT name, owner, token FROM lockkit_locks")

    url = parse(f"{postgres.url}?table=old&ttl=20").safe_text
    finding = found(f"{postgres.url}?table=old&ttl=20")["sql-columns-missing"]

    assert "expires_at_us" in finding.seen
    assert shlex.split(finding.fix) == ["lockkit", "migrate", url]
    assert finding.fix != f"lockkit migrate {url}"  # which a shell would run in the background


def test_postgresql_without_password(postgresql: PostgresServer) -> None:
    """Trust in pg_hba.conf, and a server that does not flush: what a test server has."""
    assert set(found(postgresql.url)) == {"postgresql-fsync-off", "sql-no-password", "sql-table-to-be-made"}


def test_postgresql_behind_a_pooler(postgres: PostgresServer) -> None:
    """It is told, and what cannot be set through it is looked at."""
    with PgBouncer(postgres, pool_mode="transaction") as pooler:
        assert set(found(pooler.url)) == {"postgresql-pooled", "sql-no-password"}

        for mode in ("row", "advisory"):
            assert "postgresql-pooled-session" in found(f"{pooler.url}?mode={mode}")

        with altered(postgres, "synchronous_commit", "off"):
            assert "postgresql-synchronous-commit-off" in found(pooler.url)
            # There lockkit sets it on for its own sessions.
            assert found(postgres.url) == {}


def test_postgresql_standby(postgres: PostgresServer) -> None:
    """A standby is no place for locks, and one that need not confirm may lack the newest."""
    with Standby(postgres) as standby:
        wait_until(
            lambda: None if postgres.execute("SELECT state FROM pg_stat_replication") == "streaming" else "it copies"
        )
        assert set(found(standby.url)) == {"postgresql-standby"}
        assert "server: 1;" in found(postgres.url)["postgresql-asynchronous-standby"].seen

        with altered(postgres, "synchronous_standby_names", "'ANY 1 (*)'"):
            assert found(postgres.url) == {}


def test_postgresql_tls_absent_across_a_network(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that is not this machine's own."""
    monkeypatch.setattr(sql_examine, "is_loopback", lambda host: False)  # noqa: ARG005

    assert set(found(postgres.url)) == {"sql-no-tls"}
    with PostgresServer(password=SECRET, durable=True, tls=True) as safe:
        assert complaints(examine(safe.url)) == []
        for mode in ("prefer", "require", "verify-ca"):
            assert "sql-tls-unverified" in found(safe.url.replace("verify-full", mode))
        bare = safe.url.partition("?")[0]
        assert "sql-tls-unverified" in found(bare)
        assert complaints(examine(f"{bare}?sslrootcert={safe.certificates.ca}")) == []


def test_mariadb_tls_absent_or_unverified_across_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that is not this machine's own."""
    monkeypatch.setattr(sql_examine, "is_loopback", lambda host: False)  # noqa: ARG005

    with MariaServer(password=SECRET, durable=True, tls=True) as server:
        lock_once(server.url)
        assert complaints(examine(server.url)) == []
        for weaker in ("ssl_verify_identity=0", "ssl_verify_cert=0"):
            assert set(found(f"{server.url}&{weaker}")) == {"sql-tls-unverified"}
        assert set(found(server.url.partition("?")[0])) == {"sql-tls-unverified"}
        assert set(found(f"{server.url}&ssl_disabled=1")) == {"sql-no-tls"}


def test_postgresql_clock(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour between client and server."""
    monkeypatch.setattr("lockkit.doctor.timing.wall_clock", lambda: wall_clock() + 3600)

    assert "behind this machine's" in found(postgres.url)["clock-differs"].seen


def test_postgresql_that_cannot_be_asked(postgres: PostgresServer) -> None:
    """Errors as everywhere, and no findings."""
    with pytest.raises(lockkit.ConfigurationError, match="password"):
        examine(as_user(postgres.url, "nobody"))
    with pytest.raises(lockkit.BackendUnavailable):
        examine(f"postgresql://postgres:{SECRET}@127.0.0.1:{postgres.port_for('nobody')}/postgres")


@pytest.fixture(scope="module")
def maria() -> Iterator[MariaServer]:
    """A server that is set up well."""
    with MariaServer(password=SECRET, durable=True) as server:
        lock_once(server.url)
        yield server


@pytest.mark.parametrize(
    ("name", "value", "good", "id_"),
    [
        ("innodb_flush_log_at_trx_commit", 2, 1, "mysql-not-flushed"),
        ("innodb_flush_log_at_trx_commit", 0, 1, "mysql-not-flushed"),
        ("read_only", 1, 0, "sql-read-only"),
    ],
)
def test_mariadb_settings(maria: MariaServer, name: str, value: int, good: int, id_: str) -> None:
    """One wrong setting is one finding."""
    maria.execute(f"SET GLOBAL {name} = {value}")
    try:
        assert set(found(maria.url)) == {id_}
    finally:
        maria.execute(f"SET GLOBAL {name} = {good}")


def test_mariadb_connections_nearly_used_up(maria: MariaServer) -> None:
    """Above nine tenths of max_connections."""
    maria.execute("SET GLOBAL max_connections = 20")
    try:
        with ExitStack() as stack:
            for _ in range(18):
                # As a client that is about to log in: the server counts it from its greeting on.
                made = stack.enter_context(socket.create_connection((maria.host, maria.port)))
                assert made.recv(1)
            assert "of 20 connections" in found(maria.url)["sql-connections"].seen
    finally:
        maria.execute("SET GLOBAL max_connections = 200")


def test_mariadb_table_without_row_locks(maria: MariaServer) -> None:
    """One that somebody else made, or a dump: `SELECT … FOR UPDATE` locks nothing there."""
    maria.execute("ALTER TABLE lockkit.lockkit_locks ENGINE = MyISAM")
    try:
        finding = found(maria.url)["mysql-not-innodb"]
        assert "MyISAM" in finding.seen
    finally:
        maria.execute("ALTER TABLE lockkit.lockkit_locks ENGINE = InnoDB")


def test_mariadb_rights_missing(maria: MariaServer) -> None:
    """Names what is missing, and the command that gives it."""
    maria.execute(f"CREATE USER few IDENTIFIED BY '{SECRET}'; GRANT SELECT, INSERT ON lockkit.lockkit_locks TO few")
    url = as_user(maria.url, "few")

    finding = found(url)["sql-rights"]
    assert "no right to UPDATE, DELETE on" in finding.seen
    maria.execute(finding.fix)
    assert found(url) == {}

    assert "may not make it" in found(f"{url}?table=another")["sql-table-missing"].seen
    assert set(found(f"{maria.url}?table=another")) == {"sql-table-to-be-made"}
    assert maria.execute("SHOW TABLES LIKE 'another'") == ""
    maria.execute("CREATE DATABASE apart; GRANT ALL ON apart.* TO few")
    assert set(found(f"{url}?table=apart.another")) == {"sql-table-to-be-made"}


def test_mariadb_without_password(maria: MariaServer, tmp_path: Path) -> None:
    """A user whom anybody may be; not one whose password is in a file."""
    (tmp_path / "my.cnf").write_text(f"[client]\npassword={SECRET}\n")
    url = maria.url.replace(f":{SECRET}", "")
    assert found(f"{url}?read_default_file={tmp_path}/my.cnf") == {}

    maria.execute("CREATE USER anybody; GRANT ALL ON lockkit.* TO anybody")

    finding = found(f"mariadb://anybody@{maria.address}/lockkit")["sql-no-password"]

    assert finding.fix.startswith("ALTER USER 'anybody'@'%'")


def test_silent_on_a_good_sqlite_file(tmp_path: Path) -> None:
    """Nothing at all is found where all is well, and nothing is changed."""
    path = tmp_path / "locks.db"
    url = f"sqlite:///{path}"

    assert set(found(url)) == {"sqlite-missing"}
    assert not path.exists()

    lock_once(url)
    content = path.read_bytes()
    assert found(url) == {}
    assert path.read_bytes() == content


def test_sqlite_in_a_wrong_place(tmp_path: Path) -> None:
    """No directory, or a directory in the place of the file."""
    assert "no directory" in found(f"sqlite:///{tmp_path}/a/locks.db")["sqlite-unusable"].seen
    assert "is a directory" in found(f"sqlite:///{tmp_path}")["sqlite-unusable"].seen
    assert "may not write" in found("sqlite:////proc/self/locks.db")["sqlite-unusable"].seen
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_sqlite_that_others_may_write_to_or_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its mode, and by what the kernel calls its file system."""
    url = f"sqlite:///{tmp_path}/locks.db"
    lock_once(url)
    (tmp_path / "locks.db").chmod(0o666)
    assert set(found(url)) == {"sqlite-writable-by-others"}

    monkeypatch.setattr(sql_examine, "kind_of_file_system", lambda device: "cifs")  # noqa: ARG005
    assert "cifs" in found(url)["sqlite-network"].seen


def test_table_that_is_enough_for_locks(tmp_path: Path) -> None:
    """What it lacks is not needed for them: the page on tables says so, and the doctor too."""
    url = f"sqlite:///{tmp_path}/app.db"
    lock_once(url)
    with sqlite3.connect(tmp_path / "app.db") as connection:
        for column in ("shares", "writer", "writer_until_us", "note", "note_until_us"):
            connection.execute(f"ALTER TABLE lockkit_locks DROP COLUMN {column}")
    connection.close()

    lock_once(url)
    finding = found(url)["sql-further-columns-missing"]

    assert set(found(url)) == {"sql-further-columns-missing"}
    assert finding.check.severity is Severity.WARNING
    assert "shares" in finding.seen
    assert "note" in finding.seen
