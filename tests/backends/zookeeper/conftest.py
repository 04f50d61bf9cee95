"""Fixtures for the tests of ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit_tools.servers import ZooKeeperServer, require
from tests.backends.zookeeper.support import Tree, kazoo_client


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """One server for all tests of a module. Each leaves it as it was."""
    require("zookeeper", local=True)
    with ZooKeeperServer() as running:
        yield running


@pytest.fixture
def tree(server: ZooKeeperServer) -> Iterator[Tree]:
    """What the server stores."""
    with kazoo_client(server.address) as client:
        yield Tree(client)


@pytest.fixture
def ours(server: ZooKeeperServer) -> Iterator[lockkit.Client]:
    """A client of lockkit's."""
    with lockkit.connect(server.url) as client:
        yield client


@pytest.fixture
def theirs(server: ZooKeeperServer) -> Iterator[KazooClient]:
    """A client of kazoo's."""
    with kazoo_client(server.address) as client:
        yield client
