"""Ctrl-C within the code of a driver that has threads of its own: whoever else uses the client goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.testing.servers import EtcdServer, ZooKeeperServer, require
from tests.interrupts import LockStrike, elsewhere

if TYPE_CHECKING:
    from lockkit.testing.servers import Server


@pytest.mark.parametrize(
    ("kind", "server_class", "library"), [("etcd", EtcdServer, "grpc"), ("zookeeper", ZooKeeperServer, "kazoo")]
)
def test_interrupt_within_a_driver_leaves_no_lock_taken(kind: str, server_class: type[Server], library: str) -> None:
    """At each of the instants in a call where it would: other threads of the client ask on, and it can be closed."""
    require(kind, local=True)
    number = 0
    with server_class() as server:
        while True:
            client = lockkit.connect(server.url)
            client.ping()
            strike = LockStrike(number, library)
            strike.during(client.ping)

            assert elsewhere(client.ping), f"instant {number}"
            client.lock("x", ttl=30).acquire().release()
            assert elsewhere(client.close), f"instant {number}"
            if not strike.struck:
                break
            number += 1
    assert number > 1
