"""
Calls into grpc for the main thread, made in another one.

Ctrl-C, and whatever else a signal handler raises, strikes in the main thread only, after any of its instructions: also
after ``threading.Condition.__enter__`` has its lock and before the ``with`` has begun that would free it. grpc takes
such locks for each call, so once in some ten thousand interrupts one stays taken, and every thread that uses the
channel hangs for ever: waiters, renewals, and whoever closes it. Here the main thread only waits, on a lock of its own.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Apart"]

T = TypeVar("T")

END_SECONDS = 1.0
"""How long `Apart.close` waits for calls that were interrupted: the channel is closed, so they end soon."""


class Apart:
    """Runs functions out of the reach of signal handlers. Threads are started when there is something to run."""

    def __init__(self) -> None:
        """Start none yet."""
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # One entry for each thread that has nothing to do. A list, since its methods are atomic.
        self._idle: list[None] = []

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """
        Call, and give or raise what comes of it. Interrupted, the call goes on and what comes of it is lost.

        Other threads than the main one call it themselves.
        """
        if threading.current_thread() is not threading.main_thread():
            return function(*arguments, **keywords)
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of its parent's threads
        order = _Order(function, arguments, keywords)
        if self._idle:
            self._idle.pop()
        else:
            self._start()
        self._orders.put(order)
        result: T = order.outcome()
        return result

    def _start(self) -> None:
        arguments = (self._orders, self._idle)
        thread = threading.Thread(target=_work, args=arguments, name="lockkit-etcd-call", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """End the threads that there are."""
        threads, orders, mine = self._threads, self._orders, self._pid == os.getpid()
        self._reset()
        if not mine:
            return
        for _ in threads:
            orders.put(None)
        for thread in threads:
            thread.join(END_SECONDS)


def _work(orders: queue.SimpleQueue[_Order | None], idle: list[None]) -> None:
    while (order := orders.get()) is not None:
        order.carry_out()
        # Before the caller knows: its next call is to find this thread.
        idle.append(None)
        order.done.release()
        del order  # and with it what came of it, which the caller may have dropped


class _Order:
    """A call to be made."""

    __slots__ = ("_arguments", "_error", "_function", "_keywords", "_result", "done")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def carry_out(self) -> None:
        """Call."""
        try:
            self._result = self._function(*self._arguments, **self._keywords)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._error = error

    def outcome(self) -> Any:  # noqa: ANN401 - the function's
        """Wait for what comes of it."""
        self.done.acquire()
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            self._error = None  # it refers to this frame
