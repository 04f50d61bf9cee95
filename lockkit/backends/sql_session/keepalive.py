"""
Keeps the connections that are locks from being idle.

A load balancer or a NAT may close an idle connection, often after a minute, and with it the lock. Renewals are sent
only after a third of the ttl, and with ``renew=False`` never.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lockkit.backends.sql_session.claim import Claim
from lockkit.backends.sql_session.session import Session
from lockkit.background import Background
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")


@dataclass(eq=False, slots=True)
class Held:
    """
    A session that is a lock.

    Attributes:
        claim: Whose lock it is, as long as that has this session.
        session: It.
        owner: Of the lease.
        tried_at: When a statement was due last, client monotonic clock.
    """

    claim: Claim
    session: Session
    owner: str
    tried_at: Instant = 0.0

    @property
    def used_at(self) -> Instant:
        """When its silence began."""
        return max(self.session.sent_at, self.tried_at)


class KeepAlive:
    """Watches when the held sessions of one client were used last. Its methods may be called from any thread."""

    def __init__(self, runtime: Runtime, seconds: Seconds, send: Callable[[Sequence[Held]], Awaitable[None]]) -> None:
        """Watch nothing yet; `send` sends a statement on sessions before they have been silent for so many seconds."""
        self._runtime = runtime
        self._seconds = seconds
        self._send = send
        self._held: dict[Session, Held] = {}
        self._background = Background(runtime, "lockkit-sql-keepalive", self._work)

    def add(self, claim: Claim, session: Session, owner: str, ttl: Seconds) -> None:
        """Watch a session that is a lock, until `forget`; not if its ttl ends before it would be idle for too long."""
        if ttl <= self._seconds:
            return
        self._held[session] = Held(claim, session, owner)
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError as error:  # no more threads, or the event loop has ended
            log.warning("idle connections that are locks may be closed by a load balancer or a NAT: %s", error)

    def forget(self, session: Session) -> None:
        """Stop watching."""
        self._held.pop(session, None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._held.clear()
        self._background.wake()

    async def _work(self) -> None:
        # Half of the time: the answer, and the others that are due, come in the other half.
        pause = self._seconds / 2
        while True:
            self._background.clear()
            now = self._runtime.now()
            held = list(self._held.values())
            if not held:
                return
            due = [each for each in held if each.used_at + pause <= now]
            for each in due:
                each.tried_at = now
            if due:
                await self._send(due)
            else:
                await self._background.wait(min(each.used_at for each in held) + pause - now)
