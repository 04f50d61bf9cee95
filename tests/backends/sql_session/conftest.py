"""Fixtures for the tests of mode=row and mode=advisory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.backends.sql_session.support import MODES, ModeServer
from tests.backends.sql_table.support import connect

if TYPE_CHECKING:
    from lockkit.testing.servers import PostgresServer

__all__ = ["connect", "on_postgresql", "place"]


@pytest.fixture(params=[f"{kind}-{mode}" for kind in ("postgresql", "mariadb") for mode in MODES])
def place(request: pytest.FixtureRequest) -> ModeServer:
    """Each kind of server in each mode."""
    kind, _, mode = request.param.partition("-")
    return ModeServer(request.getfixturevalue(kind), mode)


@pytest.fixture(params=MODES)
def on_postgresql(request: pytest.FixtureRequest, postgresql: PostgresServer) -> ModeServer:
    """PostgreSQL in each mode."""
    return ModeServer(postgresql, request.param)
