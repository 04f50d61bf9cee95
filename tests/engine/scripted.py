"""A backend that does what a test tells it to, over the memory backend; and an engine on it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from lockkit import aio, sync
from lockkit.backend import Busy, Grant, Host, Renewal, Request
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.engine.engine import Engine
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, monotonic
from lockkit.testing.target import Face
from lockkit.testing.timing import PATIENCE

RUNTIMES: dict[Face, type[Runtime]] = {"blocking": BlockingRuntime, "asyncio": AsyncioRuntime}
_spaces = itertools.count()
_made: list[sync.Client] = []


class MovableClock(BlockingRuntime):
    """Real time plus what a test adds: as if the process had been paused."""

    added = 0.0

    def now(self) -> float:
        """See `Runtime.now`."""
        return monotonic() + self.added


def pass_time(client: Any, seconds: float) -> None:  # noqa: ANN401 - a sync client on a `MovableClock`
    """Let time pass, and the watch look at the clock as if it had slept so long."""
    clock = client._engine.runtime
    assert isinstance(clock, MovableClock)
    clock.added += seconds
    client._engine.renewer._watching.wake()


class ScriptedBackend(MemoryBackend):
    """
    The memory backend, with a hook before and after each operation, and a log of what was called.

    A hook may raise (no answer), sleep (a slow answer) or look. After-hooks run when the operation has happened:
    raising there is an answer that was lost.
    """

    def __init__(self, space: str, host: Host) -> None:
        """Start without hooks."""
        super().__init__(space, host)
        self.space = space
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}

    def _enter(self, what: str) -> None:
        self.calls.append(what)
        self.before.get(what, _nothing)()

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        self._enter("try_acquire")
        outcome = await super().try_acquire(request)
        self.after.get("try_acquire", _nothing)()
        return outcome

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`."""
        self._enter("wait")
        await super().wait(request, busy, until)

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        self._enter("abandon")
        await super().abandon(request)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`."""
        self._enter("renew")
        outcomes = await super().renew(grants)
        self.after.get("renew", _nothing)()
        return outcomes

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`."""
        self._enter("release")
        ours = await super().release(grant, answer_by)
        self.after.get("release", _nothing)()
        return ours


def _nothing() -> None:
    """No hook."""


def fail(error: BaseException) -> Callable[[], None]:
    """Make a hook that raises."""

    def hook() -> None:
        raise error

    return hook


def once(hook: Callable[[], None]) -> Callable[[], None]:
    """Make a hook that acts only the first time."""
    left = [hook]

    def first() -> None:
        if left:
            left.pop()()

    return first


class Gate:
    """A hook that hangs until it is opened, then perhaps raises; `reached` waits for its call."""

    def __init__(self, error: BaseException | None = None) -> None:
        """Shut it."""
        self.open = threading.Event()
        self._entered = threading.Event()
        self._error = error

    def __call__(self) -> None:
        """Hang."""
        self._entered.set()
        self.open.wait(2 * PATIENCE)
        if self._error is not None:
            raise self._error

    def reached(self) -> None:
        """Wait until it is called."""
        assert self._entered.wait(PATIENCE)


def scripted(runtime: Runtime | None = None, space: str | None = None, **options: Any) -> tuple[Any, ScriptedBackend]:
    """Make a client on a scripted backend."""
    made: list[ScriptedBackend] = []
    space = f"scripted{next(_spaces)}" if space is None else space

    def open_backend(host: Host) -> tuple[ScriptedBackend, dict[str, Any]]:
        made.append(ScriptedBackend(space, host))
        return made[-1], options

    runtime = BlockingRuntime() if runtime is None else runtime
    if isinstance(runtime, AsyncioRuntime):
        return aio.Client(Engine(open_backend, runtime, aio.Lease)), made[0]
    client = sync.Client(Engine(open_backend, runtime, sync.Lease))
    _made.append(client)
    return client, made[0]


def close_clients() -> None:
    """Close the clients of a test, whose threads would write to the log of a later one; one of asyncio has none."""
    while _made:
        _made.pop().close()
