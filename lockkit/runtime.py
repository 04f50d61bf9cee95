"""
The only place that knows whether we block, run on asyncio, or run on simulated time.

The core (`engine`, `keeper`) and the backends are ``async def`` throughout and written once.
They take the clock, sleeping, waiting, background work, random numbers and thread hand-over from a `Runtime`.

- `BlockingRuntime`: what looks like awaiting blocks the thread inside the call. A coroutine driven by `drive` therefore
  never suspends: it ends in ``StopIteration`` at the first ``send``.
- `AsyncioRuntime`: the same coroutines, awaited by tasks of one event loop.
- `lockkit.testing.simulation.SimulatedRuntime`: virtual time, repeatable from a seed.
"""

from __future__ import annotations

import os
import random
import secrets
import select
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import asyncio
    from contextlib import AbstractContextManager

__all__ = ["AsyncioRuntime", "BlockingRuntime", "Event", "Runtime", "drive", "let_go", "monotonic"]

T = TypeVar("T")
Kind = Literal["blocking", "asyncio", "simulated"]
Work = Callable[[], Coroutine[Any, Any, None]]

_LAST_SECONDS = 1.0  # for releasing what is held when an event loop ends; longer delays its end when the server is gone

# The clock of all deadlines must go on while the machine is suspended: Linux's CLOCK_MONOTONIC (time.monotonic) stops,
# so a laptop or a VM would wake up believing in a lease that is hours old. CLOCK_BOOTTIME counts suspended time
# (clock_gettime(2)). On macOS CLOCK_MONOTONIC does, where time.monotonic (mach_absolute_time) does not.
if sys.platform == "linux":
    _CLOCK_ID = time.CLOCK_BOOTTIME
else:
    _CLOCK_ID = time.CLOCK_MONOTONIC
_clock_gettime = time.clock_gettime


class _Owners:
    """
    Owner ids from the operating system's random numbers, drawn many at a time.

    A system call for each would be a tenth of an acquisition. A forked child must not share them with its parent, so it
    gets a new object.
    """

    __slots__ = ("_ready",)

    def __init__(self) -> None:
        self._ready: list[str] = []

    def take(self) -> str:
        """Give one that nobody else gets. ``list.pop`` is atomic: two threads never take the same."""
        try:
            return self._ready.pop()
        except IndexError:
            digits = secrets.token_hex(16 * 64)
            self._ready += (digits[start : start + 32] for start in range(32, len(digits), 32))
            return digits[:32]


def monotonic() -> float:
    """Client monotonic clock, seconds, including the time that the machine was suspended."""
    return _clock_gettime(_CLOCK_ID)


class Event(Protocol):
    """A flag to wait for. `set` may be called from any thread; waiting belongs to the runtime that made it."""

    def set(self) -> None:
        """Raise the flag and wake all waiters."""
        ...

    def clear(self) -> None:
        """Lower the flag."""
        ...

    def is_set(self) -> bool:
        """Tell whether the flag is up."""
        ...

    async def wait(self, timeout: float | None) -> bool:
        """Wait until the flag is up, at most `timeout` seconds (None: without limit); tell whether it is."""
        ...


class Runtime(Protocol):
    """Clock, waiting, background work and chance for the core."""

    kind: Kind
    random: random.Random

    def now(self) -> float:
        """Client monotonic clock, seconds."""
        ...

    def owner(self) -> str:
        """A fresh owner id: 128 random bits as 32 hexadecimal digits."""
        ...

    def mutex(self) -> AbstractContextManager[Any]:
        """A lock for short sections without any ``await``."""
        ...

    def event(self) -> Event:
        """A new `Event`, not set."""
        ...

    def current(self) -> object:
        """The thread or task that runs now, for reentrancy. Compared by identity."""
        ...

    def bind(self) -> None:
        """Check that the caller runs where this runtime belongs (the event loop of the first use)."""
        ...

    def spawn(self, name: str, function: Work, cancelled: Work | None = None) -> None:
        """
        Run a coroutine function in the background: a daemon thread, or a task.

        Args:
            name: For stack traces.
            function: What to run.
            cancelled: Awaited if the task is cancelled, which happens when its event loop ends.
        """
        ...

    def at_exit(self, function: Work, seconds: float) -> None:
        """Run a coroutine function while the interpreter exits, as far as that is possible, for at most `seconds`."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def io(self, value: T | Awaitable[T]) -> T:
        """Give `value` back, awaited if it is awaitable: one spelling for a blocking and an asyncio driver."""
        ...

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """
        Run a coroutine to its end even though the caller is being cancelled.

        Under asyncio it is a task of its own, awaited for at most `seconds` (then `TimeoutError`, the task goes on),
        and a further cancellation of the caller leaves it running. A blocking call cannot be left: its own I/O timeouts
        bound it.
        """
        ...

    async def readable(self, fd: int, timeout: float | None) -> bool:
        """Wait until a file descriptor can be read, at most `timeout` seconds; tell whether it can."""
        ...

    def forked(self) -> None:
        """Forget what belonged to the parent process."""
        ...


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """
    Run a coroutine of the core to its end in this thread, without an event loop.

    Raises:
        RuntimeError: The coroutine suspended: something awaited a real awaitable under the blocking runtime.
            That is a bug in lockkit or in a backend, never the caller's.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    coroutine.close()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    message = (
        f"{name} suspended under the blocking runtime. This is a bug in lockkit or in the backend: "
        "it must wait only through its runtime."
    )
    raise RuntimeError(message)


