"""
Removes nodes that the server would keep for too long.

ZooKeeper removes a node when its session ends, and kazoo keeps the session alive as long as this process runs. So what
ends earlier than the session has to be removed by its client, and nothing but the server's answer ends that duty:

- the node of a lease that nobody renews any more: ``renew=False``, ``max_hold``, dropped without release, or released
  while the server could not be reached. It goes when its ttl is over;
- the place in line of a request that was given up while the server could not be reached. It would stand there for as
  long as the client lives, and when its turn came, nobody could take the lock any more;
- a node that perhaps was created by a request whose answer was lost. Such a request may be applied late: A sends it
  over a connection that hangs, reconnects, finds nothing and goes on; then the old connection gets through. The server
  reads a connection for one session timeout at most, so a last look is taken after that.

One coroutine per client, started when first needed and ended when idle.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from lockkit.background import Background
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lockkit.backends.zookeeper.session import Session
    from lockkit.runtime import Runtime

__all__ = ["Caretaker", "Due", "Leftover"]

log = logging.getLogger("lockkit")

LINGER = 10.0
"""Seconds that it stays without work. Shorter starts threads more often; longer keeps a dropped client."""

RETRY_PAUSE = 0.5
"""Between two tries to remove something, seconds. Longer keeps others waiting after an outage."""

REFUSED_PAUSE = 10.0
"""The same where the server refuses, for want of a right: shorter asks in vain more often."""


class Due(Protocol):
    """
    A node that has to go.

    Attributes:
        owner: Whose it is.
        session: In which it was created.
        session_id: The session's id then: with that session the server removes the node.
        until: When it has to go, client monotonic clock.
    """

    owner: str
    session: Session
    session_id: int
    until: float


class Leftover:
    """
    What a request that was given up left behind: a node, or perhaps one.

    Attributes:
        owner: Of the request.
        session: See `Due`.
        session_id: See `Due`.
        until: See `Due`.
        directory: Of the lock.
        node: Its name; None if nobody knows whether there is one.
        missed_at: When it was looked for and not found, client monotonic clock; None before.
    """

    __slots__ = ("directory", "missed_at", "node", "owner", "session", "session_id", "until")

    def __init__(self, owner: str, session: Session, session_id: int, directory: str, node: str | None) -> None:
        """Be due at once."""
        self.owner = owner
        self.session = session
        self.session_id = session_id
        self.until = 0.0
        self.directory = directory
        self.node = node
        self.missed_at: float | None = None


class Caretaker:
    """Knows what has to go, and when. Times are the client's monotonic clock."""

    def __init__(
        self, runtime: Runtime, remove: Callable[[Any], Coroutine[Any, Any, bool]], done: Callable[[], None]
    ) -> None:
        """
        Start nothing yet.

        Args:
            runtime: Clock, waiting and background work.
            remove: Removes something `Due`. False if it is to be called again at `Due.until`; raises `LockError` if the
                server could not be asked.
            done: Called when it is closed and nothing is left to be removed.
        """
        self._runtime = runtime
        self._remove = remove
        self._done = done
        self._mutex = runtime.mutex()
        self._due: dict[str, Due] = {}
        self._wake_at = inf
        self._background = Background(runtime, "lockkit-zookeeper-care", self._care)
        self._closed = False

    def keep(self, due: Due) -> None:
        """Remove something at its `until`, which may still be moved to a later time."""
        with self._mutex:
            self._due[due.owner] = due
            # In a row of short leases the later ones are due later than the first: no thread is woken for them.
            if due.until < self._wake_at:
                self._wake_at = due.until
                self._background.wake()
        self._start()

    def hasten(self, due: Due) -> None:
        """Remove it now: it was given up, and the server has not said that it is gone."""
        due.until = self._runtime.now()
        self.keep(due)

    def forget(self, due: Due) -> None:
        """Leave it: it is gone."""
        with self._mutex:
            self._due.pop(due.owner, None)

    def close(self, ends: Callable[[Session], bool]) -> None:
        """
        Leave what goes with its session, and stay in the background for what does not.

        Args:
            ends: Tells whether a session is about to end.
        """
        with self._mutex:
            self._closed = True
            for due in [*self._due.values()]:
                if ends(due.session) or not _exists(due):
                    del self._due[due.owner]
            left = bool(self._due)
        self._background.wake()
        if left:
            self._start()
        else:
            self._done()

    def _start(self) -> None:
        try:
            if not self._background.running:
                self._background.start()
        except RuntimeError as error:  # the next one tries again, as does the next renewal
            log.warning("nodes of leases that end are not removed at once: %s", error)

    async def _care(self) -> None:
        idle_since = self._runtime.now()
        while True:
            self._background.clear()
            with self._mutex:
                now = self._runtime.now()
                if self._due:
                    idle_since = now
                elif self._closed or now >= idle_since + LINGER:
                    self._wake_at = inf
                    break
                overdue = [due for due in self._due.values() if due.until <= now]
                self._wake_at = min((due.until for due in self._due.values()), default=now + LINGER)
            for due in overdue:
                await self._end(due)
            if not overdue:
                await self._background.wait(self._wake_at - now)
        if self._closed:
            self._done()

    async def _end(self, due: Due) -> None:
        if not _exists(due):
            self.forget(due)
            return
        try:
            done = await self._remove(due)
        except LockError as error:
            log.debug("removing the node of a lease that has ended: %s", error)
            pause = RETRY_PAUSE if isinstance(error, BackendUnavailable) else REFUSED_PAUSE
            due.until = self._runtime.now() + pause
        except Exception:
            log.exception("removing the node of a lease that has ended")
            due.until = self._runtime.now() + REFUSED_PAUSE
        else:
            if done:
                self.forget(due)


def _exists(due: Due) -> bool:
    """Tell whether the server may still have it: a session that is over took it along."""
    return due.session.id == due.session_id and not due.session.over
