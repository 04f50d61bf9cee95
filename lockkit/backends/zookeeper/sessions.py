"""
The sessions of one client: which lease belongs to which, how many there are, and their end.

A session has one timeout, so a lease belongs to one whose timeout is its ttl, rounded up to the next step of a ladder.
Without steps, a program that computes its ttls would have a session, a connection and a thread for each. By
default ZooKeeper takes 60 connections from one host (``maxClientCnxns``), including those of other programs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import floor, log10
from operator import attrgetter
from typing import Any

from lockkit.backend import CALL_SECONDS, Host, unsent
from lockkit.backends.zookeeper.nodes import LockNode
from lockkit.backends.zookeeper.session import END, MILLISECOND, Session
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

LADDER_SECONDS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Session timeouts, and these times 10, 100, …. Coarser keeps a dead holder's lock longer (now at most a third of its
ttl); finer needs more sessions. An ensemble with the default limits, 4 s to 40 s, needs 11."""

SESSIONS_MAX = 12
"""Sessions in use of one client. More take connections that other programs of the host may need; with fewer a lease
sooner gets a session whose timeout is further from its ttl."""

SECONDS_MAX = 2_000_000.0
"""Longest session timeout to ask for: ZooKeeper counts milliseconds in 32 bits."""

DEFAULT_SECONDS = 30.0
"""Session timeout of a client that sends another request before it has locked anything."""

IDLE_SECONDS = 60.0
"""After how long without use a session is ended when another one begins. Shorter connects more often; longer keeps
unused connections."""

END_SECONDS = 0.25
"""For ending sessions in which nothing is held, when a client is closed. Longer delays ``close()`` when the server does
not answer; then they end after their timeout."""


@lru_cache(maxsize=256)
def session_timeout(ttl: Seconds) -> float:
    """Give the timeout of the session for a ttl: not shorter, and at most a third longer."""
    scale = 10.0 ** floor(log10(ttl))
    found = next((step * scale for step in LADDER_SECONDS if ttl <= step * scale + MILLISECOND), 10.0 * scale)
    return min(round(found, 3), SECONDS_MAX)


class Sessions:
    """The sessions of one client."""

    def __init__(self, host: Host, url: str, arguments: Mapping[str, Any]) -> None:
        """Begin sessions that connect with these arguments. Nothing is sent."""
        self._host = host
        self._runtime = host.runtime
        self._url = url
        self._arguments = arguments
        self._mutex = host.runtime.mutex()
        self._own: list[Session] = []
        self._warned: set[float] = set()

    def all(self) -> list[Session]:
        """Give the present sessions."""
        return [*self._own]

    def holding(self, owner: str) -> LockNode | None:
        """Give the node with which an owner holds a lock."""
        return next((session.held[owner] for session in self.all() if owner in session.held), None)

    # -- choosing --------------------------------------------------------------------------------------------------

    async def get(self, ttl: Seconds, until: Instant) -> Session:
        """Give the session for a ttl, connected. Raises as `Session.connected`."""
        with self._mutex:
            session, idle = self._choose(session_timeout(ttl))
        for one in idle:
            one.end_soon()
        await session.connected(until)
        return session

    async def any(self, until: Instant) -> Session:
        """Give any session, connected: a present one, if possible. Raises as `Session.connected`."""
        alive = [session for session in self.all() if not session.failed]
        if not alive:
            return await self.get(DEFAULT_SECONDS, until)
        session = next((one for one in alive if one.usable), alive[0])
        await session.connected(until)
        return session

    def _choose(self, seconds: float) -> tuple[Session, list[Session]]:
        """Give the session for a session timeout, and those that have to end. Under the mutex."""
        alive = [session for session in self._own if not session.failed]
        for session in alive:
            if session.requested_seconds == seconds:
                session.used_at = self._runtime.now()  # before another one looks for those that are idle
                return session, []
        # At the limit a shorter time without use is enough, but longer than a call that may still be under way.
        idle_seconds = IDLE_SECONDS if len(alive) < SESSIONS_MAX else min(IDLE_SECONDS, CALL_SECONDS)
        unused_since = self._runtime.now() - idle_seconds
        idle = [session for session in alive if session.used_at < unused_since and not session.in_use]
        kept = [session for session in alive if session not in idle]
        if len(kept) >= SESSIONS_MAX:
            longer = [session for session in kept if session.requested_seconds >= seconds]
            by_timeout = attrgetter("requested_seconds")
            session = min(longer, key=by_timeout) if longer else max(kept, key=by_timeout)
        else:
            session = Session(self._host, self._arguments, seconds)
            kept.append(session)
        self._own = [*kept, *(one for one in self._own if one.failed and not one.ended)]
        return session, idle

    def granted_ttl(self, session: Session, ttl: Seconds) -> Seconds:
        """Give the ttl that the session can keep; warn once if that is far from the one asked for."""
        seconds, timeout = session.granted_seconds, session_timeout(ttl)
        if seconds < ttl - MILLISECOND:
            message, wanted = (
                f"so leases have a ttl of {seconds:g} s and not of {ttl:g} s: ask for less, or",
                "raise max",
            )
        elif seconds > timeout + MILLISECOND:
            message = f"when a holder dies, its lock is free after that, and not after {ttl:g} s; ask for more, or"
            wanted = "lower min"
        else:
            return ttl
        if timeout not in self._warned:
            self._warned.add(timeout)
            advice = f"{wanted}SessionTimeout there"
            if abs(seconds - session.requested_seconds) <= MILLISECOND:
                advice = f"use fewer different ttls: this client has {SESSIONS_MAX} sessions, and all are in use"
            log.warning("%s keeps a session for %g s: %s %s", self._url, seconds, message, advice)
        return min(ttl, seconds)

    # -- ending ----------------------------------------------------------------------------------------------------

    async def end(self, sessions: Collection[Session], until: Instant) -> None:
        """
        End sessions at the server, which frees all that they hold in one step for each.

        A session that is not ended by then ends after its timeout: nothing keeps it alive any more.
        """
        problem: LockError = unsent("no connection")
        closing = [session for session in sessions if session.close()]
        for session, sent in [(session, session.send(END)[0]) for session in closing if session.usable]:
            try:
                await session.answer(sent, until)
            except LockError as error:
                problem = error
        for session in sessions:
            session.stop()
        if left := [session for session in closing if session.id]:
            raise BackendUnavailable(f"{len(left)} sessions at {self._url} could not be ended: {problem}") from problem

    async def close(self) -> None:
        """End all sessions."""
        with self._mutex:
            own, self._own = self._own, []
        try:
            await self.end(own, self._runtime.now() + END_SECONDS)
        except BackendUnavailable as error:
            log.debug("closing a client: %s", error)
