"""
Watches the connections that are locks: notices that the server has closed one, and keeps them from being idle.

Without it the holder learns of an ended session (``pg_terminate_backend``, ``KILL``, a server that stops) by its next
renewal, a third of its ttl later. A server that hangs, or is cut off, closes nothing: for that there is the deadline.

A load balancer or a NAT may close an idle connection, often after a minute, and with it the lock. Renewals are sent
only after a third of the ttl, and with ``renew=False`` never.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lockkit.backends.sql_session.session import Claim, Session
from lockkit.background import Background
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

LOOK_SECONDS = 0.25
"""How often to look for closed connections. Longer tells holders later; shorter wakes an idle holder more often."""

LINGER = 2.0
"""Seconds for which to go on when nothing is held any more. Shorter starts a thread or task more often."""

_CLOSED: int = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The server has closed its side: so an answer that was not read wakes nobody. gevent's poll does not report it."""


@dataclass(eq=False, slots=True)
class Held:
    """
    A session that is a lock.

    Attributes:
        claim: Whose lock it is, as long as that has this session.
        session: It.
        owner: Of the lease.
        ttl: Of the lease, seconds.
        tried_at: When a statement was due last, client monotonic clock.
    """

    claim: Claim
    session: Session
    owner: str
    ttl: Seconds
    tried_at: Instant = 0.0

    @property
    def used_at(self) -> Instant:
        """When its silence began."""
        return max(self.session.sent_at, self.tried_at)


class SessionWatch:
    """The held sessions of one client. Its methods may be called from any thread."""

    def __init__(
        self,
        runtime: Runtime,
        seconds: Seconds,
        ended: Callable[[Session, str], None],
        send: Callable[[Sequence[Held]], Awaitable[None]],
    ) -> None:
        """
        Watch nothing yet.

        Args:
            runtime: The client's.
            seconds: How long a session may be silent.
            ended: Gets a session that the server has closed, and the owner of its lease.
            send: Sends a statement on sessions that have been silent for half of `seconds`.
        """
        self._runtime = runtime
        self._seconds = seconds
        self._ended = ended
        self._send = send
        self._held: dict[Session, Held] = {}
        self._closed = False
        self._background = Background(runtime, "lockkit-sql-watch", self._work)

    def add(self, claim: Claim, session: Session, owner: str, ttl: Seconds) -> None:
        """Watch a session that is a lock, until `forget`."""
        self._held[session] = Held(claim, session, owner, ttl)
        try:
            self._background.start()
        except RuntimeError as error:  # no more threads, or the event loop has ended
            log.warning("ended connections will be noticed by the next renewal only: %s", error)

    def forget(self, session: Session) -> None:
        """Stop watching."""
        self._held.pop(session, None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._closed = True
        self._held.clear()
        self._background.wake()

    async def _work(self) -> None:
        until = self._runtime.now() + LINGER
        while (now := self._runtime.now()) < until and not self._closed:
            self._background.clear()
            held = list(self._held.values())
            if held:
                until = now + LINGER
            for each in _closed(held):
                self.forget(each.session)
                self._ended(each.session, each.owner)
            # Half of the time: the answer, and the others that are due, come in the other half. And not where the ttl
            # ends before the session would be silent for too long.
            due = [each for each in held if each.ttl > self._seconds and each.used_at + self._seconds / 2 <= now]
            for each in due:
                each.tried_at = now
            if due:
                await self._send(due)
            await self._background.wait(LOOK_SECONDS)


def _closed(held: Sequence[Held]) -> list[Held]:
    """Return those whose connections the server has closed."""
    poll = select.poll()
    by_fd = {each.session.connection.fileno(): each for each in held}
    by_fd.pop(-1, None)
    for fd in by_fd:
        poll.register(fd, _CLOSED)
    # A session that was dropped meanwhile has left its number to another file.
    return [by_fd[fd] for fd, events in poll.poll(0) if events & _CLOSED and not by_fd[fd].session.dropped]
