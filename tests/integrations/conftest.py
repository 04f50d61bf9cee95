"""What holds for the tests of all integrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit import observers
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer, require


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an observer may take longer than a call waits for it."""
    monkeypatch.setattr(observers, "WAIT_SECONDS", PATIENCE)
    monkeypatch.setattr(observers, "LAST_SECONDS", PATIENCE)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Broker, result backend and lock server in one."""
    require("redis", local=True)
    with RedisServer() as running:
        yield running
