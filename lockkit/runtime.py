"""
The only place that knows whether lockkit blocks threads, runs on asyncio, or runs on simulated time.

The engine and the backends are ``async def`` throughout and written once.
They take the clock, sleeping, waiting, background work, random numbers and thread hand-over from a `Runtime`.

- `BlockingRuntime`: what looks like awaiting blocks the thread inside the call. A coroutine driven by `drive` therefore
  never suspends: it ends in ``StopIteration`` at the first ``send``.
- `AsyncioRuntime`: the same coroutines, awaited by tasks of one event loop.
- `lockkit_tools.simulation.SimulatedRuntime`: virtual time, repeatable from a seed.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import select
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from weakref import ref

from lockkit.units import Seconds

if TYPE_CHECKING:
    import asyncio


__all__ = ["AsyncioRuntime", "Begun", "BlockingRuntime", "Event", "Mutex", "Runtime", "drive", "let_go", "monotonic"]

log = logging.getLogger("lockkit")

T = TypeVar("T")
Kind = Literal["blocking", "asyncio", "simulated"]
Work = Callable[[], Coroutine[Any, Any, None]]

_LAST_SECONDS = 1.0  # for the work left when an event loop ends; longer delays its end when the server is gone

# The clock of all deadlines must go on while the machine is suspended: Linux's CLOCK_MONOTONIC (time.monotonic) stops,
# so a laptop or a VM would wake up believing in a lease that is hours old. CLOCK_BOOTTIME counts suspended time
# (clock_gettime(2)). On macOS CLOCK_MONOTONIC does, where time.monotonic (mach_absolute_time) does not.
if sys.platform == "linux":
    _CLOCK_ID = time.CLOCK_BOOTTIME
else:
    _CLOCK_ID = time.CLOCK_MONOTONIC
_clock_gettime = time.clock_gettime


def monotonic() -> float:
    """Client monotonic clock, seconds, including the time that the machine was suspended."""
    return _clock_gettime(_CLOCK_ID)


class Mutex(AbstractContextManager[Any], Protocol):
    """A lock for short sections; as `threading.Lock`."""

    def locked(self) -> bool:
        """Return whether it is held."""
        ...


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

    async def wait(self, timeout: Seconds | None) -> bool:
        """Wait until the flag is up, at most `timeout` seconds (None: without limit); tell whether it is."""
        ...


class Runtime(Protocol):
    """Clock, waiting, background work and random numbers for the engine and the backends."""

    kind: Kind
    random: random.Random

    def now(self) -> float:
        """Client monotonic clock, seconds."""
        ...

    def owner(self) -> str:
        """A fresh owner id: 128 random bits as 32 hexadecimal digits."""
        ...

    def mutex(self) -> Mutex:
        """A lock for short sections without any ``await``."""
        ...

    def event(self) -> Event:
        """A new `Event`, not set."""
        ...

    def current(self) -> object:
        """
        A weak reference to the thread or task that runs now; None outside a task of asyncio. Compared by equality.

        Never the task itself: one that has ended keeps its result or traceback, and with it perhaps a lease, which
        would then be renewed for ever.
        """
        ...

    def relation(self, holder: object) -> str:
        """
        Name `holder` (from `current`) if it cannot go on while the caller waits, for messages; else return "".

        A task that has ended holds nothing any more: whoever has its lease may go on.
        """
        ...

    def bind(self) -> None:
        """Check that the caller runs where this runtime belongs (the event loop of the first use)."""
        ...

    def loop_is_closed(self) -> bool:
        """Tell whether this runtime belongs to an event loop that is closed."""
        ...

    works_at_exit: bool
    """Whether what `spawn` started still runs while the interpreter exits."""

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """
        Run a coroutine function in the background: a daemon thread, or a task. Never call it under a mutex.

        A task is cancelled when its event loop ends, and by code that cancels all tasks. Without `ending` that ends it.
        With it the function is run again, since bodies that clean up while the loop ends still rely on it.
        Only when nothing but background work is left in the loop, `ending` is awaited and that is the end.

        Args:
            name: For stack traces.
            function: What to run.
            ending: See above.

        Raises:
            RuntimeError: No thread can be started, or the event loop has ended.
        """
        ...

    def deliver(self, function: Callable[[], None]) -> None:
        """Call a function where this runtime belongs: here, or in the event loop if this is another thread."""
        ...

    def at_exit(self, function: Work) -> None:
        """Run a coroutine function while the interpreter exits, as far as that is possible."""
        ...

    def blocks_event_loop(self) -> bool:
        """Tell whether waiting here would stop the event loop that this thread runs."""
        ...

    def loop_has_ended(self) -> bool:
        """Tell whether an event loop is needed and none runs, as at the interpreter's exit: then nothing can wait."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; not at all if the time is over already."""
        ...

    async def io(self, value: T | Awaitable[T]) -> T:
        """Return `value`, awaited if it is awaitable: one spelling for a blocking and an asyncio driver."""
        ...

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """
        Run a coroutine to its end even though the caller is being cancelled.

        Under asyncio it is a task of its own, awaited for at most `seconds` (then `TimeoutError`, the task goes on),
        and a further cancellation of the caller leaves it running. Under the blocking runtime
        only the call's own I/O timeouts bound it.
        """
        ...

    async def readable(self, fd: int, timeout: Seconds | None) -> bool:
        """Wait until a file descriptor can be read, at most `timeout` seconds; tell whether it can."""
        ...

    def forked(self) -> None:
        """Forget what belonged to the parent process."""
        ...


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """
    Run a coroutine of lockkit to its end in this thread, without an event loop.

    Raises:
        RuntimeError: The coroutine suspended: something awaited a real awaitable under the blocking runtime.
            That is a bug in lockkit or in a backend, never the caller's.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value  # cast() would be a call, and each lock runs this twice
        return value
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

    Not `threading.Event`: the lock of its condition stays taken if Ctrl-C strikes between the return of
    ``Condition.__enter__`` and the beginning of the ``with``, and every thread that sets the flag hangs from then on.
    Here each waiter sleeps on a lock of its own, which no other thread takes.
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
        self._flag = True
        for sleeper in tuple(self._sleepers):
            with suppress(RuntimeError):  # another thread has woken it already
                sleeper.release()

    async def wait(self, timeout: Seconds | None) -> bool:
        if self._flag:
            return True
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            # Looked at again: a thread that raised the flag in between may not have seen this sleeper.
            return self.is_set() or _acquired(sleeper, timeout) or self.is_set()
        finally:
            self._sleepers.remove(sleeper)


def _acquired(lock: threading.Lock, timeout: Seconds | None) -> bool:
    """Acquire within so many seconds. threading refuses more than about 292 years with OverflowError."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:
        return lock.acquire()
    return lock.acquire(blocking=False) if timeout <= 0 else lock.acquire(timeout=timeout)


