"""
Sends a statement on the sessions that are locks before they have been silent for too long.

What is between client and server may close a connection on which nothing goes, often after a minute, and with it the
lock. Renewals come after a third of the ttl only, and not at all with ``renew=False``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lockkit.background import Background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lockkit.backends.sql_session.claim import Claim
    from lockkit.backends.sql_session.session import Session
    from lockkit.runtime import Runtime
    from lockkit.units import Instant, Seconds

__all__ = ["Held", "KeepAlive"]

log = logging.getLogger("lockkit")


class Held:
    """
    A session that is a lock.

    Attributes:
        claim: Whose lock it is, as long as that has this session.
        session: It.
        owner: Of the lease.
        tried_at: When a sign was due last, client monotonic clock.
    """

    def __init__(self, claim: Claim, session: Session, owner: str) -> None:
        """None was due yet."""
        self.claim = claim
        self.session = session
        self.owner = owner
        self.tried_at = 0.0

    @property
    def used_at(self) -> Instant:
        """From when on its silence counts."""
        return max(self.session.sent_at, self.tried_at)


class KeepAlive:
    """Watches when the held sessions of one client were used last. Its methods may be called from any thread."""

    def __init__(
        self,
        runtime: Runtime,
        seconds: Seconds,
        give_sign: Callable[[Sequence[Held]], Awaitable[None]],
    ) -> None:
        """
        Watch nothing yet.

        Args:
            runtime: The client's.
            seconds: How long a session may be silent.
            give_sign: Sends a statement on each of these sessions.
        """
        self._runtime = runtime
        self._seconds = seconds
        self._give_sign = give_sign
        self._held: dict[Session, Held] = {}
        self._background = Background(runtime, "lockkit-sql-keepalive", self._work)

    def add(self, claim: Claim, session: Session, owner: str, ttl: Seconds) -> None:
        """Watch a session that is a lock, until `forget`; not one whose ttl is over sooner than it is needed."""
        if ttl <= self._seconds:
            return
        self._held[session] = Held(claim, session, owner)
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError as error:  # no more threads, or the event loop has ended
            log.warning("connections that are silent between renewals may be closed on the way: %s", error)

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
                await self._give_sign(due)
            else:
                await self._background.wait(min(each.used_at for each in held) + pause - now)
