"""
Background work that cannot die unnoticed: a worker that goes on while there is work, and a single run.

Coroutines in the background renew leases, notice their loss and undo requests. If one died, every lease in its care
would be lost with it, so all of them run under these rules:

- It is started when there is work, never while a mutex is held: with ``asyncio.eager_task_factory`` a new task runs at
  once, inside the call that makes it, and takes the mutex itself.
- If it raises, that is logged and it is run again, after a pause.
- Its "running" flag is cleared however it ends, so the next piece of work starts it again.
- No wake-up is missed at the moment when it ends.
"""

from __future__ import annotations

import logging
from functools import partial

from lockkit.runtime import Event, Runtime, Work

__all__ = ["Background", "SingleRun", "nothing"]

log = logging.getLogger("lockkit")

RESTART_PAUSE = 0.05
"""Pause before failed work is run again, seconds, doubled with each failure in a row. Longer leaves renewals undone;
shorter fills the log when it fails each time."""

RESTART_PAUSE_MAX = 1.0
"""Longest such pause, seconds: several fit into the shortest ttl in common use."""


async def nothing() -> None:
    """Do nothing when the event loop ends: as `ending`, for work that goes on when an application cancels all tasks."""


class Background:
    """One coroutine that does the work that `wake` announces, and ends when nothing is left to do."""

    def __init__(self, runtime: Runtime, name: str, work: Work, ending: Work | None = None) -> None:
        """
        Start nothing yet.

        Args:
            runtime: Where to run.
            name: For stack traces and messages.
            work: Does what there is to do, waits with `wait` in between, and returns when there was nothing to do for a
                while. It must `clear` before it looks for work.
            ending: See `Runtime.spawn`.
        """
        self._runtime = runtime
        self._name = name
        self._work = work
        self._ending = ending
        self.forked()

    def forked(self) -> None:
        """Forget the thread: it is the parent's. Its mutex may stay taken there."""
        self._mutex = self._runtime.mutex()
        self._event = self._runtime.event()
        self.running = False

    # -- from outside ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Announce work. Allowed under a mutex; the caller calls `start` after it has left the mutex."""
        self._event.set()

    def start(self) -> None:
        """
        Make sure that it runs. Never under a mutex.

        Raises:
            RuntimeError: No thread could be started, or the event loop has ended.
        """
        with self._mutex:
            if self.running:
                return
            self.running = True
        try:
            self._runtime.spawn(self._name, self._run, self._ending)
        except BaseException:
            self.running = False
            raise

    # -- by the work -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Call this before looking for work: a `wake` from now on ends the next `wait`."""
        self._event.clear()

    async def wait(self, seconds: float) -> None:
        """Wait for `wake`, at most so many seconds."""
        await self._event.wait(max(0.0, seconds))

    async def _run(self) -> None:
        try:
            self.running = True  # also when it is run again after a cancel: `start` must not begin a second one
            while True:
                self.clear()
                await self._work_on()
                # First the flag, then the event: `wake` sets the event before `start` looks at the flag.
                self.running = False
                with self._mutex:
                    if self.running or not self._event.is_set():
                        return  # it has been started again, or nothing is left to do
                    self.running = True
        except BaseException:
            self.running = False
            raise

    async def _work_on(self) -> None:
        """Run the work until it returns."""
        pause = RESTART_PAUSE
        while True:
            try:
                await self._work()
            except Exception:
                log.exception("%s failed; lockkit runs it again in %g s", self._name, pause)
                await self._runtime.sleep(pause)
                pause = min(2 * pause, RESTART_PAUSE_MAX)
            else:
                return


class SingleRun:
    """
    Background work of which one run at a time is enough: connecting, subscribing, looking something up.

    It may raise, be cancelled, or find no thread to run in: the next `start` begins anew.
    """

    def __init__(self, runtime: Runtime, name: str, work: Work) -> None:
        """Begin nothing yet; `name` is for stack traces and the log."""
        self._runtime = runtime
        self._name = name
        self._work = work
        self._mutex = runtime.mutex()
        self._ended: Event | None = None

    @property
    def under_way(self) -> bool:
        """Whether a run has not ended yet."""
        return self._ended is not None

    def start(self) -> Event:
        """Begin, unless it is under way. The event is set when this run ends, however it does."""
        with self._mutex:
            if self._ended is not None:
                return self._ended
            ended = self._ended = self._runtime.event()
        try:
            self._runtime.spawn(self._name, partial(self._go, ended))
        except RuntimeError as error:
            self._end(ended)
            log.warning("%s could not be started, and is tried again when it is needed: %s", self._name, error)
        except BaseException:
            self._end(ended)
            raise
        return ended

    async def _go(self, ended: Event) -> None:
        # What is spawned begins, even if it is cancelled before its first step: its end is always noticed.
        try:
            await self._work()
        except Exception:
            log.exception("%s failed, and is started again when it is needed", self._name)
        finally:
            self._end(ended)

    def _end(self, ended: Event) -> None:
        with self._mutex:
            if self._ended is ended:  # Ctrl-C during `start` ends it too, and another may have begun
                self._ended = None
        ended.set()
