"""One object store for each file of tests, and backends on it without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import pytest

from lockkit.backends.object_store.backend import ObjectBackend
from lockkit.runtime import drive
from lockkit_tools.servers import ObjectStoreServer, require
from tests.backends.support import FakeClock, StubHost, open_backend


@pytest.fixture(autouse=True)
def credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set some, also without a server: obstore would otherwise ask the metadata service of the machine for its role."""
    if "server" not in request.fixturenames:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    """A store, with its credentials in the environment."""
    require("s3", local=True)
    with ObjectStoreServer(password="hunter2") as store, mock.patch.dict(os.environ, store.credentials):  # noqa: S106
        yield store


Client = tuple[ObjectBackend, StubHost, FakeClock]


@pytest.fixture
def client(server: ObjectStoreServer, request: pytest.FixtureRequest) -> Iterator[Callable[[], Client]]:
    """Make a backend with a clock of its own; each test has a folder of its own."""
    folder = request.node.name.partition("[")[0]
    url = server.url.replace("locks?", f"locks/{folder}-{os.urandom(4).hex()}?")
    with ExitStack() as ends:

        def make() -> Client:
            clock = FakeClock()
            host = StubHost(clock)
            backend = open_backend(url, host)
            assert isinstance(backend, ObjectBackend)
            ends.callback(lambda: drive(backend.close()))
            return backend, host, clock

        yield make
