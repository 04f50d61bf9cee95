"""A SQL server for each file of tests: what one of them changes in it reaches no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import lockkit
from lockkit_tools.servers import FaultProxy, MariaServer, PostgresServer, require
from tests.backends.support import Connect, SqlSettings


@pytest.fixture
def proxy(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    """A network path to the file's server that can be disturbed."""
    server = request.getfixturevalue("server")
    with FaultProxy(server.host, server.port) as running:
        yield running


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients, of the file's server unless a URL is given, closed at the end."""
    with ExitStack() as clients:

        def make(url: str | None = None, **options: Any) -> lockkit.Client:
            url = url or request.getfixturevalue("server").url
            return clients.enter_context(lockkit.connect(url, **options))

        yield make


@pytest.fixture(scope="module")
def sql_settings() -> SqlSettings:
    """Settings of the servers of a folder, which overrides this, by the kind of server."""
    return {}


@pytest.fixture(scope="module")
def postgresql(sql_settings: SqlSettings) -> Iterator[PostgresServer]:
    """PostgreSQL, with nothing in it."""
    require("postgresql", local=True)
    with PostgresServer(settings=sql_settings.get("postgresql")) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb(sql_settings: SqlSettings) -> Iterator[MariaServer]:
    """MariaDB, with nothing in it."""
    require("mariadb", local=True)
    with MariaServer(settings=sql_settings.get("mariadb")) as server:
        yield server
