"""Fixtures for the tests of the lock table."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer
from tests.backends.support import SqlSettings


@pytest.fixture(scope="module")
def sql_settings() -> SqlSettings:
    """In Tokyo, where it is never the time that UTC says; PostgreSQL strict by default."""
    return {
        "postgresql": {"timezone": "'Asia/Tokyo'", "default_transaction_isolation": "'serializable'"},
        "mariadb": {"default-time-zone": "+09:00"},
    }


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
