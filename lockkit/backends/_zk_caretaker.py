"""
Removes nodes that the server would keep for too long.

ZooKeeper removes a node when its session ends, and kazoo keeps the session alive as long as this process runs. So what
ends earlier than the session has to be removed by its client:

- the node of a lease that nobody renews any more: ``renew=False``, ``max_hold``, dropped without release, or released
  while the server could not be reached. It goes when its ttl is over;
- a node that perhaps was created by a request whose answer was lost. Such a request may be applied late: A sends it
  over a connection that hangs, reconnects, finds nothing and goes on; then the old connection gets through. The server
  reads a connection for one session timeout at most, so a last look is taken after that.

One coroutine per client, started when first needed and ended when idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from lockkit.errors import LockError

if TYPE_CHECKING:
    from lockkit.backends._zk_session import Held
    from lockkit.runtime import Runtime

__all__ = ["Caretaker"]

log = logging.getLogger("lockkit")

LINGER = 10.0
"""Seconds that it stays without work. Shorter starts threads more often; longer keeps a dropped client."""

RETRY_PAUSE = 0.5
"""Between two tries to remove something, seconds. Longer keeps others waiting after an outage."""

Search = Callable[[], Coroutine[Any, Any, object]]
"""Looks for a node that perhaps is there, and removes it."""


class Caretaker:
    """Knows what has to go, and when. Times are the client's monotonic clock."""

    def __init__(self, runtime: Runtime, remove: Callable[[Held], Coroutine[Any, Any, object]]) -> None:
        """
        Start nothing yet.

        Args:
            runtime: Clock, waiting and background work.
            remove: Removes the node of a lease. Raises `LockError` if it could not.
        """
        self._runtime = runtime
        self._remove = remove
        self._mutex = runtime.mutex()
        self._held: dict[str, Held] = {}
        self._searches: list[tuple[float, Search]] = []
        self._wake = runtime.event()
        self._wake_at = inf
        self._running = False
        self._closed = False

    def keep(self, held: Held) -> None:
        """Remove a node at its `until`, which may still be moved to a later time."""
        with self._mutex:
            self._held[held.owner] = held
            self._plan(held.until)

    def hasten(self, held: Held) -> None:
        """Remove it now: it was released, and the server has not said that it did."""
        held.until = self._runtime.now()
        self.keep(held)

    def forget(self, held: Held) -> None:
        """Leave it: it is gone."""
        with self._mutex:
            self._held.pop(held.owner, None)

    def search(self, at: float, look: Search) -> None:
        """Look for something at that time, and again until there was an answer."""
        with self._mutex:
            self._searches.append((at, look))
            self._plan(at)

    def close(self) -> None:
        """Stop: the sessions end, and with them all nodes."""
        self._closed = True
        self._wake.set()

    def _plan(self, at: float) -> None:
        """See that it is awake in time. Under the mutex."""
        if not self._running and not self._closed:
            self._runtime.spawn("lockkit-zookeeper-care", self._run)
            self._running = True
            self._wake_at = at
        elif at < self._wake_at:
            # In a row of short leases the later ones are due later than the first: no thread is woken for them.
            self._wake_at = at
            self._wake.set()

    async def _run(self) -> None:
        idle_since = self._runtime.now()
        while True:
            with self._mutex:
                self._wake.clear()
                now = self._runtime.now()
                if self._held or self._searches:
                    idle_since = now
                if self._closed or now >= idle_since + LINGER:
                    self._running = False
                    return
                overdue, looks = self._take(now)
                times = [*(held.until for held in self._held.values()), *(at for at, _ in self._searches)]
                self._wake_at = min(times, default=now + LINGER)
            for held in overdue:
                await self._end(held)
            for look in looks:
                await self._look(look)
            if not (overdue or looks):
                await self._wake.wait(max(0.0, self._wake_at - now))

    def _take(self, now: float) -> tuple[list[Held], list[Search]]:
        """Give what is to be done now. A node stays in the list until it is gone, a search is taken out."""
        overdue = [held for held in self._held.values() if held.until <= now]
        looks = [look for at, look in self._searches if at <= now]
        self._searches = [entry for entry in self._searches if entry[0] > now]
        return overdue, looks

    async def _end(self, held: Held) -> None:
        try:
            await self._remove(held)
        except LockError as error:
            log.debug("removing the node of a lease that has ended: %s", error)
            held.until = self._runtime.now() + RETRY_PAUSE
        else:
            self.forget(held)

    async def _look(self, look: Search) -> None:
        try:
            await look()
        except LockError as error:
            log.debug("looking for a node that may have been created: %s", error)
            self.search(self._runtime.now() + RETRY_PAUSE, look)
