"""One node for each file of tests, and clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import lockkit
from lockkit_tools.servers import RedisServer, require
from tests.backends.redis.faces import face, host, pytest_pyfunc_call
from tests.backends.redis.support import Connect

__all__ = ["connect", "face", "host", "pytest_pyfunc_call", "server"]


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
