"""
Virtual time, the processes that live in it, and the order in which their tasks run, fixed by a seed.

Nothing here waits: when no task can run, the time jumps to the next timer.
A step of a task, from one ``await`` that suspends to the next, takes no time and is not interrupted; which of several
runnable tasks steps next is drawn from the seed.

Times without further words are *true time*, seconds since the start, which nothing inside the simulation can see:
a process reads its own `Clock`.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

from lockkit.simulation.clock import Clock
from lockkit.simulation.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.simulation.task import Task

__all__ = ["Overrun", "Timer", "World"]

STEPS_MAX = 200_000
"""Steps after which a simulation is given up. Smaller cuts long schedules; larger is slower to see an endless loop."""


class Overrun(Exception):
    """The simulation did not end within its number of steps: something spins, or the schedule is too long."""


class Timer:
    """Something that will happen at a time, unless it is cancelled."""

    __slots__ = ("_arguments", "_function", "cancelled")

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Made by `World.call_at`."""
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
    """
    Time, timers and tasks.

    Attributes:
        now: The true time.
        current: The task that is running, or None.
        failures: What tasks raised that nobody waited for: bugs of the simulated program.
        mutexes_held: Short sections entered and not left; none may be open when a task suspends.
    """

    def __init__(self, seed: int, *, steps_max: int = STEPS_MAX) -> None:
        """
        Start at true time 0 with nothing in it.

        Args:
            seed: Equal seeds give equal runs of equal programs.
            steps_max: See `Overrun`.
        """
        self.seed = seed
        self.now = 0.0
        self.current: Task[Any] | None = None
        self.failures: list[tuple[Task[Any], BaseException]] = []
        self.processes: list[Process] = []
        self.mutexes_held = 0
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

    def process(self, name: str, *, rate: float = 1.0, offset: float = 0.0, lateness: float = 0.0) -> Process:
        """
        Start a process, which has a monotonic clock and no tasks yet.

        Args:
            name: Unique in this world.
            rate: Seconds that its clock shows per true second.
            offset: What its clock shows at the start of the world.
            lateness: Its timed waits end late by up to this much, as on a busy machine.
        """
        return Process(self, name, Clock(rate=rate, offset=offset), lateness)

    def count(self) -> int:
        """Give the next number: of tasks and timers, in the order in which they were made."""
        self._count += 1
        return self._count

    def call_at(self, when: float, function: Callable[..., object], *arguments: object) -> Timer:
        """Have a plain function called at a time (now, if that has passed)."""
        timer = Timer(function, arguments)
        self._count += 1
        # What falls on one instant happens in random order.
        heappush(self._timers, (max(when, self.now), self._chance(), self._count, timer))
        return timer

    def call_in(self, seconds: float, function: Callable[..., object], *arguments: object) -> Timer:
        """Have a plain function called after a time."""
        return self.call_at(self.now + seconds, function, *arguments)

    def run(self, until: float = inf, *, task: Task[Any] | None = None) -> None:
        """
        Let things happen: until a time, until a task has ended, or until nothing is left that could happen.

        Raises:
            Overrun: The number of steps is used up.
        """
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
        ready.sort(key=_number)
        return ready.pop(int(self._chance() * len(ready)))

    def _advance(self, until: float) -> bool:
        """Go to the next timer and fire it; False if there is none before `until`."""
        timers = self._timers
        while timers and timers[0][3].cancelled:
            heappop(timers)
        if not timers or timers[0][0] > until:
            return False
        when, _, _, timer = heappop(timers)
        self.now = when
        timer.fire()
        return True

    def _step(self, task: Task[Any]) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            message = f"seed {self.seed}: too many steps at {self.now:.6f} s; the next would be of {task.name}"
            raise Overrun(message)
        self.current = task
        try:
            task.step()
        finally:
            self.current = None
        if self.mutexes_held:
            message = f"{task.name} suspended or ended inside a mutex"
            raise AssertionError(message)
        probe = task.process.probe
        if probe is not None:
            probe()

    def end(self) -> None:
        """Crash what is left, so that no coroutine is found unfinished by the garbage collector later."""
        for process in self.processes:
            process.crash()


def _number(task: Task[Any]) -> int:
    return task.number
