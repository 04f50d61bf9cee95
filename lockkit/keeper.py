"""
Keeps the leases of one client alive, and tells when one is lost.

Two coroutines per client, whatever the number of leases, each started when first needed and ended when idle:

- the **watch** sleeps until the next deadline or renewal is due. It does no I/O, so a renewal that hangs cannot keep it
  from marking a lease lost at its deadline (design rule 6).
- the **renewer** sends the renewals that are due, in one batch.

They share the engine's mutex; nothing is awaited while it is held.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

from lockkit.backend import Gone, Renewed, Unknown
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from lockkit.backend import LockBackend, LossReason, Renewal
    from lockkit.lease import Hold
    from lockkit.runtime import Runtime

__all__ = ["Keeper"]

log = logging.getLogger("lockkit")

LINGER = 10.0
"""Seconds that an idle watch or renewer stays. Shorter starts threads more often; longer keeps a dropped client."""

BATCH_SHARE = 1 / 30
"""Renewals due within this share of their ttl go along. Larger batches more and renews earlier than needed."""


class Keeper:
    """Deadlines and renewals of all leases of one client."""

    def __init__(
        self,
        runtime: Runtime,
        mutex: AbstractContextManager[Any],
        backend: Callable[[], LockBackend | None],
        lose: Callable[[Hold, LossReason], None],
        release_all: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """
        Start nothing yet.

        Args:
            runtime: Clock, waiting and background work.
            mutex: The engine's.
            backend: Gives the backend in use, or None once the client is closed.
            lose: Marks a lease as lost and tells its holder. Called without the mutex.
            release_all: Frees everything held; run when an event loop ends under us.
        """
        self._runtime = runtime
        self._mutex = mutex
        self._backend = backend
        self._lose = lose
        self._release_all = release_all
        self.holds: dict[str, Hold] = {}
        self._reset()

    def _reset(self) -> None:
        self._wake = self._runtime.event()
        self._wake_at = inf
        self._watching = False
        self._work = self._runtime.event()
        self._renewing = False
        self._due: list[Hold] = []

    def forked(self, mutex: AbstractContextManager[Any]) -> None:
        """Forget leases and threads: they are the parent's."""
        self._mutex = mutex
        self.holds = {}
        self._reset()

    # -- called by the engine, under the mutex ---------------------------------------------------------------------

    def add(self, hold: Hold) -> None:
        """Watch over a lease from now on."""
        self.reschedule(hold)
        self.holds[hold.grant.owner] = hold

    def reschedule(self, hold: Hold) -> None:
        """See that the watch is awake in time for this lease."""
        at = min(hold.renew_at, hold.valid_until)
        if not self._watching:
            # The flag last: where no thread could be started, the next lease must try again. The watch needs the mutex.
            self._runtime.spawn("lockkit-watch", self._watch, self._release_all)
            self._watching = True
            self._wake_at = at
        elif at < self._wake_at:
            # In a row of short leases the later ones are due later than the first: no thread is woken for them.
            self._wake_at = at
            self._wake.set()

    def forget(self, hold: Hold) -> None:
        """Stop watching. Without the mutex too (a dict operation is atomic): ``__del__`` may run anywhere."""
        self.holds.pop(hold.grant.owner, None)

    def stop(self) -> None:
        """Let both coroutines end: the client is closed."""
        self._wake.set()
        self._work.set()

    # -- the watch -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        idle_since: float | None = None
        while True:
            with self._mutex:
                self._wake.clear()
                now = self._runtime.now()
                expired, due, at = self._survey(now)
                if self.holds:
                    idle_since = None
                elif self._backend() is None or (idle_since is not None and now >= idle_since + LINGER):
                    self._watching = False
                    return
                elif idle_since is None:
                    idle_since = now
                if at == inf:
                    at = now + LINGER
                self._wake_at = at
                if due:
                    self._due.extend(due)
                    self._start_renewer()
            for hold in expired:
                self._lose(hold, "expired")
            await self._wake.wait(max(0.0, at - self._runtime.now()))

    def _survey(self, now: float) -> tuple[list[Hold], list[Hold], float]:
        """Find what has expired, what is to be renewed (marked as in flight), and when to look again."""
        expired: list[Hold] = []
        due: list[Hold] = []
        look_again = inf
        for hold in self.holds.values():
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

    def _start_renewer(self) -> None:
        if self._renewing:
            self._work.set()
        else:
            self._runtime.spawn("lockkit-renew", self._renew)
            self._renewing = True

    async def _renew(self) -> None:
        idle_since = self._runtime.now()
        while True:
            with self._mutex:
                self._work.clear()
                now = self._runtime.now()
                batch, self._due = self._due, []
                backend = self._backend()
                if batch:
                    idle_since = now
                elif backend is None or now >= idle_since + LINGER:
                    self._renewing = False
                    return
            if batch:
                await self._renew_batch(backend, [hold for hold in batch if not hold.finished])
            else:
                await self._work.wait(max(0.0, idle_since + LINGER - self._runtime.now()))

    async def _renew_batch(self, backend: LockBackend | None, batch: list[Hold]) -> None:
        """One renewal of each; the answers change deadlines, or mark leases as lost."""
        started = self._runtime.now()
        outcomes: Sequence[Renewal]
        try:
            if backend is None:
                raise BackendUnavailable("the client is closed")  # noqa: TRY301 - goes to the log only
            outcomes = await backend.renew([hold.grant for hold in batch]) if batch else ()
            if len(outcomes) != len(batch):
                message = f"{type(backend).__name__}.renew gave {len(outcomes)} outcomes for {len(batch)} grants"
                raise RuntimeError(message)  # noqa: TRY301 - a backend's bug counts as no answer, and is logged
        except Exception as error:  # noqa: BLE001 - whatever it was: retry until the deadline
            outcomes = [Unknown(error)] * len(batch)
        gone: list[tuple[Hold, LossReason]] = []
        with self._mutex:
            for hold, outcome in zip(batch, outcomes, strict=True):
                self._settle(hold, outcome, started, gone)
        for hold, reason in gone:
            self._lose(hold, reason)

    def _settle(self, hold: Hold, outcome: Renewal, started: float, gone: list[tuple[Hold, LossReason]]) -> None:
        hold.in_flight = False
        if isinstance(outcome, Unknown):
            hold.unanswered_ttl = min(hold.unanswered_ttl, hold.grant.ttl)
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
            renewed(hold, outcome, started)
        else:
            self._jeopardy(hold, outcome.error)
        self.reschedule(hold)

    def _jeopardy(self, hold: Hold, error: BaseException) -> None:
        """Plan the next try after a renewal without an answer, and say so once."""
        now = self._runtime.now()
        left = hold.valid_until - now
        # Several more tries before the deadline, spread so that the clients of a server that comes back do not all
        # call in the same instant. At least 5 ms: a dead port answers at once and would be asked in a busy loop.
        pause = max(0.005, min(hold.grant.ttl / 10, left / 3)) * self._runtime.random.uniform(0.8, 1.2)
        hold.renew_at = now + pause
        if not hold.in_jeopardy:
            hold.in_jeopardy = True
            log.warning(
                "renewal of lock %r (token %d) failed, %.3f s to its deadline, trying on: %s",
                hold.grant.name, hold.grant.token, max(0.0, left), error,
            )  # fmt: skip


def renewed(hold: Hold, outcome: Renewed, started: float) -> None:
    """Move the deadline after an answer that the lock is still ours. Under the engine's mutex."""
    if outcome.ttl is not None:
        hold.grant.ttl = outcome.ttl
    anchor = started if outcome.anchor is None else outcome.anchor
    hold.believe(anchor, hold.grant.ttl)
    if hold.in_jeopardy:
        hold.in_jeopardy = False
        log.info("lock %r (token %d) is renewed again", hold.grant.name, hold.grant.token)
