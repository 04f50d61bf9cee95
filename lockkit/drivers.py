"""
Drivers that know only one form, for backends: each of them serves the sync and the async API.

A driver that only blocks runs in threads (`in_thread`). A driver that knows only asyncio runs in the application's
event loop, or, for the sync API, in one of its own (`DriverLoop`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakSet, finalize

from lockkit.errors import BackendUnavailable
from lockkit.runtime import Event, Runtime
from lockkit.units import Seconds

__all__ = ["DriverLoop", "in_thread"]

T = TypeVar("T")

_CANCEL_AGAIN = 0.01
"""Pause before what swallowed a cancellation is cancelled again, seconds."""

_LAST_SECONDS = 1.0
"""How long the tasks of a driver may take to end with its loop. Longer keeps the thread of a client that was closed."""

_TOUCH_PAUSE, _TOUCHES_MAX = 0.001, 500
"""How often `DriverLoop.stop` looks whether a driver's threads have ended, seconds, and how many times."""


def _awaited(runtime: Runtime) -> tuple[Future[Any], Event]:
    """Return what a function or a coroutine comes to in another thread, and the event that says that it has ended."""
    outcome: Future[Any] = Future()
    ended = runtime.event()
    outcome.add_done_callback(lambda _: ended.set())
    return outcome, ended


async def in_thread(runtime: Runtime, function: Callable[[], T], seconds: Seconds) -> T:
    """
    Call a function that blocks, and wait for it for a limited time, in the sync and the async API alike.

    The timeouts of a driver mostly hold for a connection, not for a call. So also the sync API needs the thread, to
    return in time when the server hangs. If nobody waits for it any more, the function still runs to its end: what it
    sends may reach the server later.

    Args:
        runtime: The host's.
        function: What to call. Give it timeouts, too, so that its thread ends.
        seconds: How long to wait; see `lockkit.backend.seconds_left`.

    Returns:
        What the function returned.

    Raises:
        TimeoutError: It has not ended.
        BaseException: What the function raised.
    """
    outcome, ended = _awaited(runtime)

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.set_exception(error)

    try:
        threading.Thread(target=work, name="lockkit-driver", daemon=True).start()
    except RuntimeError as error:
        if runtime.kind == "asyncio" and not runtime.loop_has_ended():
            message = f"the driver gets no thread: {error}. Raise the limits of this user or container"
            raise BackendUnavailable(message) from error
        work()  # Python 3.12 and later start none while the interpreter exits
    if not await ended.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    result: T = outcome.result()
    return result


class _Call:
    """One call of a driver, for as long as somebody refers to it."""


