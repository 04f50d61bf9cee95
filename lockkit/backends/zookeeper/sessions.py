"""
The sessions of one client: which lease lies in which, how many there are, and their end.

A session has one timeout, so a lease lies in one whose timeout is its ttl, rounded up to the next of a ladder: else a
program that computes its ttls would have a session, a connection and three threads for each. By default ZooKeeper takes
60 connections from one host (``maxClientCnxns``), those of other programs among them.
"""

from __future__ import annotations

import logging
from math import floor, inf, log10
from typing import TYPE_CHECKING, Any

from lockkit.backend import CALL_SECONDS
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, can_wait
from lockkit.backends.zookeeper.session import MILLISECOND, Held, Session
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.backend import Host

__all__ = ["ASKING_TTL", "SESSIONS_MAX", "Sessions", "session_timeout"]

log = logging.getLogger("lockkit")

LADDER = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Session timeouts, and these times 10, 100, …. Coarser keeps the lock of a dead holder longer, a third of its ttl at
most; finer needs more sessions: an ensemble that takes timeouts from 4 s to 40 s, as it does by default, has 11."""

SESSIONS_MAX = 12
"""Sessions in use of one client. More are connections that other programs of the host may lack; with fewer a lease lies
sooner in a session whose timeout is further from its ttl."""

TIMEOUT_MAX = 2_000_000.0
"""Longest timeout to ask for, seconds: ZooKeeper counts milliseconds in 32 bits."""

ASKING_TTL = 30.0
"""Session timeout, seconds, of a client that asks something before it has locked anything."""

IDLE_SECONDS = 60.0
"""After how long without use a session is ended when another one begins. Shorter connects more often, longer keeps
connections that nobody needs."""

END_SECONDS = 0.25
"""For ending sessions in which nothing is held, when a client is closed. Longer delays ``close()`` when the server does
not answer; then they end by their timeout."""

END_PAUSE = 0.05
"""Between two looks for a connection over which a session can be ended, seconds."""


def session_timeout(ttl: float) -> float:
    """Give the timeout of the session for a ttl: not shorter, and at most a third longer."""
    scale = 10.0 ** floor(log10(ttl))
    found = next((step * scale for step in LADDER if ttl <= step * scale + MILLISECOND), 10.0 * scale)
    return min(round(found, 3), TIMEOUT_MAX)


class Sessions:
    """Those of one client, or the one of an application's."""

    def __init__(self, host: Host, url: str, label: str) -> None:
        """
        Have none yet.

        Args:
            host: The engine's side.
            url: For messages.
            label: The servers, for messages.
        """
        self._host = host
        self._runtime = host.runtime
        self._url = url
        self._label = label
        self._mutex = host.runtime.mutex()
        self._arguments: Mapping[str, Any] = {}
        self._own: list[Session] = []
        self._adopted: Session | None = None
        self._warned: set[float] = set()

    def use(self, arguments: Mapping[str, Any]) -> None:
        """
        Make sessions with these arguments of kazoo's client. Nothing is sent.

        Raises:
            TypeError: kazoo does not take one of them.
            ValueError: As before.
        """
        self._arguments = arguments
        self._open(ASKING_TTL)

    def adopt(self, client: Any, arguments: Mapping[str, Any]) -> None:  # noqa: ANN401 - kazoo has no types
        """Use the session of an application's client for everything."""
        self._arguments = arguments
        self._adopted = Session.adopted(self._host, self._label, client)

    def _open(self, seconds: float) -> Session:
        return Session.opened(self._host, self._label, self._arguments, seconds)

    def all(self) -> list[Session]:
        """Give those that there are."""
        return [*self._own] if self._adopted is None else [self._adopted]

    def is_own(self, session: Session) -> bool:
        """Tell whether it ends with this client."""
        return session is not self._adopted

    def holding(self, owner: str) -> Held | None:
        """Give what an owner holds."""
        return next((session.held[owner] for session in self.all() if owner in session.held), None)

    # -- choosing --------------------------------------------------------------------------------------------------

    async def get(self, ttl: float, until: float) -> Session:
        """Give the session for a ttl, connected. Raises as `Session.connected`."""
        if self._adopted is not None:
            return await self.ready(self._adopted, until)
        with self._mutex:
            session, idle = self._choose(session_timeout(ttl))
        for one in idle:
            one.end_soon()
        return await self.ready(session, until)

    async def any(self, until: float) -> Session:
        """Give a session for a question, connected: one that is there, if possible."""
        alive = [session for session in self.all() if not session.failed]
        if not alive:
            return await self.get(ASKING_TTL, until)
        return await self.ready(next((one for one in alive if one.usable), alive[0]), until)

    def _choose(self, timeout: float) -> tuple[Session, list[Session]]:
        """Give the session for a timeout, and those that have to end. Under the mutex."""
        alive = [session for session in self._own if not session.failed]
        for session in alive:
            if session.keeps(timeout):
                session.used_at = self._runtime.now()
                return session, []
        # At the limit also what was used a moment ago, but by no call that may still be under way.
        patience = IDLE_SECONDS if len(alive) < SESSIONS_MAX else min(IDLE_SECONDS, CALL_SECONDS)
        unused_since = self._runtime.now() - patience
        idle = [session for session in alive if session.used_at < unused_since and not session.in_use]
        kept = [session for session in alive if session not in idle]
        if len(kept) >= SESSIONS_MAX:
            longer = [session for session in kept if session.asked >= timeout]
            session = min(longer, key=_asked) if longer else max(kept, key=_asked)
        else:
            session = self._open(timeout)
            kept.append(session)
        self._own = [*kept, *(one for one in self._own if one.failed and not one.over)]
        return session, idle

    async def ready(self, session: Session, until: float, *, patient: bool = False) -> Session:
        """Have a session connected, and its timeout known. Raises as `Session.connected`."""
        session.used_at = self._runtime.now()
        if not session.usable:
            await session.connected(until, patient=patient)
        if not session.seconds:
            await self._learn_seconds(session, until)
        return session

    async def _learn_seconds(self, session: Session, until: float) -> None:
        """Find out the timeout of an application's session: kazoo does not tell, so ask for the same once more."""
        asked = session.client._session_timeout / 1000  # noqa: SLF001 - kazoo has no public name for its own argument
        probe = self._open(asked)
        try:
            await probe.connected(until)
            session.learn_seconds(probe.seconds)
        finally:
            probe.end_soon()

    def granted_ttl(self, session: Session, ttl: float) -> float:
        """Give the ttl that the session can keep; warn once where it is far from the one asked for."""
        seconds = session.seconds
        if seconds < ttl - MILLISECOND:
            self._warn(
                ttl,
                f"{self._url} keeps a session for {seconds:g} s, so leases have a ttl of {seconds:g} s and not of "
                f"{ttl:g} s: ask for less, or {self._advice(session, 'longer')}",
            )
        elif seconds > session_timeout(ttl) + MILLISECOND:
            self._warn(
                ttl,
                f"{self._url} keeps a session for {seconds:g} s: when a holder dies, its lock is free after that, and "
                f"not after {ttl:g} s; ask for more, or {self._advice(session, 'shorter')}",
            )
        return min(ttl, seconds)

    def _warn(self, ttl: float, message: str) -> None:
        timeout = session_timeout(ttl)
        if timeout not in self._warned:
            self._warned.add(timeout)
            log.warning("%s", message)

    def _advice(self, session: Session, wanted: str) -> str:
        if session is self._adopted:
            return f"start the KazooClient with a {wanted} timeout"
        if abs(session.seconds - session.asked) <= MILLISECOND:
            return f"use fewer different ttls: this client has {SESSIONS_MAX} sessions, and all are in use"
        return "raise maxSessionTimeout there" if wanted == "longer" else "lower minSessionTimeout there"

    # -- ending ----------------------------------------------------------------------------------------------------

    async def end(self, sessions: Sequence[Session], until: float) -> None:
        """
        End sessions of ours at the server, which frees all that they hold in one step for each.

        A member that does not answer is left, and another one asked. What is not ended by then ends after its timeout:
        nobody keeps it alive any more.

        Raises:
            BackendUnavailable: Some could not be ended.
        """
        left = [session for session in sessions if session.begin_to_end()]
        problem: LockError | None = None
        while left:
            asked = [(session, session.ask_to_end()) for session in left if session.usable]
            answer_by = min(until, self._runtime.now() + ANSWER_SECONDS)
            for session, result in asked:
                try:
                    await session.answer(result, answer_by)
                    left.remove(session)
                except LockError as error:
                    problem = error
            left = [session for session in left if session.id]
            pause = min(END_PAUSE, until - self._runtime.now())
            if pause <= 0 or not (asked or can_wait(self._runtime)):
                break
            if left and not asked:
                await self._runtime.sleep(pause)
        for session in sessions:
            session.stop()
        if left:
            message = f"{len(left)} sessions at {self._label} could not be ended: {problem or 'no connection'}"
            raise BackendUnavailable(message) from problem

    def let_go(self) -> None:
        """Have no more to do with the application's session."""
        if self._adopted is not None:
            self._adopted.begin_to_end()

    async def close(self) -> None:
        """End what is ours."""
        with self._mutex:
            own, self._own = self._own, []
        try:
            await self.end(own, self._runtime.now() + END_SECONDS)
        except BackendUnavailable as error:
            log.debug("closing a client: %s", error)


def _asked(session: Session) -> float:
    return session.asked or inf
