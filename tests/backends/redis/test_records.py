"""The record of a lock's last grant: how long it stays, and records of other versions of lockkit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.testing.servers import RedisNodes, RedisServer, require
from lockkit.testing.timing import PATIENCE
from tests.backends.redis.support import Keyspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FENCE = "{lockkit:x}:fence"


@pytest.fixture(scope="module", params=["redis", "redlock"])
def servers(request: pytest.FixtureRequest) -> Iterator[RedisServer | RedisNodes]:
    """One node, or three."""
    require("redis", local=True)
    with RedisServer() if request.param == "redis" else RedisNodes(3) as made:
        yield made


@pytest.fixture
def keyspaces(servers: RedisServer | RedisNodes) -> Sequence[Keyspace]:
    """The keys of each node, without a record of the lock."""
    made = [Keyspace(node) for node in (servers.nodes if isinstance(servers, RedisNodes) else [servers])]
    for keyspace in made:
        keyspace("DEL", FENCE, "lockkit:x")
    return made


@pytest.mark.parametrize("idle_ttl", [120, "120", timedelta(minutes=2)])
def test_record_of_a_released_name_stays_for_idle_ttl(
    servers: RedisServer | RedisNodes, keyspaces: Sequence[Keyspace], idle_ttl: object
) -> None:
    """From the last grant or renewal; but at least for ten ttls."""
    with lockkit.connect(servers.url, idle_ttl=idle_ttl, ttl=5) as client:
        with client.lock("x", timeout=PATIENCE) as lease:
            lease.extend()
        assert all(110_000 < int(str(keyspace("PTTL", FENCE))) <= 120_000 for keyspace in keyspaces)
        with client.lock("x", ttl=60, timeout=PATIENCE):
            pass
        assert all(590_000 < int(str(keyspace("PTTL", FENCE))) <= 600_000 for keyspace in keyspaces)
    with lockkit.connect(servers.url) as client:
        with client.lock("x", timeout=PATIENCE):
            pass
        assert all(int(str(keyspace("PTTL", FENCE))) > 86_000_000 for keyspace in keyspaces)


def test_idle_ttl_has_a_least_value(servers: RedisServer | RedisNodes) -> None:
    """Below a minute a step of the server's clock could be longer."""
    with pytest.raises(lockkit.ConfigurationError, match="at least 60 seconds"):
        lockkit.connect(servers.url, idle_ttl=59)