def let_go(lock: threading.Condition) -> None:
    """
    Free a library's lock that an interrupt may have left taken, although the thread has left that library.

    A signal handler strikes after any instruction, also after ``threading.Condition.__enter__`` has the lock and before
    the ``with`` has begun that would free it.
    """
    with suppress(RuntimeError):  # not taken by this thread, or not any more
        while True:
            lock.release()


def _current_task() -> asyncio.Task[Any] | None:
    """
    Return the task that runs in this thread now, if any.

    A program that has not imported asyncio runs no event loop, so lockkit does not import it to find out.
    """
    module = sys.modules.get("asyncio")
    if module is None:
        return None
    # Another thread may be in the middle of importing it.
    running_loop = getattr(module, "_get_running_loop", None)
    if running_loop is None or running_loop() is None:
        return None
    return cast("asyncio.Task[Any] | None", module.current_task())


class _OperatingSystem:
    """Clock, random numbers and owner ids: what both runtimes take from the operating system."""

    def __init__(self) -> None:
        self.random = random.Random()  # noqa: S311 - jitter, not secrets
        self._owners: list[str] = []

    now = staticmethod(partial(_clock_gettime, _CLOCK_ID))  # `monotonic`, without a Python frame

    def owner(self) -> str:
        """
        See `Runtime.owner`.

        Drawn many at a time: a system call for each would be a tenth of an acquisition. ``list.pop`` is atomic, so two
        threads never take the same one.
        """
        owners = self._owners  # a signal handler may fork here: the child must not get this list back
        try:
            return owners.pop()
        except IndexError:
            digits = secrets.token_hex(16 * 64)
            owners.extend([digits[start : start + 32] for start in range(32, len(digits), 32)])
            return digits[:32]

    def forked(self) -> None:
        """Draw other random numbers and owner ids than the parent."""
        self.random.seed()
        self._owners = []


