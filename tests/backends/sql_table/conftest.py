"""Fixtures for the tests of the lock table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.backends.sql_table.support import connect  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """In Tokyo, where it is never the time that UTC says, and strict by default."""
    require("postgresql", local=True)
    settings = {"timezone": "'Asia/Tokyo'", "default_transaction_isolation": "'serializable'"}
    with PostgresServer(settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """In Tokyo, too."""
    require("mariadb", local=True)
    with MariaServer(settings={"default-time-zone": "+09:00"}) as server:
        yield server


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind, without a table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/locks.db"
    server: PostgresServer | MariaServer = request.getfixturevalue(request.param)
    server.execute("DROP TABLE IF EXISTS lockkit_locks")  # others leave theirs
    return server.url


@pytest.fixture
def postgresql_url(postgresql: PostgresServer) -> str:
    """PostgreSQL alone."""
    postgresql.execute("DROP TABLE IF EXISTS lockkit_locks")
    return postgresql.url