class _BlockingEvent:
    """
    A flag that threads wait for.

    Not `threading.Event`: its condition has a lock that stays taken for ever when Ctrl-C strikes between the return of
    ``Condition.__enter__`` and the beginning of the ``with``, and every thread that sets the flag hangs from then on.
    Here each waiter has a lock of its own to sleep on, and nobody else ever takes it.
    """

    __slots__ = ("_flag", "_sleepers")

    def __init__(self) -> None:
        self._flag = False
        # A list, since its methods are atomic.
        self._sleepers: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._flag

    def clear(self) -> None:
        self._flag = False

    def set(self) -> None:
        try:
            self._wake()
        except BaseException:
            self._wake()  # interrupted halfway; twice does no harm
            raise

    def _wake(self) -> None:
        self._flag = True
        for sleeper in tuple(self._sleepers):
            with suppress(RuntimeError):  # somebody else has woken it already
                sleeper.release()

    async def wait(self, timeout: float | None) -> bool:
        if self._flag:
            return True
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            # Looked at again: whoever raised it in between may not have seen us.
            return self.is_set() or _acquired(sleeper, timeout) or self.is_set()
        finally:
            self._sleepers.remove(sleeper)


def _acquired(lock: threading.Lock, timeout: float | None) -> bool:
    """Acquire within so many seconds. threading refuses more than about 292 years with OverflowError."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:
        return lock.acquire()
    return lock.acquire(blocking=False) if timeout <= 0 else lock.acquire(timeout=timeout)


def let_go(lock: threading.Condition) -> None:
    """
    Free a lock of a library's that an interrupt may have left taken, by a thread that is not in that library any more.

    A signal handler strikes after any instruction, also after ``threading.Condition.__enter__`` has the lock and before
    the ``with`` has begun that would free it.
    """
    with suppress(RuntimeError):  # not ours, or not any more
        while True:
            lock.release()


class BlockingRuntime:
    """Threads: every wait blocks the calling thread, background work runs in daemon threads."""

    kind: Kind = "blocking"

    def __init__(self) -> None:
        """Seed the random numbers from the operating system."""
        self.random = random.Random()  # noqa: S311 - jitter, not secrets
        self._owners = _Owners()

    now = staticmethod(partial(_clock_gettime, _CLOCK_ID))  # `monotonic`, without a Python frame

    def owner(self) -> str:
        """See `Runtime.owner`."""
        return self._owners.take()

    def mutex(self) -> AbstractContextManager[Any]:
        """See `Runtime.mutex`."""
        return threading.Lock()

    def event(self) -> Event:
        """See `Runtime.event`."""
        return _BlockingEvent()

    def current(self) -> object:
        """Return the thread object, not its ident: idents are used again after a thread has ended."""
        return threading.current_thread()

    def bind(self) -> None:
        """Threads may all use a blocking client."""

    def spawn(self, name: str, function: Work, cancelled: Work | None = None) -> None:
        """See `Runtime.spawn`. A thread is never cancelled."""
        del cancelled
        threading.Thread(target=lambda: drive(function()), name=name, daemon=True).start()

    def at_exit(self, function: Work, seconds: float) -> None:
        """Run it in a thread, so that a server that does not answer cannot hold up the exit."""
        thread = threading.Thread(target=lambda: drive(function()), name="lockkit-exit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 and later start no thread once the interpreter is finalizing
            drive(function())
        else:
            thread.join(seconds)

    async def sleep(self, seconds: float) -> None:
        """See `Runtime.sleep`."""
        time.sleep(seconds)

    async def io(self, value: T | Awaitable[T]) -> T:
        """Return the value: blocking drivers have waited already."""
        return cast("T", value)

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await it here: a thread is not cancelled."""
        del seconds
        return await coroutine

    async def readable(self, fd: int, timeout: float | None) -> bool:
        """See `Runtime.readable`."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        # Rounded up: poll counts whole milliseconds, and 0.4 ms must not become a busy loop.
        return bool(poll.poll(None if timeout is None else -int(-timeout * 1000 // 1)))

    def forked(self) -> None:
        """Draw other random numbers than the parent."""
        self.random.seed()
        self._owners = _Owners()


class _AsyncioEvent:
    """An event for the tasks of one loop that other threads may set."""

    __slots__ = ("_flag", "_runtime", "_waiters")

    def __init__(self, runtime: AsyncioRuntime) -> None:
        self._runtime = runtime
        self._flag = False
        self._waiters: set[asyncio.Future[bool]] = set()

    def is_set(self) -> bool:
        return self._flag

    def clear(self) -> None:
        self._flag = False

    def set(self) -> None:
        self._flag = True
        loop = self._runtime.loop
        if loop is None or self._runtime.thread_id == threading.get_ident():
            self._wake()
        else:
            # Closed, perhaps in this instant: then nobody waits there any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, timeout: float | None) -> bool:
        if self._flag:
            return True
        loop = self._runtime.bound_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        timer = None if timeout is None else loop.call_later(timeout, _resolve, waiter)
        try:
            # Another thread may have set the flag before the waiter was in the set.
            return self.is_set() or await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """See that asyncio does not complain of an error that nobody waits for any more: the caller has planned a retry."""
    if not task.cancelled():
        task.exception()


def _report(task: asyncio.Task[None]) -> None:
    """Hand what a background task raised to the loop's exception handler now, not when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


