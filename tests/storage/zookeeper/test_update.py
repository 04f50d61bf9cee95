"""Optimistic updates in ZooKeeper: what is its own. For all stores, see `tests.storage.test_updates`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.optimistic import DELETE, update_node
from lockkit_tools.servers import ZooKeeperServer, require
from tests.backends.zookeeper.support import kazoo_client


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """One server for all tests of this module."""
    require("zookeeper", local=True)
    with ZooKeeperServer() as running:
        yield running


@pytest.fixture
def data(server: ZooKeeperServer) -> Iterator[KazooClient]:
    """A client, with a directory that is empty at first."""
    with kazoo_client(server.address) as client:
        client.ensure_path("/data")
        yield client
        client.delete("/data", recursive=True)


def test_client_without_connection(data: KazooClient) -> None:
    """Nothing is left for kazoo to send later."""
    stopped = KazooClient(data.hosts[0][0])

    with pytest.raises(lockkit.BackendUnavailable, match="started"):
        update_node(stopped, "/data/x", lambda _: b"")


def test_refused_arguments(data: KazooClient) -> None:
    """Each with what would be right."""
    data.create("/data/parent/child", makepath=True)
    unchecked: Any = update_node
    for client, path, fn, problem in (
        ("zk", "/data/x", bytes, "KazooClient"),
        (data, "data/x", bytes, "slash"),
        (data, b"/data/x", bytes, "slash"),
        (data, "/data/x", lambda _: 5, "bytes or a str"),
        (data, "/data/none/x", lambda _: b"", "parent"),
        (data, "/data/parent", lambda _: DELETE, "children"),
    ):
        with pytest.raises(lockkit.ConfigurationError, match=problem):
            unchecked(client, path, fn)
