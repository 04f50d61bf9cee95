"""
Keeps the leases of one client alive, and tells when one is lost.

Two coroutines per client, whatever the number of leases, each started when first needed and ended when idle:

- the **watch** sleeps until the next deadline or renewal is due. It does no I/O, so a renewal that hangs cannot keep it
  from marking a lease lost at its deadline (design rule 6).
- the **renewer** sends the renewals that are due, in one batch.

They share the engine's mutex; nothing is awaited, started or logged while it is held.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

from lockkit.backend import Gone, Renewed, Unknown
from lockkit.background import Background
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from lockkit.backend import LockBackend, LossReason, Renewal
    from lockkit.engine.lease import Hold
    from lockkit.runtime import Event, Runtime, Work

__all__ = ["Keeper", "Notes"]

log = logging.getLogger("lockkit")

LINGER = 10.0
"""Seconds that an idle watch or renewer stays. Shorter starts threads more often; longer keeps a dropped client."""

BATCH_SHARE = 1 / 30
"""Renewals due within this share of their ttl go along. Larger batches more and renews earlier than needed."""

RETRY_START = 0.1
"""When to try again to start the renewer that could not be started (no more threads), seconds."""

Notes = list[tuple[int, str, tuple[object, ...]]]
"""What is to be logged once the mutex is free, as arguments of ``Logger.log``: a handler may block, or use a lock of
this same client."""


class Keeper:
    """Deadlines and renewals of all leases of one client."""

    def __init__(
        self,
        runtime: Runtime,
        mutex: AbstractContextManager[Any],
        backend: Callable[[], LockBackend | None],
        lose: Callable[[Hold, LossReason], None],
        loop_ended: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """
        Start nothing yet.

        Args:
            runtime: Clock, waiting and background work.
            mutex: The engine's.
            backend: Gives the backend in use, or None once the client is closed.
            lose: Marks a lease as lost and tells its holder. Called without the mutex.
            loop_ended: Run when an event loop ends under us and nothing but background work is left in it.
        """
        self._runtime = runtime
        self._backend = backend
        self._lose = lose
        self._watching = Background(runtime, "lockkit-watch", self._watch, loop_ended)
        self._renewing = Background(runtime, "lockkit-renew", self._renew, _nothing)
        self.forked(mutex)

    def forked(self, mutex: AbstractContextManager[Any]) -> None:
        """Forget leases and threads: they are the parent's."""
        self._mutex = mutex
        self.holds: dict[str, Hold] = {}
        self._wake_at = inf
        self._due: list[Hold] = []
        self._last_work: tuple[Work, Event] | None = None
        self._watching.forked()
        self._renewing.forked()

    # -- called by the engine, under the mutex ---------------------------------------------------------------------

    def add(self, hold: Hold) -> None:
        """Watch over a lease from now on; `start` after the mutex."""
        self.reschedule(hold)
        self.holds[hold.grant.owner] = hold

    def reschedule(self, hold: Hold) -> None:
        """See that the watch is awake in time for this lease."""
        at = min(hold.renew_at, hold.valid_until)
        # In a row of short leases the later ones are due later than the first: no thread is woken for them.
        if at < self._wake_at:
            self._wake_at = at
            self._watching.wake()

    # -- called by the engine, without the mutex -------------------------------------------------------------------

    def start(self) -> None:
        """
        See that the watch runs.

        Raises:
            RuntimeError: It cannot be started.
        """
        if not self._watching.running:
            self._watching.start()

    def forget(self, hold: Hold) -> None:
        """Stop watching. With or without the mutex (a dict operation is atomic): ``__del__`` may run anywhere."""
        self.holds.pop(hold.grant.owner, None)

    def all(self) -> tuple[Hold, ...]:
        """Give all leases. A copy, made in one step: ``__del__`` forgets leases in any thread, at any time."""
        return tuple(self.holds.values())

    def stop(self) -> None:
        """Let both coroutines end: the client is closed."""
        self._watching.wake()
        self._renewing.wake()

    def hand_over(self, work: Work) -> Event | None:
        """
        Have the watch run this, in its own thread; gives the event that tells that it is done, or None if none runs.

        While the interpreter exits no thread can be started (Python 3.12 and later), but those that run go on.
        """
        if not self._watching.running:
            return None
        done = self._runtime.event()
        self._last_work = work, done
        self._watching.wake()
        return done

    # -- the watch -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        idle_since: float | None = None
        while True:
            self._watching.clear()
            if self._last_work is not None:
                await self._do_last_work(*self._last_work)
            with self._mutex:
                now = self._runtime.now()
                expired, due, at = self._survey(now)
                self._due.extend(due)
                if self.holds:
                    idle_since = None
                elif self._backend() is None or (idle_since is not None and now >= idle_since + LINGER):
                    self._wake_at = inf
                    return
                elif idle_since is None:
                    idle_since = now
                if at == inf:
                    at = now + LINGER
                self._wake_at = at
            for hold in expired:
                self._lose(hold, "expired")
            if self._due and not self._start_renewer():
                at = min(at, now + RETRY_START)
            await self._watching.wait(at - self._runtime.now())

    async def _do_last_work(self, work: Work, done: Event) -> None:
        self._last_work = None
        try:
            await work()
        finally:
            done.set()

    def _survey(self, now: float) -> tuple[list[Hold], list[Hold], float]:
        """Find what has expired, what is to be renewed (marked as in flight), and when to look again."""
        expired: list[Hold] = []
        due: list[Hold] = []
        look_again = inf
        for hold in self.all():
            at = hold.valid_until
            if at <= now:
                expired.append(hold)
                continue
            if hold.renew_at < at and not hold.in_flight:
                if hold.renew_at <= now + hold.grant.ttl * BATCH_SHARE:
                    hold.in_flight = True
                    due.append(hold)
                else:
                    at = hold.renew_at
            look_again = min(look_again, at)
        return expired, due, look_again

    # -- the renewer -----------------------------------------------------------------------------------------------

    def _start_renewer(self) -> bool:
        """See that the renewer runs; False if it cannot be started now."""
        self._renewing.wake()
        try:
            self._renewing.start()
        except RuntimeError as error:  # no more threads, perhaps for a moment: the leases are in jeopardy
            log.warning("could not start the renewer, %d renewals are due; lockkit retries: %s", len(self._due), error)
            return False
        return True

    async def _renew(self) -> None:
        idle_since = self._runtime.now()
        while True:
            self._renewing.clear()
            with self._mutex:
                now = self._runtime.now()
                due, self._due = self._due, []
                backend = self._backend()
                if not due and (backend is None or now >= idle_since + LINGER):
                    return
            if due:
                idle_since = now
                if batch := [hold for hold in due if self._is_due(hold, now)]:
                    await self._renew_batch(backend, batch)
            else:
                await self._renewing.wait(idle_since + LINGER - self._runtime.now())

    def _is_due(self, hold: Hold, now: float) -> bool:
        """Tell whether it is still to be renewed: it may have been released, or held for long enough, while we hung."""
        if hold.finished:
            return False
        if now > hold.renew_until:
            with self._mutex:
                hold.renew_at = inf
                hold.in_flight = False
                self.reschedule(hold)
                if hold.settled is not None:
                    hold.settled.set()
            return False
        return True

    async def _renew_batch(self, backend: LockBackend | None, batch: list[Hold]) -> None:
        """One renewal of each; the answers change deadlines, or mark leases as lost."""
        started = self._runtime.now()
        outcomes: Sequence[Renewal] = [Unknown(InterruptedError("cut short"))] * len(batch)
        try:
            outcomes = await self._ask(backend, batch)
        finally:
            # Also when this coroutine is cancelled: a lease that stays in flight would never be renewed again.
            self._apply(batch, outcomes, started)

    async def _ask(self, backend: LockBackend | None, batch: list[Hold]) -> Sequence[Renewal]:
        try:
            if backend is None:
                raise BackendUnavailable("the client is closed")  # noqa: TRY301 - goes to the log only
            outcomes = await backend.renew([hold.grant for hold in batch])
            if len(outcomes) != len(batch):
                message = f"{type(backend).__name__}.renew gave {len(outcomes)} outcomes for {len(batch)} grants"
                raise RuntimeError(message)  # noqa: TRY301 - a backend's bug counts as no answer, and is logged
        except Exception as error:  # noqa: BLE001 - whatever it was: retry until the deadline
            return [Unknown(error)] * len(batch)
        return outcomes

    def _apply(self, batch: list[Hold], outcomes: Sequence[Renewal], started: float) -> None:
        gone: list[tuple[Hold, LossReason]] = []
        notes: Notes = []
        with self._mutex:
            for hold, outcome in zip(batch, outcomes, strict=True):
                self._settle(hold, outcome, started, gone, notes)
        for note in notes:
            log.log(note[0], note[1], *note[2])
        for hold, reason in gone:
            self._lose(hold, reason)

    def _settle(
        self, hold: Hold, outcome: Renewal, started: float, gone: list[tuple[Hold, LossReason]], notes: Notes
    ) -> None:
        hold.in_flight = False
        if isinstance(outcome, Unknown):
            hold.doubt(hold.grant.ttl, started)
        if hold.settled is not None:
            hold.settled.set()
        if hold.finished or hold.lost_reason is not None:
            return  # lost is final, also when a late answer says otherwise
        if self._runtime.now() >= hold.valid_until:
            gone.append((hold, "expired"))  # so is the deadline, should the watch not have run yet (a pause)
            return
        if isinstance(outcome, Gone):
            gone.append((hold, outcome.reason))
            return
        if isinstance(outcome, Renewed):
            renewed(hold, outcome, started, notes)
        else:
            self._jeopardy(hold, outcome.error, notes)
        self.reschedule(hold)

    def _jeopardy(self, hold: Hold, error: BaseException, notes: Notes) -> None:
        """Plan the next try after a renewal without an answer, and say so once."""
        now = self._runtime.now()
        left = hold.valid_until - now
        # Several more tries before the deadline, spread so that the clients of a server that comes back do not all
        # call in the same instant. At least 5 ms: a dead port answers at once and would be asked in a busy loop.
        pause = max(0.005, min(hold.grant.ttl / 10, left / 3)) * self._runtime.random.uniform(0.8, 1.2)
        hold.renew_in_time(now + pause)
        if not hold.in_jeopardy:
            hold.in_jeopardy = True
            text = "renewal of lock %r (token %d) failed, %.3f s to its deadline; lockkit retries: %s"
            notes.append((logging.WARNING, text, (hold.grant.name, hold.grant.token, max(0.0, left), error)))


def renewed(hold: Hold, outcome: Renewed, started: float, notes: Notes) -> None:
    """Move the deadline after an answer that the lock is still ours. Under the engine's mutex."""
    if outcome.ttl is not None:
        hold.grant.ttl = outcome.ttl
    anchor = started if outcome.anchor is None else outcome.anchor
    hold.believe(anchor, hold.grant.ttl)
    if hold.in_jeopardy:
        hold.in_jeopardy = False
        notes.append((logging.INFO, "lock %r (token %d) is renewed again", (hold.grant.name, hold.grant.token)))


async def _nothing() -> None:
    """What the renewer does when its event loop ends: nothing is left to renew."""
