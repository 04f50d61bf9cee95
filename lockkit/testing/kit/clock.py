"""
The clock of the test kit, and runtimes that live by it.

The clock stands still until a test advances it. Renewals, deadlines and retries are not threads or tasks here: they are
coroutines that `Clock.advance` runs in the thread of the test, each at its time. Calls of the code under test wait in
their own threads and tasks; when one wakes, the clock goes on only after that call has ended or waits again, so that it
sees the time at which it was woken.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from types import coroutine
from typing import Any, TypeAlias
from weakref import ref

from lockkit import validation
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Event, Work, drive
from lockkit.units import Instant, Seconds

__all__ = ["AsyncioKitRuntime", "BlockingKitRuntime", "Clock", "KitRuntime"]

START = 1000.0
"""Where the clock begins, seconds. Any number above 0 does."""

STUCK_SECONDS = 30.0
"""How long a call may wait in real time, seconds, before the kit says that nothing will wake it. Longer keeps a test
hanging that forgot to advance the clock; shorter fails a test on a slow machine."""

SETTLE_SECONDS = 1.0
"""How long `Clock.advance` waits in real time for calls that it woke, seconds. They end or wait again at once, unless
the code under test does something else inside a callback."""

FIRST_ROUNDS = 10
"""How many rounds of the event loop new tasks have until they wait, and tasks that were woken until they have ended."""

SETTLE_ROUNDS = 100
"""How many rounds of the event loop `Clock.advance` leaves to what it woke at a time, before it goes on without it."""


class Clock:
    """
    A clock that a test advances: the fixture ``lockkit_time``.

    Attributes:
        space: Of the clients that live by it.
    """

    _numbers = count(1)

    def __init__(self) -> None:
        """Start to stand still."""
        self.space = f"kit-{next(self._numbers)}"
        self._now = START
        self._timers: list[tuple[float, int, Waiter]] = []
        self._order = count()
        self._ready: deque[Task] = deque()
        self._mutex = threading.Condition()
        self.advancing = threading.Lock()  # until an advance has ended
        self._local = threading.local()
        self._parked: set[object] = set()  # calls that wait
        self._awake: set[object] = set()  # calls that were woken and have neither ended nor waited again
        self._rounds = 0  # of the running event loop, left to those calls so far

    @property
    def elapsed(self) -> float:
        """By how many seconds the test has advanced the clock."""
        return self._now - START

    def advance(self, seconds: Seconds | timedelta) -> Advance:
        """
        Let time pass: run what is due until then, in the order of its times.

        Renewals, deadlines and ``on_lost`` callbacks have run when this returns, and calls in other threads that were
        due have ended. In a coroutine, ``await`` what this returns: other tasks run only then.

        Args:
            seconds: How long; 0 runs what is due now.

        Raises:
            ConfigurationError: Less than 0, or no time.
            RuntimeError: Another thread is advancing the clock.
        """
        until = self._now + validation.seconds(seconds, "seconds")
        if not self.advancing.acquire(blocking=False):
            raise RuntimeError("the clock is being advanced already: advance it from one thread or task at a time")
        return Advance(self, until)

    def until_waiting(self, calls: int = 1) -> None:
        """
        Block, in real time, until so many calls in other threads wait for a lock.

        Raises:
            RuntimeError: They do not.
        """
        with self._mutex:
            if not self._mutex.wait_for(lambda: len(self._parked) >= calls, STUCK_SECONDS):
                message = f"only {len(self._parked)} calls wait for a lock after {STUCK_SECONDS:g} s, not {calls}"
                raise RuntimeError(message)

    def now(self) -> float:
        """The time, seconds."""
        return self._now

    def __repr__(self) -> str:
        """Show the time."""
        return f"<lockkit_time: {self.elapsed:g} s>"

    # -- waiting ---------------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task | None:
        """The background task that runs in this thread now."""
        return getattr(self._local, "task", None)

    def make_ready(self, task: Task) -> None:
        """Run a background task at the next advance, or again. From any thread."""
        self._ready.append(task)

    def call_at(self, at: Instant, waiter: Waiter) -> None:
        """Wake somebody at a time."""
        with self._mutex:
            heappush(self._timers, (at, next(self._order), waiter))

    def forget(self, waiter: Waiter) -> None:
        """Wake somebody no more."""
        with self._mutex:
            self._timers = sorted(timer for timer in self._timers if timer[2] is not waiter)

    def parked(self, call: object) -> None:
        """Note that a call waits."""
        with self._mutex:
            self._awake.discard(call)
            self._parked.add(call)
            self._mutex.notify_all()

    def woke(self, call: object) -> None:
        """Note that a call that waits has been woken."""
        with self._mutex:
            if call in self._parked:
                self._parked.discard(call)
                self._awake.add(call)

    def ended(self, call: object) -> None:
        """Note that a call has ended."""
        with self._mutex:
            self._awake.discard(call)
            self._parked.discard(call)
            self._mutex.notify_all()

    # -- advancing -------------------------------------------------------------------------------------------------

    def run(self, until: Instant) -> bool:
        """Go on until a time; False if tasks of an event loop have to run before."""
        while True:
            self._run_ready()
            if not self._settle():
                return False
            if self._ready:
                continue
            waiter = self._next(until)
            if waiter is None:
                return True
            waiter.wake()  # one at a time: what is due at the same time runs in the order in which it began to wait

    def _next(self, until: Instant) -> Waiter | None:
        """Move the clock to the next timer and return who waits for it; None, and the clock at the end, without one."""
        with self._mutex:
            if not self._timers or self._timers[0][0] > until:
                self._now = until
                return None
            at, _, waiter = heappop(self._timers)
            self._now = max(self._now, at)
            return waiter

    def _settle(self) -> bool:
        """Let the calls that were woken end or wait again; False if the running event loop has to go on for that."""
        here = _running_loop()
        with self._mutex:
            ours = here is not None and any(_loop_of(call) is here for call in self._awake)
            if ours and self._rounds < SETTLE_ROUNDS:
                self._rounds += 1
                return False
            self._rounds = 0
            # A task of this loop that still runs awaits something that is no part of the kit, and one whose loop has
            # ended never goes on. Threads do, and tasks of an event loop in another thread.
            self._awake = {call for call in self._awake if _goes_on_elsewhere(call, here)}
            self._mutex.wait_for(lambda: not self._awake, SETTLE_SECONDS)
            self._awake.clear()
        return True

    def _run_ready(self) -> None:
        while self._ready:
            task = self._ready.popleft()
            before, self._local.task = self.task, task
            try:
                task.step()
            finally:
                self._local.task = before


class Advance:
    """An advance of the clock, which has ended unless tasks of an event loop take part in it. May be awaited."""

    def __init__(self, clock: Clock, until: Instant) -> None:
        """Begin."""
        self._clock = clock
        self._until = until
        self._done = False
        if _unstarted_tasks():
            asyncio.get_running_loop().call_soon(self._begin, FIRST_ROUNDS - 1)  # after their first step
        else:
            self._go_on()

    def _begin(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self._begin, rounds - 1)
        else:
            self._go_on()

    def _go_on(self) -> None:
        try:
            self._done = self._clock.run(self._until)
        except BaseException:
            self._done = True
            self._clock.advancing.release()
            raise
        if self._done:
            self._clock.advancing.release()
        else:
            asyncio.get_running_loop().call_soon(self._go_on)

    def __await__(self) -> Generator[Any, Any, None]:
        """Wait until it has ended, and let the tasks run that it has woken."""
        while not self._done:
            yield from asyncio.sleep(0).__await__()
        for _ in range(FIRST_ROUNDS):
            yield from asyncio.sleep(0).__await__()


def _unstarted_tasks() -> bool:
    """Tell whether the running loop, if any, has tasks that have not begun: they belong to the time before."""
    if _running_loop() is None:
        return False
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return any(
        inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
        for coroutine in coroutines
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _loop_of(call: object) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of a call; None for that of a thread."""
    task = call() if isinstance(call, ref) else None
    return task.get_loop() if isinstance(task, asyncio.Task) else None


