"""A stopwatch that stands still while the machine does."""

from __future__ import annotations

import threading
import time

from lockkit.units import Seconds

TICK_SECONDS = 0.02
"""Shorter costs more of the processor; longer notices less of a stall."""


class Stopwatch:
    """
    Measures how long lockkit takes, without what the machine lost meanwhile.

    A virtual machine stands still for seconds now and then, and a busy one lets each thread wait. What a thread of this
    process that only sleeps is late, lockkit may be late too: it has promised seconds of a machine that runs.
    """

    def __init__(self) -> None:
        """Start it."""
        self.longest_stall = 0.0  # for how long the machine has stood still at most, seconds
        self._late = 0.0
        self._seconds: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="stopwatch", daemon=True)
        self._thread.start()
        self._began = time.monotonic()

    def _tick(self) -> None:
        while True:
            before = time.monotonic()
            stopped = self._stopped.wait(TICK_SECONDS)
            late = max(0.0, time.monotonic() - before - TICK_SECONDS)
            self._late += late
            self.longest_stall = max(self.longest_stall, late)
            if stopped:
                return

    def stop(self) -> Seconds:
        """Stop it, and return the seconds; once stopped, the same again."""
        if self._seconds is None:
            elapsed = time.monotonic() - self._began
            self._stopped.set()
            self._thread.join()
            self._seconds = max(0.0, elapsed - self._late)
        return self._seconds
