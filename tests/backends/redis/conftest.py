"""One node for each file of tests, and clients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.testing.servers import RedisServer, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends.redis.support import Connect


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node, for tests that leave it as it was."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda url, **options: clients.enter_context(lockkit.connect(url, **options))
