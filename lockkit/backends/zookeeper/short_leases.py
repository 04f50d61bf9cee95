"""
Removes the nodes that the server would keep for too long.

ZooKeeper removes a node when its session ends, and kazoo keeps the session alive as long as this process runs. So the
client must remove what ends earlier than the session, and keep trying until the server has confirmed it:

- the node of a lease that is renewed no more: ``renew=False``, ``max_hold``, dropped without release, or released while
  the server could not be reached. It goes when its ttl is over;
- the place in the queue of a request that was given up while the server could not be reached. It would stay as long as
  the client lives, and once it is first, nobody could take the lock any more;
- a node that may have been created by a request whose answer was lost. The server may carry out such a request late:
  A sends it over a connection that hangs, reconnects, finds nothing and goes on; then the old connection gets through.
  The server reads a connection for one session timeout at most, so the client looks once more after that.

One coroutine per client, started when first needed and ended when idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

from lockkit.backends.zookeeper.node import LockNode
from lockkit.background import Background
from lockkit.runtime import Runtime

log = logging.getLogger("lockkit")

LINGER_SECONDS = 10.0
"""How long the coroutine stays without work. Shorter starts threads more often; longer keeps a dropped client."""

RETRY_PAUSE_SECONDS = 0.5
"""Between two tries to remove a node. Longer keeps others waiting after an outage; shorter asks in vain more often."""


class ShortLeases:
    """The nodes that have to go, each at its `LockNode.remove_at`."""

    def __init__(self, runtime: Runtime, remove: Callable[[LockNode], Coroutine[Any, Any, bool]]) -> None:
        self._runtime = runtime
        self._remove = remove
        self._mutex = runtime.mutex()
        self._nodes: dict[str, LockNode] = {}
        self._wake_at = inf
        self._background = Background(runtime, "lockkit-zookeeper-short-leases", self._run)
        self._closed = False

    def add(self, node: LockNode) -> None:
        """Remove a node at its `LockNode.remove_at`, which may still be moved to a later time."""
        with self._mutex:
            self._nodes[node.owner] = node
            # In a row of short leases the later ones are due after the first: no thread is woken for them.
            if node.remove_at < self._wake_at:
                self._wake_at = node.remove_at
                self._background.wake()
        self._start()

    def remove_now(self, node: LockNode) -> None:
        """Remove a node that was given up, and that the server has not confirmed to be gone."""
        node.remove_at = self._runtime.now()
        self.add(node)

    def forget(self, node: LockNode) -> None:
        """Leave a node: it is gone."""
        with self._mutex:
            self._nodes.pop(node.owner, None)

    def close(self) -> None:
        """Leave the nodes: they go with their sessions."""
        with self._mutex:
            self._closed = True
            self._nodes.clear()
        self._background.wake()

    def _start(self) -> None:
        try:
            if not self._background.running:
                self._background.start()
        except RuntimeError as error:  # the next node tries again, as does the next renewal
            log.warning("cannot start a thread that removes the nodes of leases that end: %s", error)

    async def _run(self) -> None:
        idle_since = self._runtime.now()
        while True:
            self._background.clear()
            with self._mutex:
                now = self._runtime.now()
                if self._nodes:
                    idle_since = now
                elif self._closed or now >= idle_since + LINGER_SECONDS:
                    self._wake_at = inf
                    break
                due = [node for node in self._nodes.values() if node.remove_at <= now]
                self._wake_at = min((node.remove_at for node in self._nodes.values()), default=now + LINGER_SECONDS)
            for node in due:
                await self._try_to_remove(node)
            if not due:
                await self._background.wait(self._wake_at - now)

    async def _try_to_remove(self, node: LockNode) -> None:
        try:
            removed = await self._remove(node)
        except Exception as error:  # noqa: BLE001 - whatever it is, the node must go: without it the others wait
            log.debug("removing the node of a lease that has ended: %r", error)
            node.remove_at = self._runtime.now() + RETRY_PAUSE_SECONDS
        else:
            if removed:
                self.forget(node)
