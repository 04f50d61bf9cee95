"""
What the server reports about nodes: a waiter is woken, or the node of a lease has gone.

One function is called for all nodes, so that kazoo keeps it once for each path: waits that ended leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kazoo.protocol.states import EventType

from lockkit.backend import Request
from lockkit.backends.zookeeper.connection import weakly


class Watches:
    """
    The watches of one session.

    Attributes:
        connections_count: How many connections the session has had. A watch belongs to a connection.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - kazoo has no types
        request_children: Callable[[str, Callable[[Any], None] | None, float], tuple[float, Any]],
        lease_gone: Callable[[str], None],
        mutex: AbstractContextManager[Any],
    ) -> None:
        """
        Watch nothing yet.

        request_children: Requests the children of a directory for a waiter, with a watch on them if there is a
        second argument; the third is the ttl that the waiter wants. Gives a time at which the session was alive
        for certain, and kazoo's result.
        """
        self._client = client
        self._request_children = request_children
        self._lease_gone = lease_gone
        self._mutex = mutex
        self._on_event = weakly(self._node_changed)
        self._waiters: dict[str, set[Request]] = {}
        self._watched: dict[Request, str] = {}
        # By path of the node: the owner, and the number of the connection over which the server was asked.
        self._leases: dict[str, tuple[str, int]] = {}
        self._listings: dict[Request, tuple[float, Any]] = {}
        self.connections_count = 0

    @property
    def in_use(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiters or self._listings)

    # -- waiters ---------------------------------------------------------------------------------------------------

    def watch_predecessor(self, path: str, request: Request) -> Any:  # noqa: ANN401 - kazoo has no types
        """Have a request woken when the node that it waits for changes or goes away; give kazoo's result."""
        self._add_waiter(path, request)
        return self._client.get_async(path, watch=self._on_event)

    def watch_directory(self, path: str, request: Request) -> Any:  # noqa: ANN401 - kazoo has no types
        """Have a request woken whenever a node in a directory comes or goes; give kazoo's result, the children."""
        self._add_waiter(path, request)
        return self._client.get_children_async(path, watch=self._on_event)

    def _add_waiter(self, path: str, request: Request) -> None:
        self.stop_waking(request)
        with self._mutex:
            self._watched[request] = path
            self._waiters.setdefault(path, set()).add(request)

    def wakes(self, path: str, request: Request) -> bool:
        """Tell whether a request will be woken when that node, or what is in that directory, changes."""
        return request in self._waiters.get(path, ())

    def stop_waking(self, request: Request) -> None:
        """Wake a request no more. The server keeps its watch, one for each node, until that changes."""
        path = self._watched.get(request)
        if path is None:
            return
        with self._mutex:
            self._listings.pop(request, None)
            requests = self._waiters.get(path)
            if requests is not None:
                requests.discard(request)
                if not requests:
                    del self._waiters[path]
            self._watched.pop(request, None)  # last: after an interrupt this is called again

    def take_listing(self, request: Request) -> tuple[float, Any] | None:
        """Give what was requested for a waiter when it was woken, as ``request_children`` gave it."""
        return self._listings.pop(request, None)

    # -- leases ----------------------------------------------------------------------------------------------------

    def watch_lease(self, path: str, owner: str) -> Any:  # noqa: ANN401 - kazoo has no types
        """Read the node of a lease, and watch it; give kazoo's result."""
        # Before it is sent: should it go over the next connection, it is asked for once more, and not once less.
        self._leases[path] = owner, self.connections_count
        # Not `exists`, which leaves a watch for the life of the session if the node is gone: it never comes back.
        return self._client.get_async(path, watch=self._on_event)

    def watches_lease(self, path: str, owner: str) -> bool:
        """
        Tell whether the server would have reported that the node of a lease has gone.

        It reports that before it answers any later request. So one heartbeat serves all leases of the session.
        """
        return self._leases.get(path) == (owner, self.connections_count)

    def forget_lease(self, path: str) -> None:
        """Expect that a node goes away."""
        self._leases.pop(path, None)

    # -- what kazoo tells, in its threads --------------------------------------------------------------------------

    def connection_changed(self, *, connected: bool) -> None:
        """Forget what was requested over the former connection: the next one's member may not have caught up."""
        self._listings.clear()
        if connected:
            self.connections_count += 1

    def _node_changed(self, event: Any) -> None:  # noqa: ANN401 - kazoo has no types
        if event.path is None:
            self._connection_broke()
            return
        lease = self._leases.pop(event.path, None)
        if lease is not None and event.type == EventType.DELETED:
            self._lease_gone(lease[0])
        for request in self._request_listing(event.path, of_directory=event.type == EventType.CHILD):
            request.wake.set()

    def _request_listing(self, path: str, *, of_directory: bool) -> list[Request]:
        """Give those that wait for a node or directory, and send their first request, while their threads wake up."""
        with self._mutex:
            requests = [*(self._waiters.get(path, ()) if of_directory else self._waiters.pop(path, ()))]
            if not requests:
                return []
            ttl = min(request.ttl for request in requests)
            if of_directory:
                listing = self._request_children(path, self._on_event, ttl)  # they go on watching it
            else:
                listing = self._request_children(path.rpartition("/")[0], None, ttl)
            self._listings.update(dict.fromkeys(requests, listing))
            return requests

    def _connection_broke(self) -> None:
        """Wake all waiters, to watch again: kazoo forgets all watches with the connection."""
        with self._mutex:
            waiters, self._waiters = self._waiters, {}
        self._leases.clear()
        for requests in waiters.values():
            for request in [*requests]:
                request.wake.set()
