"""What holds for the tests of all integrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import RedisServer, require
from tests.tries import wait_for_observers


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an observer may take longer than a call waits for it."""
    wait_for_observers(monkeypatch)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Broker, result backend and lock server in one."""
    require("redis", local=True)
    with RedisServer() as running:
        yield running
