"""A program on some machine: its clock, its tasks, and the ways in which a program suffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lockkit.simulation.task import ProcessDied, Task, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lockkit.simulation.clock import Clock
    from lockkit.simulation.world import World

__all__ = ["TICK", "Process"]

T = TypeVar("T")

TICK = 1e-9
"""A timed wait never ends early, however the clocks round: it is this much longer, seconds. Must exceed the rounding
errors of clocks with large offsets, else a loop that waits for a deadline would spin without time going on."""


class Process:
    """
    One program. Made by `World.process`.

    Attributes:
        name: Unique in its world.
        clock: Its monotonic clock.
        random: Its chance, for the runtime.
        paused: Stopped (SIGSTOP, a frozen virtual machine): none of its tasks runs, its clock goes on.
        dead: Crashed. Its tasks are gone; nothing that they left has any effect.
        at_crash: Called when it crashes, before its tasks are closed.
        background: Numbers of the tasks that go on until nothing else is left (`SimulatedRuntime.spawn`).
        refuses_tasks: No background work can be started, as by a system that has no threads left.
        probe: Called after each step of one of its tasks, to watch from outside what the program believes.
    """

    __slots__ = (
        "_frozen", "_lateness", "_lingering", "at_crash", "background", "clock", "dead", "name", "paused", "probe",
        "random", "refuses_tasks", "tasks", "world",
    )  # fmt: skip

    def __init__(self, world: World, name: str, clock: Clock, lateness: float) -> None:
        """Made by `World.process`."""
        self.world = world
        self.name = name
        self.clock = clock
        self.random = world.chance(f"process {name}")
        self.paused = False
        self.dead = False
        self.at_crash: list[Callable[[], object]] = []
        self.probe: Callable[[], object] | None = None
        self.tasks: dict[int, Task[Any]] = {}
        self.background: set[int] = set()
        self.refuses_tasks = False
        self._lingering: list[Task[Any]] = []
        self._frozen: list[Task[Any]] = []
        self._lateness = lateness
        world.processes.append(self)

    def now(self) -> float:
        """What its clock shows."""
        return self.clock.read(self.world.now)

    def start(self, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool = False) -> Task[T]:
        """
        Run a coroutine as a task of this process.

        Args:
            coroutine: What to run. It may wait only by what this module offers, as `SimulatedRuntime` does.
            name: For messages.
            awaited: Somebody will `Task.join` it, so what it raises is no failure of the world.
        """
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
        """
        Prepare the running task for a wait.

        Args:
            seconds: After so many on this process's clock it is woken with None; None: never.

        Raises:
            ProcessDied: The process has crashed, and this is a coroutine of it that is being closed.
        """
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
        self._lingering = []
        self.world.ready = [task for task in self.world.ready if task.process is not self]
        tasks, self.tasks = self.tasks, {}
        # First nobody of them waits any more: closing one must not wake another.
        for task in tasks.values():
            if task.waiter is not None:
                task.waiter.forget()
        for task in tasks.values():
            task.close()
