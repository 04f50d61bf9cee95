"""Fixtures for the tests of mode=row and mode=advisory."""

from __future__ import annotations

import pytest

from lockkit_tools.servers import PostgresServer
from tests.backends.sql_session.support import MODES, ModeServer
from tests.backends.support import SqlSettings


@pytest.fixture(scope="module")
def sql_settings() -> SqlSettings:
    """Strict by default: what lockkit needs it must ask for."""
    return {
        "postgresql": {"default_transaction_isolation": "'serializable'"},
        "mariadb": {"transaction-isolation": "SERIALIZABLE"},
    }


@pytest.fixture(params=[f"{kind}-{mode}" for kind in ("postgresql", "mariadb") for mode in MODES])
def place(request: pytest.FixtureRequest) -> ModeServer:
    """Each kind of server in each mode."""
    kind, _, mode = request.param.partition("-")
    return ModeServer(request.getfixturevalue(kind), mode)


@pytest.fixture(params=MODES)
def on_postgresql(request: pytest.FixtureRequest, postgresql: PostgresServer) -> ModeServer:
    """PostgreSQL in each mode."""
    return ModeServer(postgresql, request.param)
