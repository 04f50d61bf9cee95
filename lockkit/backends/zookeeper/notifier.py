"""
Calls the engine for kazoo's threads, which must not be held up.

The engine logs when a lease is lost, and a handler of the application's log may take its time, or a lock of this same
client. kazoo's threads send heartbeats and wake waiters meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from lockkit.background import Background
from lockkit.runtime import drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.runtime import Runtime

__all__ = ["Notifier"]

log = logging.getLogger("lockkit")


class Notifier:
    """Calls functions in their order: in a thread that ends when there is no more to call, or in the event loop."""

    def __init__(self, runtime: Runtime) -> None:
        """Start nothing yet."""
        self._runtime = runtime
        self._calls: deque[Callable[[], None]] = deque()
        self._background = Background(runtime, "lockkit-zookeeper-notify", self._deliver)

    def call(self, function: Callable[[], None]) -> None:
        """Have it called soon. From any thread."""
        if self._runtime.kind == "asyncio":
            self._runtime.deliver(function)
            return
        self._calls.append(function)
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError:
            log.warning("no thread can be started to notify the holders of leases: it is done in kazoo's")
            drive(self._deliver())

    async def _deliver(self) -> None:
        while self._calls:
            self._calls.popleft()()
