"""Coroutines that run in steps, and what they wait with."""

from __future__ import annotations

import asyncio
import contextlib
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from lockkit.simulation.process import Process
    from lockkit.simulation.world import Timer

__all__ = ["Cancelled", "ProcessDied", "Task", "Waiter"]

T = TypeVar("T")


class Cancelled(asyncio.CancelledError):
    """A task was cancelled, as by ``asyncio.Task.cancel``."""


class ProcessDied(BaseException):
    """Ends the coroutines of a crashed process: whatever they try while they are being closed, they get this."""


class Task(Generic[T]):
    """
    A coroutine that runs in steps.

    Attributes:
        process: Whose it is.
        name: For messages.
        number: In the order in which tasks were started.
        done: It has ended.
    """

    __slots__ = (
        "_awaited", "_cancelled", "_cancelling", "_coroutine", "_error", "_joining", "_value", "done", "name", "number",
        "process", "waiter", "wake_value",
    )  # fmt: skip

    def __init__(self, process: Process, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool) -> None:
        """Made by `Process.start`."""
        self.process = process
        self.name = name
        self.number = process.world.count()
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
        """Made by `Process.waiter`."""
        self._task: Task[Any] | None = task
        self.timer: Timer | None = None

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
