"""
Undoes at the backend what could not be undone at once: an acquisition whose answer was lost, a release cut short.

A coroutine of its own, started when first needed and ended when nothing is left to do.
A backend that hangs takes seconds for each try, and the renewals of leases must not wait behind it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from lockkit.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager
    from typing import Any

    from lockkit.runtime import Runtime

__all__ = ["Undoer"]

log = logging.getLogger("lockkit")

FIRST_PAUSE = 0.4
"""Pause after the first failed try, seconds; each further one doubles it."""

PAUSE_MAX = 10.0
"""Longest pause between two tries, seconds. Longer notices later that the backend is back, and others wait meanwhile
for a lock that nobody holds; shorter loads a backend that is struggling."""


class Undoer:
    """What one client has still to undo. Shares the engine's mutex; nothing is awaited while it is held."""

    def __init__(self, runtime: Runtime, mutex: AbstractContextManager[Any]) -> None:
        """Start nothing yet."""
        self._runtime = runtime
        self._background = Background(runtime, "lockkit-undo", self._work, self._flush_at_end)
        self.forked(mutex)

    def forked(self, mutex: AbstractContextManager[Any]) -> None:
        """Forget everything: it is the parent's."""
        self._mutex = mutex
        self._pending: list[_Undo] = []
        self._stopped = False
        self._idle = self._runtime.event()  # nothing is being undone at this moment
        self._idle.set()
        self._background.forked()

    def later(self, seconds: float, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """
        Call `function` until it succeeds or `seconds` have passed. Under the mutex; `start` after it.

        Args:
            seconds: When a ttl has done the same; ``inf`` where none does.
            function: Undoes it. Allowed to be called again after it succeeded.
        """
        now = self._runtime.now()
        self._pending.append(_Undo(function, now, now + seconds))
        self._background.wake()

    def start(self) -> None:
        """See that somebody works on what `later` was given. Not under the mutex."""
        try:
            self._background.start()
        except RuntimeError as error:  # the next call starts it
            log.warning("could not start the undoing of %d requests: %s", len(self._pending), error)

    async def flush(self, until: float) -> None:
        """Try once more what is still to be undone, as far as that goes until then: the client is closed."""
        with self._mutex:
            self._stopped = True
        await self._idle.wait(max(0.0, until - self._runtime.now()))
        with self._mutex:
            pending, self._pending = self._pending, []
        for number, undo in enumerate(pending):
            if self._runtime.now() >= until:
                log.warning("closing with %d requests not undone: no answer", len(pending) - number)
                return
            undo.until = -inf
            await self._try(undo)

    async def _flush_at_end(self) -> None:
        self._idle.set()  # what was being undone has been cancelled
        await self.flush(inf)

    async def _work(self) -> None:
        while True:
            self._background.clear()
            with self._mutex:
                undo, at = self._take()
                if undo is None and at == inf:
                    return
            if undo is not None:
                try:
                    await self._try(undo)
                finally:
                    self._idle.set()
            else:
                await self._background.wait(at - self._runtime.now())

    def _take(self) -> tuple[_Undo | None, float]:
        """Take what is to be tried now, else tell when the next is."""
        undo = min(self._pending, key=_planned, default=None)
        if undo is None or self._stopped:
            return None, inf
        if undo.at > self._runtime.now():
            return None, undo.at
        self._pending.remove(undo)
        self._idle.clear()
        return undo, undo.at

    async def _try(self, undo: _Undo) -> None:
        done = False
        try:
            await undo.function()
            done = True
        except Exception as error:  # noqa: BLE001 - tried again until the ttl has done the same
            again = self._runtime.now() < undo.until
            log.debug("undoing at the backend failed, %s: %s", "lockkit retries" if again else "giving up", error)
        finally:
            # Also when cancelled: it is still to be undone.
            with self._mutex:
                if done:
                    for other in self._pending:
                        other.at = 0.0  # the backend is back: the others need not wait longer
                elif (now := self._runtime.now()) < undo.until:
                    undo.at = now + undo.pause * self._runtime.random.uniform(0.5, 1.0)
                    # A long outage leaves many of them, from each try of each waiter: together they are not to be a
                    # load.
                    undo.pause = min(2 * undo.pause, PAUSE_MAX)
                    self._pending.append(undo)


@dataclass(slots=True, eq=False)
class _Undo:
    """Something that must not stay at the backend. Times are the client's monotonic clock."""

    function: Callable[[], Coroutine[Any, Any, object]]
    at: float
    until: float
    pause: float = FIRST_PAUSE


def _planned(undo: _Undo) -> float:
    return undo.at
