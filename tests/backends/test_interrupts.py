"""Ctrl-C within the code of a driver that has threads of its own: whoever else uses the client goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.sync import Client
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer, Server, ZooKeeperServer, require
from tests.interrupts import LockStrike, elsewhere


@contextmanager
def own(server: Server) -> Iterator[Client]:
    """A client whose connection lockkit makes."""
    yield lockkit.connect(server.url)


@contextmanager
def adopted(server: Server) -> Iterator[Client]:
    """A client that uses the application's KazooClient. In its own, lockkit waits without kazoo's locks."""
    kazoos = KazooClient(server.address)
    kazoos.start(PATIENCE)
    try:
        yield lockkit.from_client(kazoos)
    finally:
        kazoos.stop()
        kazoos.close()


@pytest.mark.parametrize(
    ("kind", "server_class", "library", "connect"),
    [("etcd", EtcdServer, "grpc", own), ("zookeeper", ZooKeeperServer, "kazoo", adopted)],
)
def test_interrupt_within_a_driver_leaves_no_lock_taken(
    kind: str,
    server_class: type[Server],
    library: str,
    connect: Callable[[Server], AbstractContextManager[Client]],
) -> None:
    """At each of the instants in a call where it would: other threads of the client ask on, and it can be closed."""
    require(kind, local=True)
    number = 0
    with server_class() as server:
        while True:
            with connect(server) as client:
                client.ping()
                strike = LockStrike(number, library)
                strike.during(client.ping)

                assert elsewhere(client.ping), f"instant {number}"
                client.lock("x", ttl=5).acquire().release()
                assert elsewhere(client.close), f"instant {number}"
            if not strike.struck:
                break
            number += 1
    assert number > 1
