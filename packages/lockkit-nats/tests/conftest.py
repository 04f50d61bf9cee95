"""A NATS server for the tests of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import Service, provide, require


@pytest.fixture(scope="session")
def server() -> Iterator[Service]:
    """One with JetStream; if it is missing, the tests are skipped, and fail in CI."""
    require("nats")
    with provide("nats") as server:
        yield server
