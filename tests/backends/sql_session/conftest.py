"""Fixtures for the tests of mode=row and mode=advisory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.backends.sql_session.support import MODES, ModeServer
from tests.backends.sql_table.support import connect  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """Strict by default: what lockkit needs it must ask for."""
    require("postgresql", local=True)
    with PostgresServer(settings={"default_transaction_isolation": "'serializable'"}) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """Strict by default, too."""
    require("mariadb", local=True)
    with MariaServer(settings={"transaction-isolation": "SERIALIZABLE"}) as server:
        yield server


@pytest.fixture(params=[f"{kind}-{mode}" for kind in ("postgresql", "mariadb") for mode in MODES])
def place(request: pytest.FixtureRequest) -> ModeServer:
    """Each kind of server in each mode."""
    kind, _, mode = request.param.partition("-")
    return ModeServer(request.getfixturevalue(kind), mode)


@pytest.fixture(params=MODES)
def on_postgresql(request: pytest.FixtureRequest, postgresql: PostgresServer) -> ModeServer:
    """PostgreSQL in each mode."""
    return ModeServer(postgresql, request.param)
