"""Ctrl-C within the code of a driver that has threads of its own: whoever else uses the client goes on."""

from __future__ import annotations

import lockkit
from lockkit_tools.servers import EtcdServer, require
from tests.interrupts import LockStrike, elsewhere


def test_interrupt_within_a_driver_leaves_no_lock_taken() -> None:
    """At each of the instants in a call where it would: other threads of the client ask on, and it can be closed."""
    require("etcd", local=True)
    number = 0
    with EtcdServer() as server:
        while True:
            with lockkit.connect(server.url) as client:
                client.ping()
                strike = LockStrike(number, "grpc")
                strike.during(client.ping)

                assert elsewhere(client.ping), f"instant {number}"
                client.lock("x", ttl=5).acquire().release()
                assert elsewhere(client.close), f"instant {number}"
            if not strike.struck:
                break
            number += 1
    assert number > 1