def _goes_on_elsewhere(call: object, here: asyncio.AbstractEventLoop | None) -> bool:
    loop = _loop_of(call)
    return loop is None or (loop is not here and loop.is_running())


class Task:
    """A coroutine function that the clock runs."""

    __slots__ = ("_coroutine", "_function")

    def __init__(self, function: Work) -> None:
        """Begin at the next advance."""
        self._function = function
        self._coroutine: Coroutine[Any, Any, None] | None = None

    def step(self) -> None:
        """Run it until it waits."""
        if self._coroutine is None:
            self._coroutine = self._function()
        with suppress(StopIteration):
            self._coroutine.send(None)


class _TaskWaiter:
    """A background task that waits."""

    __slots__ = ("_clock", "_task", "_woken")

    def __init__(self, clock: Clock, task: Task) -> None:
        self._clock = clock
        self._task = task
        self._woken = False

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._clock.make_ready(self._task)

    async def park(self) -> None:
        await _pause()


@coroutine
def _pause() -> Generator[None, None, None]:
    yield


class _ThreadWaiter:
    """A thread that waits inside a call."""

    __slots__ = ("_call", "_clock", "_lock")

    def __init__(self, clock: Clock, call: object) -> None:
        self._clock = clock
        self._call = call
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        self._clock.woke(self._call)
        with suppress(RuntimeError):  # it is awake
            self._lock.release()

    async def park(self) -> None:
        if self._call is not None:
            self._clock.parked(self._call)
        if not self._lock.acquire(timeout=STUCK_SECONDS):
            raise RuntimeError(_stuck())


