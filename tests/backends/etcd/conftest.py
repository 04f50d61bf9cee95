"""One member for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit_tools.servers import EtcdServer, require


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """One member, for tests that leave it as it was."""
    require("etcd", local=True)
    with EtcdServer() as member:
        yield member
