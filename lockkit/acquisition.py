"""
One acquisition: in line, at the backend, waiting, through outages, to the lease or to the error.

::

    Lines.enter ── head? ──> try_acquire ──> Grant ──> lease
                                 │  ^
                                 │  └── woken, or the holder's ttl has run out
                                 ├──> Busy ──> wait ──┘
                                 └──> no answer ──> abandon by owner ──> back off ──> a new request, a new owner

Whatever ends it early (timeout, Ctrl-C, cancellation, an outage) leaves nothing behind: the request is abandoned.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from lockkit.backend import Grant, Request
from lockkit.errors import BackendUnavailable, LockError, LockTimeout
from lockkit.lease import BaseLease
from lockkit.line import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backend import Busy, Holder, LockBackend
    from lockkit.engine import Engine, Spec

__all__ = ["UNDO_SECONDS", "Acquisition", "Outage"]

log = logging.getLogger("lockkit")

L = TypeVar("L", bound=BaseLease)

UNDO_SECONDS = 5.0
"""How long a cancelled or failed acquisition waits for its undoing before that goes on in the background."""

OUTAGE_PAUSE_MAX = 1.0
"""Longest pause between tries while the backend is away, seconds. Longer notices its return later."""

POLL_PAUSE_MAX = 0.25
"""Longest pause between looks where nobody wakes us, seconds. Longer hands over later, shorter asks more often."""


class Outage:
    """
    What a client knows of its backend's last answers; shared by its acquisitions.

    Attributes:
        answered_at: Before the last request that was answered, client monotonic clock.
        error: Of the last request, if it was not answered.
    """

    __slots__ = ("answered_at", "error")

    def __init__(self) -> None:
        """Know nothing yet."""
        self.answered_at = -inf
        self.error: BackendUnavailable | None = None


class Acquisition(Generic[L]):
    """The state of one call of ``acquire``. Times are the client's monotonic clock."""

    __slots__ = ("_attempts", "_backend", "_began", "_deadline", "_engine", "_request", "_runtime", "_spec", "_warn_at")

    def __init__(self, engine: Engine[L], backend: LockBackend, spec: Spec, timeout: float | None) -> None:
        """
        Start the clock.

        Args:
            engine: The client's.
            backend: To ask.
            spec: What to acquire.
            timeout: Seconds to wait, None without limit, 0 to try once.
        """
        self._engine = engine
        self._runtime = engine.runtime
        self._backend = backend
        self._spec = spec
        self._began = self._runtime.now()
        self._deadline = None if timeout is None else self._began + timeout
        self._warn_at = self._began + spec.ttl
        self._attempts = 0
        self._request = self._new_request()

    async def run(self) -> L:
        """
        Acquire.

        Raises:
            LockTimeout: Somebody held the lock for the whole wait.
            BackendUnavailable: No answer to the end of the wait.
            LockError: The client was closed.
        """
        lines, name, place = self._engine.lines, self._spec.name, Place()
        try:
            turn = lines.enter(name, place, wait=self._request.queue)
            started = self._began
            if turn is not None:
                await lines.turn(name, place, turn, self._deadline, self._warn_at, self._warn_in_line)
                started = self._runtime.now()
            if not place.at_head:
                self._check_open()
                raise self._timed_out(None)
            return await self._contend(started)
        finally:
            if place.at_head:
                lines.leave(name)

    async def _contend(self, started: float) -> L:
        """Ask the backend until it grants, as the only contender of this client for that name."""
        while True:
            self._attempts += 1
            try:
                lease = await self._ask(started)
            except BackendUnavailable as error:
                await self._undo()
                await self._back_off(error)
                self._request = self._new_request()
            except BaseException:
                await self._undo()
                raise
            else:
                if lease is not None:
                    return lease
            started = self._runtime.now()

    async def _ask(self, started: float) -> L | None:
        """Ask once, and wait if the answer is "busy". None: ask again."""
        request = self._request
        # Until we know better: an interrupt or a cancellation from here on finds a request that must be undone.
        request.uncertain = True
        outcome = await self._backend.try_acquire(request)
        self._engine.outage.answered_at = started
        self._engine.outage.error = None
        if isinstance(outcome, Grant):
            lease = self._engine.admit(self._spec, outcome, started)
            if lease is None:
                # The answer took longer than the lease is worth. Never return it.
                await self._undo()
                if self._out_of_time:
                    raise self._too_late()
                self._request = self._new_request()
            return lease
        request.uncertain = False
        if self._out_of_time:
            raise self._timed_out(outcome)
        await self._wait(outcome)
        return None

    def _new_request(self) -> Request:
        # A fresh owner for each. Never a host, process or thread id: two workers of one host would own each other's
        # lock; never that of a request whose answer was lost: its lease must not be handed out later.
        spec, runtime = self._spec, self._runtime
        queue = self._deadline != self._began
        return Request(spec.name, runtime.owner(), spec.ttl, spec.metadata, queue=queue, runtime=runtime)

    async def _wait(self, busy: Busy) -> None:
        """Sleep until it is worth asking again."""
        engine, request = self._engine, self._request
        now = self._runtime.now()
        if now >= self._warn_at:
            self._warn_at = inf
            await self._warn_at_backend(now - self._began)
        # Look again a little after the holder's ttl: the server must have seen it run out. Apart from each other,
        # so that the waiters of many clients do not all ask in one instant.
        look = self._spec.ttl if busy.retry_after is None else busy.retry_after + self._jitter(0.001, 0.01)
        until = min(now + look, self._warn_at, inf if self._deadline is None else self._deadline)
        engine.waiting.add(request)
        try:
            self._check_open()  # after the add: close() wakes what is in `waiting`
            if busy.poll or engine.capabilities.wakeup == "poll":
                pause = min(self._pause(POLL_PAUSE_MAX), until - now)
                await request.wake.wait(max(0.0, pause))
            else:
                await self._backend.wait(request, busy, until)
        finally:
            engine.waiting.discard(request)
        self._check_open()

    async def _undo(self) -> None:
        """
        Leave nothing of the request at the backend.

        If it was granted and the answer was lost, it would block everybody, us too, for its ttl.
        If the backend cannot be reached now it is tried on in the background until the ttl has done the same.
        """
        backend, request = self._backend, self._request
        if request.place is None and not request.uncertain:
            return
        try:
            await self._runtime.settle(backend.abandon(request), UNDO_SECONDS)
        except BaseException as error:
            log.debug("undoing a request for lock %r: %s", request.name, error)
            self._engine.undo_later(request.ttl * 1.1, lambda: backend.abandon(request))
            if not isinstance(error, Exception):
                raise

    async def _back_off(self, error: BackendUnavailable) -> None:
        """Pause after a failure, or raise it if the wait is over."""
        engine, name = self._engine, self._spec.name
        engine.outage.error = error
        now = self._runtime.now()
        if self._deadline is None:
            # From our own start or the last answer to anybody: waiters in line do not each wait anew.
            over = now - max(self._began, engine.outage.answered_at) >= engine.unavailable_after
        else:
            over = now >= self._deadline
        if over:
            raise engine.unavailable(error, f"acquire lock {name!r}", name)
        if self._attempts == 1:
            log.warning("acquiring lock %r: %s; trying on", name, error)
        pause = self._pause(OUTAGE_PAUSE_MAX)
        await self._runtime.sleep(pause if self._deadline is None else min(pause, self._deadline - now))
        self._check_open()

    def _pause(self, longest: float) -> float:
        """Jittered exponential back-off, seconds: half to all of ``min(longest, 0.01 * 2 ** attempts)``."""
        return min(longest, 0.01 * 2.0 ** min(self._attempts, 20)) * self._jitter(0.5, 1.0)

    def _jitter(self, low: float, high: float) -> float:
        return self._runtime.random.uniform(low, high)

    def _check_open(self) -> None:
        if self._engine.closed:
            raise self._engine.closed_error()

    @property
    def _out_of_time(self) -> bool:
        return self._deadline is not None and self._runtime.now() >= self._deadline

    def _too_late(self) -> LockError:
        engine, name = self._engine, self._spec.name
        message = (
            f"lock {name!r} at {engine.url} was granted and given back: the answer took longer than its ttl of "
            f"{self._spec.ttl:g} s. Acquire with a longer ttl."
        )
        return LockTimeout(message, name=name, backend=engine.url)

    def _timed_out(self, busy: Busy | None) -> LockError:
        engine, name = self._engine, self._spec.name
        if busy is None and engine.outage.error is not None:
            return engine.unavailable(engine.outage.error, f"acquire lock {name!r}", name)
        waited = self._runtime.now() - self._began
        holder = f" (held by owner {busy.owner})" if busy is not None and busy.owner else ""
        message = (
            f"lock {name!r} at {engine.url} is busy{holder}: waited {waited:.3g} s. "
            "Wait longer with timeout=, or see who holds it with holders()."
        )
        return LockTimeout(message, name=name, backend=engine.url)

    # -- the one warning of a wait that is longer than the ttl -------------------------------------------------------

    def _warn_in_line(self) -> None:
        self._warn_at = inf
        log.warning(
            "waiting for lock %r at %s for more than %g s, behind other waiters of this same client",
            self._spec.name, self._engine.url, self._spec.ttl,
        )  # fmt: skip

    async def _warn_at_backend(self, waited: float) -> None:
        name = self._spec.name
        try:
            holders: Sequence[Holder] = await self._backend.holders(name)
        except LockError as error:
            log.debug("asking for the holders of lock %r: %s", name, error)
            holders = ()
        who = ", ".join(self._describe(holder) for holder in holders) or "unknown"
        log.warning(
            "waiting for lock %r at %s for %.1f s, longer than its ttl; holder: %s", name, self._engine.url, waited, who
        )

    def _describe(self, holder: Holder) -> str:
        about = " ".join(f"{key}={value}" for key, value in holder.metadata.items())
        mine = " (this same client)" if holder.owner in self._engine.keeper.holds else ""
        return f"owner {holder.owner}{mine} {about}".rstrip()
