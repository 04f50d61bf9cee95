"""
Undoes in the background what could not be undone at the backend at once.

That is an acquisition whose answer was lost, or a release that was cut short.

A coroutine of its own, started when first needed and ended when nothing is left to do: each try at a backend that hangs
takes seconds, and the renewals of leases must not wait for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from lockkit.backend import CALL_SECONDS
from lockkit.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from lockkit.backend import Grant
    from lockkit.engine.client_state import ClientState
    from lockkit.units import Instant

__all__ = ["RELEASE_SECONDS", "PendingCleanups"]

log = logging.getLogger("lockkit")

FIRST_PAUSE = 0.4
"""Pause after the first failed try, seconds; each further one doubles it."""

PAUSE_MAX = 10.0
"""Longest pause between two tries, seconds. Longer notices later that the backend is back, and others wait meanwhile
for a lock that nobody holds; shorter loads a backend that is struggling."""

RELEASE_SECONDS = CALL_SECONDS - 0.5
"""What a release may take, seconds: leaving a ``with`` block takes at most five, whatever hangs."""


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
        self._pending: list[_Cleanup] = []
        self._stopped = False
        self._idle = self._runtime.event()  # nothing is being undone at this moment
        self._idle.set()
        self._background.forked()

    def add(self, seconds: float, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """
        Call `function` in the background until it succeeds or `seconds` have passed.

        Args:
            seconds: When a ttl has done the same; ``inf`` where none does.
            function: Undoes it. Allowed to be called again after it succeeded.
        """
        assert seconds > 0.0, "what a ttl has ended already needs no cleanup"
        with self._client.mutex:
            now = self._runtime.now()
            self._pending.append(_Cleanup(function, now, now + seconds))
            if self._stopped:
                return  # `flush` tries it, if the connections are still open
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError as error:  # the next call starts it
            log.warning("could not start the cleanup of %d requests: %s", len(self._pending), error)

    def release_later(self, grant: Grant) -> None:
        """Release a grant in the background, until its ttl has passed."""
        backend = self._client.backend
        if backend is not None:
            self.add(grant.ttl, lambda: backend.release(grant, self._client.answer_by(RELEASE_SECONDS)))

    async def flush(self, until: Instant) -> None:
        """
        Try once more what is still to be undone, until the given time: the client is being closed.

        What failed stays pending, and what this has not come to if it is cancelled: a further call tries that.
        """
        with self._client.mutex:
            self._stopped = True
        await self._idle.wait(max(0.0, until - self._runtime.now()))
        pending = tuple(self._pending)
        for number, cleanup in enumerate(pending):
            if self._runtime.now() >= until:
                log.warning("closing with %d requests not undone: no answer", len(pending) - number)
                return
            with self._client.mutex:
                if cleanup not in self._pending:
                    continue  # another call of close() has it
                self._pending.remove(cleanup)
            await self._try(cleanup)

    async def _flush_at_end(self) -> None:
        self._idle.set()  # what was being undone has been cancelled
        await self.flush(inf)

    async def _work(self) -> None:
        while True:
            self._background.clear()
            with self._client.mutex:
                cleanup, at = self._take()
                if cleanup is None and at == inf:
                    return
            if cleanup is not None:
                assert not self._idle.is_set(), "the end of the client waits for it"
                try:
                    await self._try(cleanup)
                finally:
                    self._idle.set()
            else:
                await self._background.wait(at - self._runtime.now())

    def _take(self) -> tuple[_Cleanup | None, float]:
        """Take what is to be tried now; if nothing is, return when the next one is. Under the mutex."""
        cleanup = min(self._pending, key=_planned, default=None)
        if cleanup is None or self._stopped:
            return None, inf
        if cleanup.at > self._runtime.now():
            return None, cleanup.at
        assert self._idle.is_set(), "one at a time"
        self._pending.remove(cleanup)
        self._idle.clear()
        return cleanup, cleanup.at

    async def _try(self, cleanup: _Cleanup) -> None:
        done = False
        try:
            await cleanup.function()
            done = True
        except Exception as error:  # noqa: BLE001 - tried again until the ttl has done the same
            again = not self._stopped and self._runtime.now() < cleanup.until
            log.debug("cleanup at the backend failed, %s: %s", "lockkit retries" if again else "giving up", error)
        finally:
            # Also when cancelled: it is still to be undone.
            with self._client.mutex:
                self._plan_after(cleanup, done=done)

    def _plan_after(self, cleanup: _Cleanup, *, done: bool) -> None:
        """Plan the next try after one has ended. Under the mutex."""
        assert cleanup not in self._pending, "what is being tried is not planned"
        if done:
            for other in self._pending:
                other.at = 0.0  # the backend is back: the others need not wait longer
        elif (now := self._runtime.now()) < cleanup.until:
            cleanup.at = now + cleanup.pause * self._runtime.random.uniform(0.5, 1.0)
            # A long outage leaves many of them, from each try of each waiter: together they must not be a load.
            cleanup.pause = min(2 * cleanup.pause, PAUSE_MAX)
            self._pending.append(cleanup)


@dataclass(slots=True, eq=False)
class _Cleanup:
    """Something that must not stay at the backend. Times are the client's monotonic clock."""

    function: Callable[[], Coroutine[Any, Any, object]]
    at: float
    until: float
    pause: float = FIRST_PAUSE


def _planned(cleanup: _Cleanup) -> float:
    return cleanup.at
