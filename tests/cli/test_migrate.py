"""``lockkit migrate``."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockkit
from lockkit.backends.sql import schema as sql_schema
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.schema import Table
from lockkit.cli.backends import Migrate
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.cli.support import Cli, run_here


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """A database of each kind that has a server."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


def test_table_is_made_once_and_used(server: PostgresServer | MariaServer) -> None:
    """Whoever may only use it needs nothing more; a second run finds nothing to do."""
    made = run_here("migrate", server.url)
    again = run_here("migrate", server.url)

    assert (made.exit_code, again.exit_code) == (0, 0), made.stderr + again.stderr
    assert "made table lockkit_locks" in made.stdout
    assert "lockkit_locks is as it should be" in again.stdout
    with lockkit.connect(f"{server.url}?auto_create=0") as client:
        client.lock("x").acquire().release()


def test_printed_statements_make_the_same_table(server: PostgresServer | MariaServer) -> None:
    """For whoever has an administrator run them."""
    url = f"{server.url}?table=printed"
    done = run_here("migrate", "--sql", url)
    assert done.exit_code == 0, done.stderr

    server.execute(done.stdout)

    assert "printed is as it should be" in run_here("migrate", url).stdout


def test_sql_is_printed_without_a_database() -> None:
    """Nobody listens there."""
    done = run_here("migrate", "--sql", "postgresql://127.0.0.1:9/x?table=tools.locks")

    assert done.exit_code == 0
    assert re.match(r'CREATE TABLE IF NOT EXISTS "tools"\."locks" \(\n    name TEXT COLLATE "C" NOT NULL,', done.stdout)
    assert done.stdout.rstrip().endswith(";")


def test_missing_columns_are_added(tmp_path: Path) -> None:
    """A table that has only what other clients know is completed; its rows stay."""
    path = tmp_path / "locks.db"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE lockkit_locks (name TEXT PRIMARY KEY, owner TEXT, token BIGINT, expires_at_us BIGINT)"
        )
        connection.execute("INSERT INTO lockkit_locks VALUES ('x', NULL, 9000000000000000, 0)")
    connection.close()

    done = run_here("migrate", f"sqlite:///{path}")

    assert "lacked metadata, metadata_owner, broken_owner, wanted, note, note_until_us" in done.stdout
    assert "shares, writer, writer_until_us: added" in done.stdout
    with lockkit.connect(f"sqlite:///{path}") as client, client.lock("x") as lease:
        assert lease.token == 9000000000000001


def test_columns_that_somebody_adds_meanwhile(
    server: PostgresServer | MariaServer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two migrations look, and both find the columns missing: each ends well."""
    name = 'text COLLATE "C"' if isinstance(server, PostgresServer) else "VARBINARY(255)"
    path = cli.home / "raced.db"
    lacking = f"CREATE TABLE raced (name {name} PRIMARY KEY, owner {name}, token BIGINT, expires_at_us BIGINT)"
    server.execute(lacking)
    with sqlite3.connect(path) as connection:
        connection.execute(lacking.replace('COLLATE "C"', ""))
    connection.close()
    look = sql_schema.columns_of

    for url in (f"{server.url}?table=raced", f"sqlite:///{path}?table=raced"):
        first: list[str] = []

        async def looking(
            database: Database, table: Table, url: str = url, first: list[str] = first
        ) -> set[str] | None:
            found = await look(database, table)
            if not first:
                first.append(url)
                Migrate(url=url, profile=None, sql_only=False).run()
            return found

        monkeypatch.setattr(sql_schema, "columns_of", looking)
        Migrate(url=url, profile=None, sql_only=False).run()
        assert first
        with lockkit.connect(url) as client:
            client.lock("x").acquire().release()


def test_url_comes_from_the_environment_too(cli: Cli) -> None:
    """As for every command, so that a password need not stand on the command line."""
    cli.env["LOCKKIT_URL"] = f"sqlite:///{cli.home}/locks.db"

    assert "made table lockkit_locks" in cli.run("migrate").stdout
