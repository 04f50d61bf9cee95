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
        self._mutex = mutex
        self._reset()

    def _reset(self) -> None:
        self._pending: list[_Undo] = []
        self._work = self._runtime.event()
        self._running = False
        self._stopped = False

    def forked(self, mutex: AbstractContextManager[Any]) -> None:
        """Forget everything: it is the parent's."""
        self._mutex = mutex
        self._reset()

    def later(self, seconds: float, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Call `function` until it succeeds or `seconds` have passed (then the ttl has done it). Under the mutex."""
        now = self._runtime.now()
        self._pending.append(_Undo(function, now, now + seconds))
        if self._running:
            self._work.set()
        else:
            self._runtime.spawn("lockkit-undo", self._run)
            self._running = True

    async def flush(self) -> None:
        """Try once more what is still to be undone: the client is being closed."""
        with self._mutex:
            pending, self._pending = self._pending, []
        for undo in pending:
            undo.until = -inf
            await self._try(undo)

    def stop(self) -> None:
        """Let the coroutine end: the client is closed."""
        self._stopped = True
        self._work.set()

    async def _run(self) -> None:
        while True:
            with self._mutex:
                self._work.clear()
                undo, at = self._take()
                if self._stopped or (undo is None and at == inf):
                    self._running = False
                    return
            if undo is not None:
                await self._try(undo)
            else:
                await self._work.wait(max(0.0, at - self._runtime.now()))

    def _take(self) -> tuple[_Undo | None, float]:
        """Take what is to be tried now, else tell when the next is."""
        undo = min(self._pending, key=_planned, default=None)
        if undo is None:
            return None, inf
        if undo.at > self._runtime.now():
            return None, undo.at
        self._pending.remove(undo)
        return undo, undo.at

    async def _try(self, undo: _Undo) -> None:
        try:
            await undo.function()
        except Exception as error:  # noqa: BLE001 - tried again until the ttl has done the same
            now = self._runtime.now()
            log.debug("undoing at the backend failed, %s: %s", "giving up" if now >= undo.until else "trying on", error)
            if now < undo.until:
                undo.at = now + undo.pause * self._runtime.random.uniform(0.5, 1.0)
                # A long outage leaves many of them, from each try of each waiter: together they must not be a load.
                undo.pause = min(2 * undo.pause, PAUSE_MAX)
                with self._mutex:
                    self._pending.append(undo)
        else:
            with self._mutex:
                for other in self._pending:
                    other.at = 0.0  # the backend is back: the others need not wait longer


@dataclass(slots=True, eq=False)
class _Undo:
    """Something that must not stay at the backend. Times are the client's monotonic clock."""

    function: Callable[[], Coroutine[Any, Any, object]]
    at: float
    until: float
    pause: float = FIRST_PAUSE


def _planned(undo: _Undo) -> float:
    return undo.at