class DriverLoop:
    """
    Where the coroutines of a driver run that knows only asyncio.

    Under asyncio that is the application's event loop. For the sync API it is one of its own, in a daemon thread.
    Either way all of them run in one thread: what they share needs no mutex.

    A driver in Rust has threads of its own besides. Such a thread passes its answer to the event loop, and loses the
    GIL while it does so. If the interpreter begins to exit before the thread has it back, CPython ends the thread, and
    Rust aborts the process: 7 of 216 that used obstore 0.12.1 died so. So `stop` waits for these threads; while they
    need Python they keep the context (``contextvars``) of the call, and with it the `_Call` that is noted there.
    """

    _call: ContextVar[_Call | None] = ContextVar("lockkit: call of a driver")

    def __init__(self, runtime: Runtime, touch: Callable[[], object] | None = None) -> None:
        """
        Start nothing yet.

        Args:
            runtime: The host's.
            touch: Calls a driver in Rust, which only then frees what its threads have left to it.
        """
        self._runtime = runtime
        self._touch = touch
        self._left = WeakSet[_Call]()
        self._mutex = runtime.mutex()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[Future[Any]] = set()  # of that loop, and changed in its thread only

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """
        Run a coroutine of the driver; limit its time with ``asyncio.timeout`` inside it.

        If the caller is cancelled or interrupted, the coroutine is cancelled.

        Returns:
            What the coroutine returned.

        Raises:
            BackendUnavailable: In the sync API, `stop` was called meanwhile, or no thread can be started for the loop.
            BaseException: What the coroutine raised.
        """
        if self._touch is not None:
            coroutine = self._noted(coroutine)
        if self._runtime.kind == "asyncio":
            return await _cancellable(coroutine)
        outcome, ended = _awaited(self._runtime)
        tasks: list[asyncio.Task[Any]] = []

        def begin() -> None:
            task = loop.create_task(coroutine)
            calls.add(outcome)
            task.add_done_callback(lambda _: calls.discard(outcome))
            task.add_done_callback(lambda _: _settle(outcome, task))
            tasks.append(task)

        def cancel() -> None:
            tasks.append(loop.create_task(_end(tasks[0])))

        try:
            with self._mutex:  # so that `stop` comes before this or after `begin`
                loop = self._started()
                calls = self._calls
                loop.call_soon_threadsafe(begin)
        except (OSError, RuntimeError) as error:
            coroutine.close()
            message = f"the driver gets no event loop: {error}. Raise the limits of this user or container"
            raise BackendUnavailable(message) from error
        try:
            await ended.wait(None)
        except BaseException:
            with suppress(RuntimeError):  # the loop is closed, and the coroutine with it
                loop.call_soon_threadsafe(cancel)
            raise
        result: T = outcome.result()
        return result

    async def _noted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._left.add(call := _Call())
        self._call.set(call)
        del call  # the traceback of an error would keep it
        try:
            return await coroutine
        finally:
            self._call.set(None)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._calls = set()
            # An application may connect for each call and close none of its clients.
            self._dropped = finalize(self, loop.call_soon_threadsafe, loop.stop)
            self._dropped.atexit = False  # a daemon thread
            try:
                threading.Thread(target=_serve, args=(loop, self._calls), name="lockkit-driver", daemon=True).start()
            except RuntimeError:  # too many threads: the next call must not wait for a loop that nobody runs
                self._loop = None
                self._dropped.detach()
                loop.close()
                raise
        return self._loop

    def stop(self) -> None:
        """End the thread, if there is one, and what runs in it. The next `run` starts another."""
        with self._mutex:
            loop, self._loop = self._loop, None
            if loop is not None:
                self._dropped()  # here: a call that comes next makes another one
        for _ in range(_TOUCHES_MAX):
            if self._touch is None or not self._left:
                break
            self._touch()
            time.sleep(_TOUCH_PAUSE)  # noqa: TID251 - one or two, and the event loop has ended or ends


def _settle(outcome: Future[Any], task: asyncio.Task[Any]) -> None:
    # A caller that has cancelled its call does not read this, so the loop was stopped. CancelledError is not an
    # Exception: it would end the caller's thread.
    error = _stopped() if task.cancelled() else task.exception()
    if error is None:
        outcome.set_result(task.result())
    else:
        outcome.set_exception(error)


def _serve(loop: asyncio.AbstractEventLoop, calls: Collection[Future[Any]]) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_end_all(asyncio.all_tasks(loop)))
    finally:
        loop.close()
        for outcome in calls:  # of a driver that swallows cancellations: nothing else would wake its callers
            outcome.set_exception(_stopped())


def _stopped() -> BackendUnavailable:
    return BackendUnavailable("the client was closed while this call waited for an answer")


async def _end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel what the driver has left behind: a task that is only dropped is reported as pending."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_SECONDS)


async def _cancellable(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine so that a cancellation of the caller ends it for certain."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _end(task)
        if not task.cancelled():
            task.exception()  # asyncio need not report it
        raise
    return task.result()


async def _end(task: asyncio.Future[Any]) -> None:
    """
    Cancel a task until it has ended.

    Drivers wait with ``asyncio.wait_for``, which before Python 3.12 swallows a cancellation that comes together with
    the answer (bpo-37658): the call would go on as if nobody had cancelled it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN)
