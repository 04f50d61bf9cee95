"""One member for each file of tests, and what leads there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import lockkit
from lockkit_tools.servers import EtcdServer, FaultProxy, require
from tests.backends.etcd.support import Connect


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """One member, for tests that leave it as it was."""
    require("etcd", local=True)
    with EtcdServer() as member:
        yield member


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[FaultProxy]:
    """A proxy between client and member."""
    with FaultProxy(server.host, server.port) as proxy:
        yield proxy


@pytest.fixture
def connect(server: EtcdServer) -> Iterator[Connect]:
    """Makes clients, of `server` unless a URL is given, closed at the end."""
    with ExitStack() as clients:

        def make(url: str | None = None, **options: Any) -> lockkit.Client:
            return clients.enter_context(lockkit.connect(url or server.url, **options))

        yield make
