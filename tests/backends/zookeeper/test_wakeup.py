"""What the watches of a session remember, and for how long. Without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from kazoo.protocol.states import EventType

from lockkit.backend import Request
from lockkit.backends.zookeeper.wakeup import Watches
from tests.backends.support import StubHost

LEASE, PREDECESSOR = "/lockkit/x/ours", "/lockkit/x/theirs"


class Server:
    """As much of kazoo's client as watches need: it sends nothing, and reports what a test says."""

    def __init__(self) -> None:
        """Watch over the first connection."""
        self.gone: list[str] = []
        self.report: Callable[[object], None] = lambda _: None
        self.watches = Watches(self, lambda *_: (1.0, "listing"), self.gone.append, threading.Lock())
        self.watches.connection_changed(connected=True)

    def get_async(self, _: str, *, watch: Callable[[object], None]) -> None:
        """See `kazoo.client.KazooClient.get_async`."""
        self.report = watch

    def reconnect(self) -> None:
        """Break the connection, and make another one."""
        self.watches.connection_changed(connected=False)
        self.watches.connection_changed(connected=True)

    def wake(self, request: Request) -> None:
        """Have what a request waits for go away."""
        self.watches.watch_predecessor(PREDECESSOR, request)
        self.report(SimpleNamespace(path=PREDECESSOR, type=EventType.DELETED))
        assert request.wake.is_set()


@pytest.fixture
def server() -> Server:
    """A server and its watches."""
    return Server()


def test_deleted_node_of_a_lease_is_reported_once(server: Server) -> None:
    """With its owner; from then on the server would not report it."""
    server.watches.watch_lease(LEASE, "owner")
    assert server.watches.watches_lease(LEASE, "owner")

    for _ in range(2):
        server.report(SimpleNamespace(path=LEASE, type=EventType.DELETED))

    assert server.gone == ["owner"]
    assert not server.watches.watches_lease(LEASE, "owner")


def test_node_is_asked_for_again_over_the_next_connection(server: Server) -> None:
    """A request that got no answer may not have reached the server, which then watches nothing."""
    server.watches.watch_lease(LEASE, "owner")

    server.reconnect()

    assert not server.watches.watches_lease(LEASE, "owner")


def test_listing_of_the_former_connection_is_not_used(server: Server) -> None:
    """The member of the next one may not have caught up with it."""
    request = StubHost().request()
    server.wake(request)

    server.reconnect()

    assert server.watches.take_listing(request) is None


def test_waiter_that_gives_up_leaves_nothing(server: Server) -> None:
    """Its session may end when nothing else uses it."""
    request = StubHost().request()
    server.wake(request)
    assert server.watches.in_use

    server.watches.stop_waking(request)

    assert not server.watches.in_use
