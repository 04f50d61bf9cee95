"""One node for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import RedisServer, require
from tests.backends.redis.faces import face, host, pytest_pyfunc_call

__all__ = ["face", "host", "pytest_pyfunc_call", "server"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node, for tests that leave it as it was."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node
