"""
Virtual time, the processes that live in it, and their tasks, which run in an order fixed by a seed.

Nothing here waits: when no task can run, the time jumps to the next timer.
A step of a task, from one ``await`` that suspends to the next, takes no time and is not interrupted; which of several
runnable tasks steps next is drawn from the seed.

Times without further words are *true time*, seconds since the start, which nothing inside the simulation can see:
a process reads its own `Clock`.

One module, since its three parts need each other: a world steps the tasks of its processes, a task waits by the clock
of its process, and a process stops its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from types import coroutine
from typing import Any, Generic, TypeVar, cast

from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.clock import Clock

T = TypeVar("T")

STEPS_MAX = 200_000
"""Steps after which a simulation is given up. Smaller cuts long schedules; larger is slower to see an endless loop."""


class Overrun(Exception):
    """The simulation did not end within its number of steps: something spins, or the schedule is too long."""


class Timer:
    """Something that will happen at a time, unless it is cancelled."""

    __slots__ = ("_arguments", "_function", "cancelled")

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        """Make it not happen."""
        self.cancelled = True

    def fire(self) -> None:
        """Make it happen now."""
        self._function(*self._arguments)


class World:
    """Time, timers and tasks."""

    def __init__(self, seed: int, *, steps_max: int = STEPS_MAX) -> None:
        self.seed = seed
        self.now = 0.0
        self.current: Task[Any] | None = None  # the one that is running
        self.failures: list[tuple[Task[Any], BaseException]] = []  # that nobody awaited: bugs of the simulated program
        self.processes: list[Process] = []
        self.mutexes_held = 0  # short sections entered and not left; none may be open when a task suspends
        self.probe: Callable[[], object] | None = None  # called after each timer, to watch the machines from outside
        self.ready: list[Task[Any]] = []
        self._steps_left = steps_max
        self._timers: list[tuple[float, float, int, Timer]] = []
        self._count = 0
        self._chance = self.chance("order").random

    def chance(self, purpose: str) -> random.Random:
        """
        Make a source of random numbers of its own for one purpose.

        Separate, so that one more number drawn here does not change all that happens there.
        """
        return random.Random(f"{self.seed} {purpose}")

    def process(self, name: str, *, rate: float = 1.0, offset: float = 0.0, lateness: Seconds = 0.0) -> Process:
        """Start a process, which has a monotonic clock and no tasks yet."""
        return Process(self, name, Clock(rate=rate, offset=offset), lateness)

    def count(self) -> int:
        """Give the next number: of tasks and timers, in the order in which they were made."""
        self._count += 1
        return self._count

    def call_at(self, when: Instant, function: Callable[..., object], *arguments: object) -> Timer:
        """Have a plain function called at a time (now, if that has passed)."""
        timer = Timer(function, arguments)
        self._count += 1
        # What falls on one instant happens in random order.
        heappush(self._timers, (max(when, self.now), self._chance(), self._count, timer))
        return timer

    def call_in(self, seconds: float, function: Callable[..., object], *arguments: object) -> Timer:
        """Have a plain function called after a time."""
        return self.call_at(self.now + seconds, function, *arguments)

    def run(self, until: Instant = inf, *, task: Task[Any] | None = None) -> None:
        """Let things happen: until a time, until a task has ended, or until nothing is left that could happen."""
        while task is None or not task.done:
            if self.ready:
                self._step(self._draw())
            elif not self._advance(until):
                break
        if task is None and until != inf:
            self.now = max(self.now, until)

    def _draw(self) -> Task[Any]:
        """Take one of the runnable tasks. Sorted first: they may have been woken in the order of a set."""
        ready = self.ready
        if len(ready) == 1:
            return ready.pop()
        ready.sort(key=attrgetter("number"))
        return ready.pop(int(self._chance() * len(ready)))

    def _advance(self, until: Instant) -> bool:
        """Go to the next timer and fire it; False if there is none before `until`."""
        timers = self._timers
        while timers and timers[0][3].cancelled:
            heappop(timers)
        if not timers or timers[0][0] > until:
            return False
        when, _, _, timer = heappop(timers)
        self.now = when
        timer.fire()
        if self.probe is not None:
            self.probe()
        return True

    def _step(self, task: Task[Any]) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Overrun(f"seed {self.seed}: too many steps at {self.now:.6f} s; the next would be of {task.name}")
        self.current = task
        try:
            task.step()
        finally:
            self.current = None
        if self.mutexes_held:
            raise AssertionError(f"{task.name} suspended or ended inside a mutex")
        probe = task.process.probe
        if probe is not None:
            probe()

    def end(self) -> None:
        """Crash what is left, so that no coroutine is found unfinished by the garbage collector later."""
        for process in self.processes:
            process.crash()


TICK = 1e-9
"""A timed wait never ends early, however the clocks round: it is this much longer, seconds. Must exceed the rounding
errors of clocks with large offsets, else a loop that waits for a deadline would spin without time going on."""


class Process:
    """One program. Made by `World.process`."""

    __slots__ = (
        "_frozen", "_lateness", "_lingering", "_received", "at_crash", "background", "clock", "dead", "name", "paused",
        "probe", "random", "refuses_tasks", "tasks", "world",
    )  # fmt: skip

    def __init__(self, world: World, name: str, clock: Clock, lateness: Seconds) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.random = world.chance(f"process {name}")  # for the runtime
        self.paused = False  # stopped (SIGSTOP, a frozen virtual machine): none of its tasks runs, its clock goes on
        self.dead = False  # crashed; its tasks are gone, and nothing that they left has any effect
        self.at_crash: list[Callable[[], object]] = []  # called when it crashes, before its tasks are closed
        # Called after each step of one of its tasks, to watch from outside what the program believes.
        self.probe: Callable[[], object] | None = None
        self.tasks: dict[int, Task[Any]] = {}
        self.background: set[int] = set()  # by number: they go on until nothing else is left (`SimulatedRuntime.spawn`)
        self.refuses_tasks = False  # no background work can be started, as by a system that has no threads left
        self._lingering: list[Task[Any]] = []
        self._frozen: list[Task[Any]] = []
        self._received: list[Callable[[], object]] = []
        self._lateness = lateness
        world.processes.append(self)

    def now(self) -> float:
        """What its clock shows."""
        return self.clock.read(self.world.now)

    def start(self, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool = False) -> Task[T]:
        """Run a coroutine as a task of this process."""
        task = Task(self, coroutine, f"{self.name}/{name}", awaited=awaited)
        if self.dead:
            coroutine.close()
            task.done = True
        else:
            self.tasks[task.number] = task
            self.make_ready(task)
        return task

    def cancel_when_alone(self, task: Task[Any]) -> bool:
        """Cancel a background task (again) as soon as no other kind is left; False if none is now."""
        if self.background.issuperset(self.tasks):
            return False
        self._lingering.append(task)
        return True

    def ended(self, task: Task[Any]) -> None:
        """Called by a task that has ended."""
        self.tasks.pop(task.number, None)
        self.background.discard(task.number)
        if self._lingering and self.background.issuperset(self.tasks):
            lingering, self._lingering = self._lingering, []
            for other in lingering:
                other.cancel()

    def make_ready(self, task: Task[Any]) -> None:
        """Let a task run as soon as the process does."""
        assert not self.dead, "a dead process runs nothing"
        (self._frozen if self.paused else self.world.ready).append(task)

    def waiter(self, seconds: float | None) -> Waiter:
        """Prepare the running task for a wait."""
        if self.dead:
            raise ProcessDied
        task = self.world.current
        assert task is not None, "only a running task can wait"
        assert task.process is self, "a task waits by its own process"
        waiter = Waiter(task)
        if seconds is not None:
            seconds = seconds / self.clock.rate + TICK
            if self._lateness:
                seconds += self._lateness * self.random.random()
            waiter.timer = self.world.call_in(seconds, waiter.wake, None)
        return waiter

    def receive(self, function: Callable[[], object]) -> None:
        """Run a function in it now, or as soon as it goes on."""
        if self.paused:
            self._received.append(function)
        elif not self.dead:
            function()

    def pause(self) -> None:
        """Stop it, as SIGSTOP does."""
        if self.paused or self.dead:
            return
        self.paused = True
        world = self.world
        self._frozen = [task for task in world.ready if task.process is self]
        world.ready = [task for task in world.ready if task.process is not self]

    def resume(self) -> None:
        """Let it go on, as SIGCONT does."""
        self.paused = False
        frozen, self._frozen = self._frozen, []
        self.world.ready += frozen
        received, self._received = self._received, []
        for function in received:
            self.receive(function)

    def crash(self) -> None:
        """
        End it at once, as SIGKILL does.

        Its coroutines are closed, which runs their ``finally`` blocks, but nothing that those do has an effect: what
        they would wait for raises `ProcessDied`. To crash from one of its own tasks use ``world.call_in(0, ...)``.
        """
        if self.dead:
            return
        self.dead = True
        self.probe = None
        for function in self.at_crash:
            function()
        self._frozen = []
        self._received = []
        self._lingering = []
        self.world.ready = [task for task in self.world.ready if task.process is not self]
        tasks, self.tasks = self.tasks, {}
        # First nobody of them waits any more: closing one must not wake another.
        for task in tasks.values():
            if task.waiter is not None:
                task.waiter.forget()
        for task in tasks.values():
            task.close()


class Cancelled(asyncio.CancelledError):
    """A task was cancelled, as by ``asyncio.Task.cancel``."""


class ProcessDied(BaseException):
    """Ends the coroutines of a crashed process: whatever they try while they are being closed, they get this."""


class Task(Generic[T]):
    """A coroutine that runs in steps."""

    __slots__ = (
        "__weakref__", "_awaited", "_cancelled", "_cancelling", "_coroutine", "_error", "_joining", "_value", "done",
        "name", "number", "process", "waiter", "wake_value",
    )  # fmt: skip

    def __init__(self, process: Process, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool) -> None:
        self.process = process
        self.name = name
        self.number = process.world.count()  # in the order in which tasks were started
        self.done = False
        self.waiter: Waiter | None = None
        self.wake_value: object = None
        self._coroutine = coroutine
        self._awaited = awaited
        self._cancelled = False
        self._cancelling = 0
        self._joining: list[Waiter] = []
        self._value: T | None = None
        self._error: BaseException | None = None

    def step(self) -> None:
        """Run up to the next wait. Called by the world only."""
        value, self.wake_value = self.wake_value, None
        try:
            if self._cancelled:
                self._cancelled = False
                self._coroutine.throw(Cancelled())
            else:
                self._coroutine.send(value)
        except StopIteration as stop:
            self._value = stop.value
        except Cancelled as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - kept for who joins, or for the world's list
            self._error = error
            if not self._awaited:
                self.process.world.failures.append((self, error))
        else:
            return
        self._end()

    def _end(self) -> None:
        self.done = True
        self.process.ended(self)
        for waiter in self._joining:
            waiter.wake(self)

    def cancel(self, message: str | None = None) -> None:
        """Have `Cancelled` raised where it waits, also if it has just been woken. No effect once it has ended."""
        del message
        if self.done:
            return
        self._cancelling += 1
        self._cancelled = True
        if self.waiter is not None:
            self.waiter.wake(None)

    def cancelling(self) -> int:
        """How many cancellations were asked for, less those that `uncancel` took back; as of ``asyncio.Task``."""
        return self._cancelling

    def uncancel(self) -> int:
        """Take one cancellation back, which was handled; gives how many are left, as ``asyncio.Task`` does."""
        self._cancelling = max(0, self._cancelling - 1)
        return self._cancelling

    def close(self) -> None:
        """End it without further steps: its process has died."""
        self._error = ProcessDied()
        with contextlib.suppress(ProcessDied):
            self._coroutine.close()
        self._end()

    async def join(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, for at most `seconds` on the waiting task's clock; tell whether it has."""
        if self.done:
            return True
        world = self.process.world
        assert world.current is not None, "only a running task can wait"
        waiter = world.current.process.waiter(seconds)
        self._joining.append(waiter)
        try:
            return await waiter.park() is self
        finally:
            self._joining.remove(waiter)

    def result(self) -> T:
        """Give what it returned, or raise what it raised. Once only: the task keeps nothing of it alive."""
        assert self.done, "the task has not ended"
        value, self._value = self._value, None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # a traceback that refers to itself would keep everything in its frames for the collector
        return cast("T", value)


class Waiter:
    """One wait of one task. The first `wake` counts."""

    __slots__ = ("_task", "timer")

    def __init__(self, task: Task[Any]) -> None:
        self._task: Task[Any] | None = task
        self.timer: Timer | None = None

    @property
    def task_name(self) -> str:
        """Of the task that waits; empty if it does not any more."""
        return "" if self._task is None else self._task.name

    def wake(self, value: object) -> None:
        """Let the task go on with a value, which `park` gives; without effect the second time."""
        task = self._task
        if task is not None:
            self.forget()
            task.wake_value = value
            task.process.make_ready(task)

    def forget(self) -> None:
        """Wake nobody any more."""
        if self._task is not None:
            self._task.waiter = None
            self._task = None
        if self.timer is not None:
            self.timer.cancelled = True

    async def park(self) -> Any:  # noqa: ANN401 - whatever it is woken with
        """Suspend the task until it is woken."""
        task = self._task
        assert task is not None, "a waiter serves one wait"
        task.waiter = self
        try:
            return await _suspend()
        finally:
            self.forget()


@coroutine
def _suspend() -> Generator[None, Any, Any]:
    return (yield)
