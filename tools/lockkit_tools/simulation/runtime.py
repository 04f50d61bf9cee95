"""The runtime of a simulated process: what the core sees of virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from lockkit.runtime import Begun, Event, Kind, Mutex, Work
from lockkit.units import Seconds
from lockkit_tools.simulation.world import Cancelled, Process, ProcessDied, Waiter, World

if TYPE_CHECKING:
    import random


T = TypeVar("T")


class SimulatedRuntime:
    """
    Implements `lockkit.runtime.Runtime` for one process of a `World`.

    It behaves like asyncio: tasks that run until they wait, and that can be cancelled where they wait.
    """

    kind: Kind = "simulated"
    works_at_exit = False

    def __init__(self, process: Process) -> None:
        self.process = process
        self.random: random.Random = process.random
        self.now = process.now
        self._mutexes = _Mutex(process.world)

    def owner(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def mutex(self) -> Mutex:
        """Give a section that must be left before the task waits, which the world checks."""
        return self._mutexes

    def event(self) -> Event:
        return _Event(self.process)

    def current(self) -> object:
        task = self.process.world.current
        return None if task is None else ref(task)

    def relation(self, holder: object) -> str:
        return "this same task" if holder == self.current() else ""

    def bind(self) -> None:
        """A simulated client may be used by every task of its process."""

    def loop_is_closed(self) -> bool:
        """A simulated process has one loop."""
        return False

    def spawn(self, name: str, function: Work, ending: Work | None = None) -> None:
        """See `Runtime.spawn`. It may fail as a thread may that cannot be started."""
        assert not self._mutexes.locked(), f"{name} is started under a mutex"
        if self.process.dead:
            return
        # What keeps leases must go on all the same; a callback that cannot be started is logged, and that is all.
        if self.process.refuses_tasks and ending is not None:
            raise RuntimeError("can't start new thread")
        self.process.start(Begun(function() if ending is None else self._outlive_others(function, ending)), name)

    async def _outlive_others(self, function: Work, ending: Work) -> None:
        """Run it again when it is cancelled, until nothing but background work is left."""
        process = self.process
        task = process.world.current
        assert task is not None, "only a task is spawned"
        process.background.add(task.number)
        while True:
            try:
                await function()
            except Cancelled:
                if not process.cancel_when_alone(task):
                    await ending()
                    raise
            else:
                return

    def deliver(self, function: Callable[[], None]) -> None:
        function()

    def at_exit(self, function: Work) -> None:
        """Do nothing: the exit of the real interpreter is no event of a simulated world."""

    def blocks_event_loop(self) -> bool:
        return False

    def loop_has_ended(self) -> bool:
        return False

    async def sleep(self, seconds: float) -> None:
        await self.process.waiter(seconds).park()

    async def io(self, value: T | Awaitable[T]) -> T:
        if hasattr(value, "__await__"):
            return await value
        return value

    async def settle(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        task = self.process.start(coroutine, "settle", awaited=True)
        if self.process.dead:
            raise ProcessDied
        if not await task.join(seconds):
            raise TimeoutError
        return task.result()

    async def readable(self, fd: int, timeout: Seconds | None) -> bool:
        """Refuse: no file descriptor of this machine is part of a simulated world."""
        message = f"a simulated process cannot wait for file descriptor {fd} (for {timeout} s): simulate the backend"
        raise RuntimeError(message)

    def forked(self) -> None:
        """See `Runtime.forked`. Nothing of the parent is kept here."""


class _Mutex:
    """Counts who is inside."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None:
        self._world.mutexes_held += 1
        assert self._world.mutexes_held == 1, "a mutex is not taken inside another: that could deadlock"

    def __exit__(self, *details: object) -> None:
        self._world.mutexes_held -= 1

    def locked(self) -> bool:
        """Tell whether somebody is inside."""
        return self._world.mutexes_held > 0


class _Event:
    """An event for the tasks of one process."""

    __slots__ = ("_flag", "_process", "_waiters")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._flag = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._flag

    def clear(self) -> None:
        self._flag = False

    def set(self) -> None:
        self._flag = True
        for waiter in self._waiters:
            waiter.wake(self)

    async def wait(self, timeout: Seconds | None) -> bool:
        if self._flag:
            return True
        waiter = self._process.waiter(timeout)
        self._waiters.append(waiter)
        try:
            return await waiter.park() is self
        finally:
            self._waiters.remove(waiter)
