"""
Undoes in the background what could not be undone at the backend at once.

That is an acquisition whose answer was lost, or a release that was cut short.

A coroutine of its own, started when first needed and ended when nothing is left to do: each try at a backend that hangs
takes seconds, and the renewals of leases must not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any

from lockkit.backend import CALL_SECONDS, LockBackend, Renewed, Unknown
from lockkit.background import Background
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.errors import BackendUnavailable
from lockkit.units import Instant

log = logging.getLogger("lockkit")

FIRST_PAUSE = 0.4
"""Pause after the first failed try, seconds; each further one doubles it."""

PAUSE_MAX = 10.0
"""Longest pause between two tries, seconds. Longer notices later that the backend is back, and others wait meanwhile
for a lock that nobody holds; shorter loads a backend that is struggling."""

FAILED_PAUSE = 0.005
"""Pause after each failed try, of whichever request, seconds. An outage may leave thousands of them, from each try of
each waiter; shorter lets them use up a core, or an event loop, and longer tries some of them late."""

DOWN_PAUSE_MAX = 1.0
"""Longest pause after each try that could not even be sent, seconds; it begins with `FAILED_PAUSE` and doubles. Longer
notices later that the server is back; shorter connects more often to a port where nobody listens."""

RELEASE_SECONDS = CALL_SECONDS - 0.5
"""What a release may take, seconds: leaving a ``with`` block takes at most five, whatever hangs."""


async def give_back(backend: LockBackend, record: LeaseRecord, answer_by: Instant = inf) -> bool:
    """Release a lock, or have the backend keep it for the rest of ``min_hold``; returns whether the lease held it."""
    client, grant, left = record.client, record.grant, record.min_hold_left
    if not left:
        return await backend.release(grant, client.answer_by(RELEASE_SECONDS, answer_by))
    outcome = await backend.detach(replace(grant, ttl=max(left, client.capabilities.min_ttl)))
    if isinstance(outcome, Unknown):
        raise BackendUnavailable(str(outcome.error)) from outcome.error
    return isinstance(outcome, Renewed)


class PendingCleanups:
    """What one client still has to undo at its backend. Guarded by the client's mutex."""

    def __init__(self, client: ClientState) -> None:
        """Start nothing yet."""
        self._client = client
        self._runtime = client.runtime
        self._background = Background(client.runtime, "lockkit-cleanup", self._work, self._flush_at_end)
        self.forked()

    def forked(self) -> None:
        """Forget everything: it is the parent's."""
        self._pending: list[tuple[Instant, int, _Cleanup]] = []  # a heap, by when to try each
        self._numbers = count()
        self._stopped = False
        self._idle = self._runtime.event()  # nothing is being undone at this moment
        self._idle.set()
        self._background.forked()

    def add(self, seconds: float, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Call `function` in the background until it succeeds or `seconds` have passed."""
        assert seconds > 0.0, "what a ttl has ended already needs no cleanup"
        with self._client.mutex:
            now = self._runtime.now()
            self._plan(now, _Cleanup(function, now + seconds))
            if self._stopped:
                return  # `flush` tries it, if the connections are still open
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError as error:  # the next call starts it
            log.warning("could not start the cleanup of %d requests: %s", len(self._pending), error)

    def release_later(self, record: LeaseRecord) -> None:
        """Release a lease in the background, until its ttl has passed."""
        backend = self._client.backend
        if backend is not None:
            seconds = max(record.grant.ttl, record.renewal.unanswered_ttl_max)
            self.add(seconds, lambda: give_back(backend, record))

    async def flush(self, until: Instant) -> None:
        """
        Try once more what is still to be undone, until the given time: the client is being closed.

        What failed stays pending, and what this has not come to if it is cancelled: a further call tries that.
        """
        with self._client.mutex:
            self._stopped = True
        await self._idle.wait(max(0.0, until - self._runtime.now()))
        with self._client.mutex:
            self._hurry()  # what fails now comes after all others
        for left in range(len(self._pending), 0, -1):
            if self._runtime.now() >= until:
                log.warning("closing with %d requests not undone: no answer", left)
                return
            with self._client.mutex:
                if not self._pending:
                    return  # another call of close() has the rest
                cleanup = heappop(self._pending)[2]
            await self._try(cleanup)

    async def _flush_at_end(self) -> None:
        self._idle.set()  # what was being undone has been cancelled
        await self.flush(inf)

    async def _work(self) -> None:
        pause = FAILED_PAUSE
        while True:
            self._background.clear()
            with self._client.mutex:
                cleanup, at = self._take()
                if cleanup is None and at == inf:
                    return
            if cleanup is not None:
                assert not self._idle.is_set(), "the end of the client waits for it"
                try:
                    failure = await self._try(cleanup)
                finally:
                    self._idle.set()
                down = isinstance(failure, BackendUnavailable) and not failure.sent
                pause = min(2 * pause, DOWN_PAUSE_MAX) if down else FAILED_PAUSE
                if failure is not None:
                    await self._client.sleep(pause)
            else:
                await self._background.wait(at - self._runtime.now())

    def _take(self) -> tuple[_Cleanup | None, float]:
        """Take what is to be tried now; if nothing is, return when the next one is. Under the mutex."""
        now = self._runtime.now()
        while self._pending and not self._stopped:
            at, _, cleanup = self._pending[0]
            if at > now:
                return None, at
            heappop(self._pending)
            if now < cleanup.until:  # else its ttl has done the same
                assert self._idle.is_set(), "one at a time"
                self._idle.clear()
                return cleanup, at
        return None, inf

    async def _try(self, cleanup: _Cleanup) -> Exception | None:
        """Try once; returns what failed."""
        failure: Exception | None = None
        done = False
        try:
            await cleanup.function()
            done = True
        except Exception as error:  # noqa: BLE001 - tried again until the ttl has done the same
            failure = error
            again = not self._stopped and self._runtime.now() < cleanup.until
            log.debug("cleanup at the backend failed, %s: %s", "lockkit retries" if again else "giving up", error)
        finally:
            # Also when cancelled: it is still to be undone.
            with self._client.mutex:
                self._plan_after(cleanup, done=done)
        return failure

    def _plan_after(self, cleanup: _Cleanup, *, done: bool) -> None:
        """Plan the next try after one has ended. Under the mutex."""
        if done:
            if self._pending and self._pending[0][0] > 0.0:  # else it was done before, for all or most of them
                self._hurry()  # the backend is back: the others need not wait longer
        elif (now := self._runtime.now()) < cleanup.until:
            self._plan(now + cleanup.pause * self._runtime.random.uniform(0.5, 1.0), cleanup)
            # A long outage leaves many of them, from each try of each waiter: together they must not be a load.
            cleanup.pause = min(2 * cleanup.pause, PAUSE_MAX)

    def _plan(self, at: Instant, cleanup: _Cleanup) -> None:
        heappush(self._pending, (at, next(self._numbers), cleanup))

    def _hurry(self) -> None:
        """Plan all of them for now, the oldest first."""
        self._pending = [(0.0, number, cleanup) for _, number, cleanup in self._pending]
        heapify(self._pending)


@dataclass(slots=True, eq=False)
class _Cleanup:
    """Something that must not stay at the backend; `until` when it is there at most, client monotonic clock."""

    function: Callable[[], Coroutine[Any, Any, object]]
    until: Instant
    pause: float = FIRST_PAUSE
