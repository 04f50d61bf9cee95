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

from lockkit.backend import CALL_SECONDS, Grant, Request
from lockkit.engine.lease import BaseLease
from lockkit.engine.local_queue import Place
from lockkit.errors import BackendUnavailable, LockError, LockTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backend import Busy, Holder, LockBackend
    from lockkit.engine.engine import Engine, Spec

__all__ = ["UNDO_SECONDS", "Acquisition", "Outage"]

log = logging.getLogger("lockkit")

L = TypeVar("L", bound=BaseLease)

UNDO_SECONDS = 5.0
"""How long a cancelled or failed acquisition waits for its undoing before that goes on in the background."""

UNDO_SECONDS_MIN = 0.05
"""What the undoing gets when the time of the call is used up. Longer makes the caller wait for a server that hangs;
shorter leaves more to the background though the server would have answered at once."""

ANSWER_GRACE = 0.4
"""How long after the end of a timed wait the last answer may still come, seconds. A call with ``timeout=0`` has no
other time for its one try. Longer and a server that hangs delays the caller more; shorter and one that is only slow, or
far away, is called unavailable."""

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

    __slots__ = (
        "_answer_by",
        "_attempts",
        "_backend",
        "_began",
        "_deadline",
        "_engine",
        "_request",
        "_runtime",
        "_spec",
        "_waiting",
        "_warn_at",
    )

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
        self._answer_by = inf if self._deadline is None else self._deadline + ANSWER_GRACE
        self._warn_at = self._began + spec.ttl
        self._attempts = 0
        self._waiting = False
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
            started = self._began
            if not lines.enter(name, place, wait=self._request.queue):
                if not self._request.queue or not await self._turn(place):
                    self._check_open()
                    raise self._timed_out(None)
                started = self._runtime.now()
            return await self._contend(started)
        finally:
            try:
                lines.leave(name, place)
            except BaseException:
                lines.leave(name, place)  # interrupted halfway; twice does no harm
                raise

    async def _turn(self, place: Place) -> bool:
        """Wait behind others of this client; tell whether it is our turn."""
        self._warn_loop()
        return await self._engine.lines.turn(self._spec.name, place, self._deadline, self._warn_at, self._warn_in_line)

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
        request.answer_by = min(started + CALL_SECONDS, self._answer_by)
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
        if not self._waiting:
            self._waiting = True
            self._before_waiting(outcome)
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
            self._warn_at_backend(now - self._began)
        # Look again a little after the holder's ttl: the server must have seen it run out. Apart from each other,
        # so that the waiters of many clients do not all ask in one instant.
        look = self._spec.ttl if busy.retry_after is None else busy.retry_after + self._jitter(0.001, 0.01)
        until = min(now + look, self._warn_at, inf if self._deadline is None else self._deadline)
        request.answer_by = min(until + CALL_SECONDS, self._answer_by)
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
        If the backend cannot be reached now, the client retries in the background.
        """
        engine, backend, request = self._engine, self._backend, self._request
        if request.state is None and not request.uncertain:
            return
        now = self._runtime.now()
        request.answer_by = min(now + UNDO_SECONDS, max(min(self._answer_by, engine.close_by), now + UNDO_SECONDS_MIN))
        try:
            await self._runtime.settle(backend.abandon(request), request.answer_by - now)
        except BaseException as error:
            log.debug("undoing a request for lock %r: %s", request.name, error)
            # A place in the queue is kept for a ttl beyond the lease of the holder, which mostly has a like ttl.
            seconds = request.ttl * (2.2 if request.queue else 1.1)
            engine.undo_later(seconds, lambda: self._abandon_again(request))
            if not isinstance(error, Exception):
                raise

    async def _abandon_again(self, request: Request) -> None:
        request.answer_by = min(self._runtime.now() + CALL_SECONDS, self._engine.close_by)
        await self._backend.abandon(request)

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
            log.warning("acquiring lock %r: %s; lockkit retries", name, error)
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
        advice = "Wait longer with timeout=, or see who holds it with holders()."
        if busy is not None and (relation := self._relation(busy)):
            holder, advice = f" (held by {relation})", "Pass reentrant=True to lock() to acquire it again in one place."
        message = f"lock {name!r} at {engine.url} is busy{holder}: waited {waited:.3g} s. {advice}"
        return LockTimeout(message, name=name, backend=engine.url)

    # -- warnings of waits that may never end ------------------------------------------------------------------------

    def _relation(self, busy: Busy) -> str:
        """Say who of the caller's own thread holds the lock, if one does."""
        engine = self._engine
        hold = engine.keeper.holds.get(busy.owner or "")
        if hold is None and busy.owner is None:
            hold = next((one for one in engine.keeper.all() if one.grant.name == self._spec.name), None)
        return "" if hold is None else self._runtime.relation(hold.acquired_by)

    def _before_waiting(self, busy: Busy) -> None:
        """
        Warn of a wait for oneself.

        Raises:
            LockError: It could never end: A holds the lock and awaits something. B, a task of the same event loop,
                waits for the lock by blocking their thread: the loop stands still, and A never leaves.
        """
        engine, name, holder = self._engine, self._spec.name, self._relation(busy)
        if holder and self._deadline is None and self._runtime.blocks_event_loop():
            advice = (
                "which would wait for itself. With reentrant=True, here and there, it gets its own lease again."
                if holder.startswith("this same")
                else "which cannot go on while this call blocks their event loop. Use lockkit.aio: it waits without "
                "blocking."
            )
            raise LockError(
                f"lock {name!r} at {engine.url} is held by {holder}, {advice}", name=name, backend=engine.url
            )
        if holder:
            log.warning(
                "waiting for lock %r at %s, which %s holds; pass reentrant=True to lock() to acquire it again",
                name, engine.url, holder,
            )  # fmt: skip
        else:
            self._warn_loop()

    def _warn_loop(self) -> None:
        if self._runtime.blocks_event_loop():
            log.warning(
                "waiting for lock %r at %s in a thread that runs an event loop: nothing else runs in that loop until "
                "the lock is free; use lockkit.aio in coroutines", self._spec.name, self._engine.url,
            )  # fmt: skip

    def _warn_in_line(self) -> None:
        self._warn_at = inf
        log.warning(
            "waiting for lock %r at %s for more than %g s, behind other waiters of this same client",
            self._spec.name, self._engine.url, self._spec.ttl,
        )  # fmt: skip

    def _warn_at_backend(self, waited: float) -> None:
        """In the background: a backend that hangs must not make the wait longer than its timeout."""
        try:
            self._runtime.spawn("lockkit-holders", lambda: self._warn_of_holders(waited))
        except RuntimeError as error:
            log.debug("asking for the holders of lock %r: %s", self._spec.name, error)

    async def _warn_of_holders(self, waited: float) -> None:
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