class _FutureWaiter:
    """A task of an event loop that waits inside a call."""

    __slots__ = ("_call", "_clock", "_future", "_loop")

    def __init__(self, clock: Clock, call: object) -> None:
        self._clock = clock
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        self._clock.woke(self._call)
        if self._loop is _running_loop():
            self._resolve()
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self, error: BaseException | None = None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    async def park(self) -> None:
        if self._call is not None:
            self._clock.parked(self._call)
        stuck = self._loop.call_later(STUCK_SECONDS, self._resolve, RuntimeError(_stuck()))
        try:
            await self._future
        finally:
            stuck.cancel()


Waiter: TypeAlias = _TaskWaiter | _ThreadWaiter | _FutureWaiter
"""Who waits for an event or for a time, in `park` until `wake`, which any thread may call."""


def _stuck() -> str:
    return (
        f"this call has waited for {STUCK_SECONDS:g} s of real time, but the clock of the test stands still: release "
        "the lock, or call lockkit_time.advance(), in another thread or task"
    )


class _Event:
    """An event whose timeouts are times of the clock."""

    __slots__ = ("_flag", "_runtime", "_waiters")

    def __init__(self, runtime: KitRuntime) -> None:
        self._runtime = runtime
        self._flag = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._flag

    def clear(self) -> None:
        self._flag = False

    def set(self) -> None:
        self._flag = True
        for waiter in tuple(self._waiters):
            waiter.wake()

    async def wait(self, timeout: Seconds | None) -> bool:
        if self._flag or (timeout is not None and timeout <= 0):
            return self._flag
        runtime = self._runtime
        waiter = runtime.waiter()
        self._waiters.append(waiter)
        if timeout is not None:
            runtime.clock.call_at(runtime.now() + timeout, waiter)
        try:
            if not self.is_set():  # another thread may have set it meanwhile
                await waiter.park()
        finally:
            self._waiters.remove(waiter)
            runtime.clock.forget(waiter)
        return self.is_set()


class _Calls:
    """What both runtimes have in common: the clock, and which calls acquire at the moment."""

    clock: Clock
    works_at_exit = False

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.now = clock.now
        self._calls: set[object] = set()

    def current(self) -> object:
        return super().current()  # type: ignore[misc]  # of the runtime that the class is mixed into

    def begin_call(self) -> object:
        """Note that the current thread or task acquires; returns it, or None in a nested call."""
        call = self.current()
        if call in self._calls:
            return None
        self._calls.add(call)
        return call

    def end_call(self, call: object) -> None:
        """Note that the call has ended."""
        if call is not None:
            self._calls.discard(call)
            self.clock.ended(call)

    def waiter(self) -> Waiter:
        """Make what the current thread or task waits with."""
        task = self.clock.task
        if task is not None:
            return _TaskWaiter(self.clock, task)
        call = self.current()
        return self._waiter(call if call in self._calls else None)

    def _waiter(self, call: object) -> Waiter:
        raise NotImplementedError

    def event(self) -> Event:
        return _Event(self)  # type: ignore[arg-type]  # one of the two below

    async def sleep(self, seconds: float) -> None:
        await self.event().wait(seconds)

    def loop_has_ended(self) -> bool:
        return False


class BlockingKitRuntime(_Calls, BlockingRuntime):
    """Threads that wait for the clock of a test."""

    def _waiter(self, call: object) -> Waiter:
        return _ThreadWaiter(self.clock, call)

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """See `Runtime.spawn`. What keeps leases is run by the clock; callbacks run here and now."""
        if ending is not None:
            self.clock.make_ready(Task(function))
            return
        thread = threading.Thread(target=lambda: drive(function()), name=name, daemon=True)
        thread.start()
        thread.join(SETTLE_SECONDS)  # so that a callback has run when the call that caused it returns


class AsyncioKitRuntime(_Calls, AsyncioRuntime):
    """Tasks that wait for the clock of a test."""

    def bind(self) -> None:
        """A client of the kit may be used by several event loops, one after the other."""

    def current(self) -> object:
        return super().current() if _running_loop() is not None else None

    def _waiter(self, call: object) -> Waiter:
        return _FutureWaiter(self.clock, call)

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """See `Runtime.spawn`. What keeps leases is run by the clock; callbacks are tasks of the event loop."""
        if ending is not None:
            self.clock.make_ready(Task(function))
        else:
            self.loop = None  # that of the caller
            super().spawn(name, function)

    async def settle(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:  # noqa: ANN401 - any result
        """See `Runtime.settle`. Nobody is cancelled in the clock, nor where a client closes without an event loop."""
        if self.clock.task is not None or _running_loop() is None:
            return await coroutine
        self.loop = None
        return await super().settle(coroutine, seconds)

    def deliver(self, function: Callable[[], None]) -> None:
        function()


KitRuntime = BlockingKitRuntime | AsyncioKitRuntime


class Done:
    """The result of a call that has been done already, and may be awaited all the same."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        """Return at once."""
        yield from ()
