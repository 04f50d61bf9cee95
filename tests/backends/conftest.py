"""A SQL server for each file of tests: what one of them changes in it reaches no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer, require


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """PostgreSQL, with nothing in it."""
    require("postgresql", local=True)
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """MariaDB, with nothing in it."""
    require("mariadb", local=True)
    with MariaServer() as server:
        yield server
