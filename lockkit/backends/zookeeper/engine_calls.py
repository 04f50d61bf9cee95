"""
Calls to the engine outside kazoo's threads, which send heartbeats and wake waiters and must not be delayed.

The engine logs when a lease is lost. A log handler of the application may take its time, or use a lock of this client.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from lockkit.background import Background
from lockkit.runtime import Runtime, drive

log = logging.getLogger("lockkit")


class EngineCalls:
    """Makes calls in order: in a thread that ends when no call is left, or in the event loop."""

    def __init__(self, runtime: Runtime) -> None:
        """Start nothing yet."""
        self._runtime = runtime
        self._calls: deque[Callable[[], None]] = deque()
        self._background = Background(runtime, "lockkit-zookeeper-notify", self._make_calls)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have a function called soon. From any thread."""
        if self._runtime.kind == "asyncio":
            self._runtime.deliver(function)
            return
        self._calls.append(function)
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError:
            log.warning("cannot start a thread to notify the holders of leases: kazoo's thread does it")
            drive(self._make_calls())

    async def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