async def _guarded(function: Work, cancelled: Work | None) -> None:
    import asyncio  # noqa: PLC0415 - `import lockkit` stays light

    try:
        await function()
    except asyncio.CancelledError:
        if cancelled is not None:
            await asyncio.wait_for(cancelled(), _LAST_SECONDS)
        raise


def _resolve(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class AsyncioRuntime:
    """Tasks of one event loop: the loop in which the runtime is first used."""

    kind: Kind = "asyncio"

    def __init__(self) -> None:
        """Belong to no loop yet."""
        self.random = random.Random()  # noqa: S311 - jitter, not secrets
        self._owners = _Owners()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread_id = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    now = staticmethod(partial(_clock_gettime, _CLOCK_ID))  # `monotonic`, without a Python frame

    def owner(self) -> str:
        """See `Runtime.owner`."""
        return self._owners.take()

    def mutex(self) -> AbstractContextManager[Any]:
        """See `Runtime.mutex`. A real lock: ``__del__`` and other clients' threads come by."""
        return threading.Lock()

    def event(self) -> Event:
        """See `Runtime.event`."""
        return _AsyncioEvent(self)

    def current(self) -> object:
        """See `Runtime.current`."""
        import asyncio  # noqa: PLC0415 - `import lockkit` stays light

        return asyncio.current_task()

    def bound_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that this belongs to; the running one becomes it at the first use."""
        if self.loop is None:
            import asyncio  # noqa: PLC0415 - `import lockkit` stays light

            self.loop = asyncio.get_running_loop()
            self.thread_id = threading.get_ident()
        return self.loop

    def bind(self) -> None:
        """
        Check the loop.

        Raises:
            RuntimeError: Called from another event loop, or from no loop at all.
        """
        import asyncio  # noqa: PLC0415 - `import lockkit` stays light

        running = asyncio.get_running_loop()
        if running is not self.loop:
            if self.loop is not None:
                message = "it belongs to the event loop in which it was first used"
                raise RuntimeError(message)
            self.bound_loop()

    def spawn(self, name: str, function: Work, cancelled: Work | None = None) -> None:
        """See `Runtime.spawn`."""
        task = self._task(_guarded(function, cancelled), name)
        task.add_done_callback(_report)

    def at_exit(self, function: Work, seconds: float) -> None:
        """Run it as far as it goes without an event loop, which has ended: memory and file release, sockets cannot."""
        del seconds
        coroutine = function()
        try:
            coroutine.send(None)
        except StopIteration:
            return
        coroutine.close()

    def _task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        # The loop keeps only weak references to tasks (asyncio documentation, create_task).
        task = self.bound_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """See `Runtime.sleep`."""
        import asyncio  # noqa: PLC0415 - `import lockkit` stays light

        await asyncio.sleep(seconds)

    async def io(self, value: T | Awaitable[T]) -> T:
        """See `Runtime.io`."""
        if isinstance(value, Awaitable):
            return await value
        return value

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """See `Runtime.settle`."""
        import asyncio  # noqa: PLC0415 - `import lockkit` stays light

        task = self._task(coroutine, "lockkit-settle")
        task.add_done_callback(_retrieve)
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes in the instant in which the task ends
        # (bpo-37658), and the caller would go on acquiring although it was cancelled.
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            message = f"not settled within {seconds:g} s"
            raise TimeoutError(message)
        return task.result()

    async def readable(self, fd: int, timeout: float | None) -> bool:
        """See `Runtime.readable`."""
        loop = self.bound_loop()
        ready = _AsyncioEvent(self)
        loop.add_reader(fd, ready.set)
        try:
            return await ready.wait(timeout)
        finally:
            loop.remove_reader(fd)

    def forked(self) -> None:
        """Belong to no loop again: the parent's loop does not run here."""
        self.random.seed()
        self._owners = _Owners()
        self.loop = None
        self._tasks = set()


def wall_clock() -> float:
    """Unix time, seconds. For people to read; never for exclusion."""
    return time.time()


def in_forked_child(function: Callable[[], None]) -> None:
    """Have `function` called in every child process, right after ``fork``."""
    os.register_at_fork(after_in_child=function)
