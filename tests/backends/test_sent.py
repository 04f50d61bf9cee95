"""Requests that got no answer: whether the backend says that something may have been sent, and has to be undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit.backend import Busy
from lockkit.runtime import drive
from lockkit_tools.servers import EtcdServer, FaultProxy, ZooKeeperServer, require
from tests.backends.support import StubHost, answers, granted, open_backend, sent_to
from tests.tries import until


@pytest.fixture(params=["etcd", "zookeeper"])
def server(request: pytest.FixtureRequest) -> Iterator[EtcdServer | ZooKeeperServer]:
    """One server of each kind."""
    require(request.param, local=True)
    with EtcdServer() if request.param == "etcd" else ZooKeeperServer() as running:
        yield running


def test_acquisition_says_whether_it_was_sent(server: EtcdServer | ZooKeeperServer) -> None:
    """Refused at connect: no. Unanswered, or refused while a place in the queue is there: yes."""
    host = StubHost()
    with FaultProxy(server.host, server.port) as proxy:
        ours = open_backend(server.url.replace(server.address, proxy.address), host)
        other = open_backend(server.url, host)
        grant = granted(drive(other.try_acquire(host.request("sent"))))
        proxy.refuse()
        request = host.request("sent")
        assert not sent_to(ours, request)
        assert request.state is None
        proxy.heal()
        until(lambda: answers(lambda: drive(ours.ping())))  # it connects again after a pause

        waiting = host.request("sent")
        assert isinstance(drive(ours.try_acquire(waiting)), Busy)
        proxy.refuse()
        proxy.cut()
        assert sent_to(ours, waiting)
        proxy.heal()
        until(lambda: answers(lambda: drive(ours.ping())))
        drive(ours.abandon(waiting))

        proxy.blackhole(to_server=False)
        assert sent_to(ours, host.request("unanswered"))
        proxy.heal()
        drive(other.release(grant))
        for one in (ours, other):
            drive(one.close())
