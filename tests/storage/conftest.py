"""A Redis for the tests of storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lockkit_tools.servers import RedisServer, require
from tests.storage.redis.support import Face


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node for all tests of a module."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


@pytest.fixture
def data(server: RedisServer) -> Iterator[redis.Redis]:
    """What is at the server, nothing at first."""
    with redis.Redis(port=server.port, decode_responses=True) as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest.fixture(params=["sync", "sync-resp3", "asyncio-decoded"])
def face(request: pytest.FixtureRequest, server: RedisServer) -> Face:
    """Each face in turn, with the settings of a client that change what it answers."""
    name, _, setting = request.param.partition("-")
    options: dict[str, dict[str, Any]] = {"decoded": {"decode_responses": True}, "resp3": {"protocol": 3}}
    return Face(name, server.port, options.get(setting, {}))