class BlockingRuntime(_OperatingSystem):
    """Threads: every wait blocks the calling thread, background work runs in daemon threads."""

    kind: Kind = "blocking"
    works_at_exit = True

    def mutex(self) -> Mutex:
        """See `Runtime.mutex`."""
        return threading.Lock()

    def event(self) -> Event:
        """See `Runtime.event`."""
        return _BlockingEvent()

    def current(self) -> object:
        """
        Return a reference to the thread, not its ident: idents are used again after a thread has ended.

        In a thread that runs an event loop to the running task: tasks share their thread, and are not the same holder.
        """
        return ref(_current_task() or threading.current_thread())

    def relation(self, holder: object) -> str:
        """See `Runtime.relation`."""
        task, its = _current_task(), holder() if isinstance(holder, ref) else None
        if task is None:
            return "this same thread" if its is threading.current_thread() else ""
        if its is task:
            return "this same task"
        if isinstance(its, type(task)) and its.get_loop() is task.get_loop() and not its.done():
            return f"the task {its.get_name()!r} of this thread"
        return ""

    def bind(self) -> None:
        """Threads may all use a blocking client."""

    def loop_is_closed(self) -> bool:
        """See `Runtime.loop_is_closed`. Threads need none."""
        return False

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """See `Runtime.spawn`. A thread is never cancelled."""
        del ending
        threading.Thread(target=lambda: drive(function()), name=name, daemon=True).start()

    def deliver(self, function: Callable[[], None]) -> None:
        """See `Runtime.deliver`. Any thread will do."""
        function()

    def at_exit(self, function: Work) -> None:
        """Run it here: Python 3.12 and later start no thread once the interpreter is finalizing."""
        drive(function())

    def blocks_event_loop(self) -> bool:
        """See `Runtime.blocks_event_loop`."""
        return _current_task() is not None

    def loop_has_ended(self) -> bool:
        """See `Runtime.loop_has_ended`. Threads need none."""
        return False

    async def sleep(self, seconds: float) -> None:
        """See `Runtime.sleep`."""
        time.sleep(max(0.0, seconds))

    async def io(self, value: T | Awaitable[T]) -> T:
        """Return the value: a blocking driver has waited already."""
        return cast("T", value)

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await it here: a thread is not cancelled."""
        del seconds
        return await coroutine

    async def readable(self, fd: int, timeout: Seconds | None) -> bool:
        """See `Runtime.readable`."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        # Rounded up: poll counts whole milliseconds, and 0.4 ms must not become a busy loop.
        return bool(poll.poll(None if timeout is None else -int(-timeout * 1000 // 1)))


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
            # Closed, perhaps just now: then nothing waits there any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, timeout: Seconds | None) -> bool:
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
    """Keep asyncio from reporting an error that no caller waits for any more: the caller has planned a retry."""
    if not task.cancelled():
        task.exception()


def _report(task: asyncio.Task[None]) -> None:
    """Hand what a background task raised to the loop's exception handler now, not when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


_background: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""Tasks of all clients that go on until nothing else is left in their event loop."""


def _others(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Return the tasks of a loop that are no background work."""
    import asyncio  # noqa: PLC0415 - `import lockkit` stays light

    return {task for task in asyncio.all_tasks(loop) if task not in _background}


class Begun(Coroutine[Any, Any, T]):
    """
    A coroutine that begins before it is cancelled.

    If a task is cancelled before its first step, asyncio runs nothing of its coroutine, not even a ``finally``:
    background work that was started just before the event loop ends would be lost.
    """

    __slots__ = ("_begun", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Begin nothing yet."""
        self._coroutine = coroutine
        self._begun = False

    def send(self, value: Any) -> Any:  # noqa: ANN401 - as of any coroutine
        """See `Coroutine.send`."""
        self._begun = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as of any coroutine
        """See `Coroutine.throw`."""
        if not self._begun:
            self.send(None)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()


async def _outlive_others(function: Work, ending: Work) -> None:
    """See `Runtime.spawn`: run the function again when it is cancelled, until only background work is left."""
    import asyncio  # noqa: PLC0415 - `import lockkit` stays light

    task = asyncio.current_task()
    assert task is not None, "only a task is spawned"
    _background.add(task)
    while True:
        try:
            await function()
        except asyncio.CancelledError:
            if not _cancel_when_alone(task):
                await _end(ending)
                raise
        else:
            return


async def _end(ending: Work) -> None:
    """Await it for a limited time; again if it is cancelled: all tasks are cancelled first, then the loop ends."""
    import asyncio  # noqa: PLC0415 - `import lockkit` stays light

    for _ in range(2):
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await ending()
        except asyncio.CancelledError:
            continue
        except TimeoutError:
            log.warning("an event loop ended before everything was released at its backend")
        return


def _cancel_when_alone(task: asyncio.Task[Any]) -> bool:
    """Cancel a background task (again) as soon as no other is left in its loop; False if none is now."""
    others = _others(task.get_loop())

    def ended(other: asyncio.Task[Any]) -> None:
        others.discard(other)
        # They may have started others while they ended.
        if not others and not task.done() and not _cancel_when_alone(task):
            task.cancel()

    for other in tuple(others):
        other.add_done_callback(ended)
    return bool(others)


def _resolve(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class AsyncioRuntime(_OperatingSystem):
    """Tasks of one event loop: the loop in which the runtime is first used."""

    kind: Kind = "asyncio"
    works_at_exit = False

    def __init__(self) -> None:
        """Belong to no loop yet."""
        super().__init__()
        import asyncio  # noqa: PLC0415 - `import lockkit` stays light

        self._asyncio = asyncio  # once: an import in each call would take as long as the call
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread_id = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def mutex(self) -> Mutex:
        """See `Runtime.mutex`. A real lock: ``__del__`` and other clients run in other threads."""
        return threading.Lock()

    def event(self) -> Event:
        """See `Runtime.event`."""
        return _AsyncioEvent(self)

    def current(self) -> object:
        """See `Runtime.current`."""
        task = self._asyncio.current_task()
        return None if task is None else ref(task)

    def relation(self, holder: object) -> str:
        """See `Runtime.relation`."""
        return "this same task" if holder == self.current() else ""

    def bound_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that this belongs to; the running one becomes it at the first use."""
        if self.loop is None:
            self.loop = self._asyncio.get_running_loop()
            self.thread_id = threading.get_ident()
        return self.loop

    def bind(self) -> None:
        """
        Check the loop.

        Raises:
            RuntimeError: Called from another event loop, or from no loop at all.
        """
        running = self._asyncio.get_running_loop()
        if running is not self.loop:
            if self.loop is not None:
                raise RuntimeError("it belongs to the event loop in which it was first used")
            self.bound_loop()

    def loop_is_closed(self) -> bool:
        """See `Runtime.loop_is_closed`."""
        return self.loop is not None and self.loop.is_closed()

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """See `Runtime.spawn`."""
        if self.loop is None or self.thread_id == threading.get_ident():
            self._start(name, function, ending)
        else:  # a thread of the application has looked at a lease, and found it lost
            self.loop.call_soon_threadsafe(self._start, name, function, ending)

    def _start(self, name: str, function: Work, ending: Work | None) -> None:
        task = self._task(function() if ending is None else _outlive_others(function, ending), name)
        task.add_done_callback(_report)

    def blocks_event_loop(self) -> bool:
        """See `Runtime.blocks_event_loop`. Awaiting stops no other task."""
        return False

    def loop_has_ended(self) -> bool:
        """See `Runtime.loop_has_ended`."""
        try:
            self._asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False

    def deliver(self, function: Callable[[], None]) -> None:
        """See `Runtime.deliver`."""
        if self.loop is None or self.thread_id == threading.get_ident():
            function()
            return
        with suppress(RuntimeError):  # closed: the leases of that loop have ended with it
            self.loop.call_soon_threadsafe(function)

    def at_exit(self, function: Work) -> None:
        """Run it as far as it goes without an event loop, which has ended: memory and file release, sockets cannot."""
        coroutine = function()
        try:
            coroutine.send(None)
        except StopIteration:
            return
        coroutine.close()

    def _task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        # The loop keeps only weak references to tasks (asyncio documentation, create_task).
        try:
            task: asyncio.Task[T] = self.bound_loop().create_task(Begun(coroutine), name=name)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """See `Runtime.sleep`."""
        await self._asyncio.sleep(seconds)

    async def io(self, value: T | Awaitable[T]) -> T:
        """See `Runtime.io`."""
        if isinstance(value, Awaitable):
            return await value
        return value

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """See `Runtime.settle`."""
        task = self._task(coroutine, "lockkit-settle")
        task.add_done_callback(_retrieve)
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes in the instant in which the task ends
        # (bpo-37658), and the caller would go on acquiring although it was cancelled.
        await self._asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TimeoutError(f"not settled within {seconds:g} s")
        return task.result()

    async def readable(self, fd: int, timeout: Seconds | None) -> bool:
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
        super().forked()
        self.loop = None
        self._tasks = set()


def wall_clock() -> float:
    """Unix time, seconds. For people to read; never for exclusion."""
    return time.time()


def in_forked_child(function: Callable[[], None]) -> None:
    """Have `function` called in every child process, right after ``fork``."""
    os.register_at_fork(after_in_child=function)
