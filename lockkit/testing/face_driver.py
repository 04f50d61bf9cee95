"""
One test body for the sync and async APIs.

A body is an ``async def`` written against `lockkit.aio`'s interface, with a `FaceDriver` for what differs:

================================ ================================== ==============================
in the body                      on the `SyncDriver`             on the `AsyncDriver`
================================ ================================== ==============================
``await driver.connect()``        `lockkit.connect`                  `lockkit.aio.connect`
``await lock.acquire()``         blocks this thread in the call     awaits the coroutine
``driver.spawn(body())``          a new thread                       a new task
``driver.run(body())``            in this thread, no event loop      in a new event loop
``await driver.call(function)``   calls it                           calls it in a thread
================================ ================================== ==============================

On the blocking driver there is no event loop anywhere: an ``await`` is a blocking call of the real blocking client, and
a body that suspended would be an error. It is the same idea as in `lockkit.runtime`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import lockkit
from lockkit import aio, sync
from lockkit.aio import lock as aio_lock
from lockkit.aio.once import Attempt, Once
from lockkit.backend import Capabilities
from lockkit.runtime import drive, monotonic
from lockkit.sync import lock as sync_lock
from lockkit.sync.once import Attempt as SyncAttempt
from lockkit.sync.once import Once as SyncOnce
from lockkit.testing.processes import Worker
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Face, Target
from lockkit.testing.timing import PATIENCE, Timing
from lockkit.units import Seconds

ASK_PAUSE_MAX = 0.05
"""Seconds between two questions of `FaceDriver.eventually` at most: what it waits for is noticed so much later."""

STALL_SECONDS = 0.15
"""Seconds by which a thread that only sleeps is late where the machine stood still: a tenth of a kept lease's ttl."""

RENEWED_FACTOR_MAX = 4
"""By how much `FaceDriver.renewed` makes a ttl longer at most."""

T = TypeVar("T")
P = TypeVar("P")


class Signal:
    """A flag to wait for, between the calls of one driver."""

    def __init__(self, event: threading.Event | asyncio.Event) -> None:
        self._event = event
        self.set = event.set
        self.is_set = event.is_set

    async def wait(self) -> None:
        """Wait until it is up."""
        assert await self.wait_for(PATIENCE), f"nobody gave the signal within {PATIENCE:g} s"

    async def wait_for(self, seconds: float) -> bool:
        """Wait until it is up, at most `seconds`; tell whether it is."""
        if isinstance(self._event, threading.Event):
            return self._event.wait(seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        return self.is_set()


class BackgroundCall(Generic[T]):
    """A body that runs beside the case: a thread, or a task."""

    def __init__(
        self, future: Future[T] | asyncio.Task[T], wait: Callable[[Seconds], Coroutine[Any, Any, object]]
    ) -> None:
        self.future = future  # its outcome. That of a task is the task, which cases about cancelling cancel.
        self._wait = wait
        self._seen = False

    @property
    def done(self) -> bool:
        """It has ended."""
        return self.future.done()

    async def result(self, timeout: Seconds = PATIENCE) -> T:
        """Wait for its end; return what it returned, raise what it raised."""
        await self._wait(timeout)
        assert self.done, f"the thread or task did not end within {timeout:g} s"
        self._seen = True
        return self.future.result()

    def unseen_error(self) -> BaseException | None:
        """What it raised, if nobody asked for its result."""
        return None if self._seen or not self.done or self.future.cancelled() else self.future.exception()

    async def end(self) -> None:
        """Have it end, the case being over: a task is cancelled, and the waits of a thread ended with its clients."""
        self.future.cancel()
        await self._wait(PATIENCE)
        assert self.done, f"a thread or task of the case did not end within {PATIENCE:g} s after the case"
        self.unseen_error()  # seen: the case has failed already, or closing its client ended it


class FaceDriver(ABC):
    """Runs the body of a case against one face of one backend."""

    face: Face  # of the clients that `connect` makes

    def __init__(self, target: Target, capabilities: Capabilities) -> None:
        self.target = target
        self.capabilities = capabilities  # what it promises
        self.timing = Timing.of(capabilities)  # lease times that suit it
        self._exit = AsyncExitStack()
        self._calls: list[BackgroundCall[Any]] = []

    @abstractmethod
    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Run a case; afterwards close its clients, end its calls and processes."""

    @abstractmethod
    def run_bare(self, body: Coroutine[Any, Any, T]) -> T:
        """Run a body and clean nothing up."""

    async def _play(self, body: Coroutine[Any, Any, T]) -> T:
        async with self._exit:
            self._exit.push_async_callback(self._end_calls)
            result = await body
            for call in self._calls:
                error = call.unseen_error()
                if error is not None:
                    raise error
        return result

    async def _end_calls(self) -> None:
        for call in self._calls:
            await call.end()

    # -- what differs ----------------------------------------------------------------------------------------------

    async def connect(self, target: Target | None = None, **options: Any) -> aio.Client:
        """Make a client, of another target than the driver's if one is given; it is closed after the case."""
        client = self.make_client(target, **options)
        self._exit.push_async_callback(client.close)
        return client

    @abstractmethod
    def make_client(self, target: Target | None = None, **options: Any) -> aio.Client:
        """Make a client that the caller closes."""

    def spawn(self, body: Coroutine[Any, Any, T]) -> BackgroundCall[T]:
        """Run a body beside this one."""
        call = self._spawn(body)
        self._calls.append(call)
        return call

    def forget(self, call: BackgroundCall[Any]) -> None:
        """Keep nothing of a call that has ended, so that its result can be collected."""
        assert call.done, "a call that runs is ended with the case"
        self._calls.remove(call)

    @abstractmethod
    def _spawn(self, body: Coroutine[Any, Any, T]) -> BackgroundCall[T]:
        """Start a thread or task."""

    def signal(self) -> Signal:
        """Make a flag, not set."""
        return Signal(self.stop_event())

    @abstractmethod
    def stop_event(self) -> Any:  # noqa: ANN401 - threading.Event or asyncio.Event, which share set() and is_set()
        """Make the event that `lockkit.Election.run` takes in this API."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait; 0 lets others run."""

    @abstractmethod
    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that blocks without blocking an event loop."""

    # -- what does not ---------------------------------------------------------------------------------------------

    now = staticmethod(monotonic)

    @staticmethod
    def name(text: str = "lock") -> str:
        """Give a lock name that nobody else uses: the backend may be in use by other tests, or by people."""
        return f"{text}-{secrets.token_hex(6)}"

    async def process(self, face: Face | None = None) -> Worker:
        """Start another process with a client of the target, which is killed after the case."""
        worker = await self.call(Worker, self.target, self.face if face is None else face)
        self._exit.push_async_callback(self.call, worker.close)
        return worker

    async def eventually(
        self, ask: Callable[[], bool | Awaitable[bool]], what: str, within: Seconds = PATIENCE
    ) -> None:
        """Ask until the answer is yes."""
        deadline = self.now() + within
        pause = 0.005
        while True:
            answer = ask()
            if answer if isinstance(answer, bool) else await answer:
                return
            assert self.now() < deadline, f"not within {within:g} s: {what}"
            await self.sleep(pause)
            # What takes seconds, a ttl for example, need not be asked hundreds of times: a server has to answer.
            pause = min(pause * 1.5, ASK_PAUSE_MAX)

    async def answered(self, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """
        Make a call with a short timeout, again as long as the server does not answer in time.

        Such a call leaves the server less than half a second. One that stalls for longer has broken no promise.
        """
        deadline = self.now() + PATIENCE
        while True:
            try:
                return await call(*arguments)
            except lockkit.BackendUnavailable:
                if self.now() > deadline:
                    raise
            # A call that fails at once would leave an event loop no turn to connect again.
            await self.sleep(ASK_PAUSE_MAX)

    async def renewed(self, attempt: Callable[[Seconds], Awaitable[T]]) -> T:
        """
        Make an attempt with the ttl of a lease that is to be renewed; if the lease is lost, again with longer ones.

        A machine that stands still for two thirds of a ttl ends the lease, which breaks no promise: so only if it did
        stand still, as far as a thread that only sleeps can tell.
        """
        factor = 1
        while True:
            watch = Stopwatch()
            try:
                return await attempt(factor * self.timing.kept)
            except lockkit.LockLost:
                watch.stop()
                if factor == RENEWED_FACTOR_MAX or watch.longest_stall < STALL_SECONDS:
                    raise
            finally:
                watch.stop()
            factor *= 2

    async def held(self, **options: Any) -> tuple[aio.Client, aio.Client, aio.Lease]:
        """Make a client that holds a lock, by these options, and another client."""
        client, other = await self.connect(), await self.connect()
        lease = await client.lock(self.name(), **{"ttl": self.timing.long, **options}).acquire(PATIENCE)
        return client, other, lease

    async def pass_through(self, client: aio.Client, name: str) -> None:
        """Acquire a lock that is free, or soon will be, and release it."""
        async with client.lock(name, ttl=self.timing.long, timeout=PATIENCE):
            pass

    async def contended(
        self, holder: aio.Client, waiter: aio.Client, **options: Any
    ) -> tuple[aio.Lease, BackgroundCall[aio.Lease]]:
        """Have one client hold a lock, by these options, and another wait for it."""
        name, ttl = self.name(), self.timing.long
        lease = await holder.lock(name, **{"ttl": ttl, **options}).acquire(PATIENCE)
        waiting = self.spawn(waiter.lock(name, ttl=ttl).acquire(2 * PATIENCE))
        await self.until_waiting(waiter, name)
        return lease, waiting

    async def until_waiting(self, client: aio.Client, name: str, contenders_count: int = 1) -> None:
        """Return once so many acquisitions of this client wait for the lock."""
        await self.eventually(
            lambda: waiting_count(client, name) >= contenders_count, f"{contenders_count} waiters for {name!r}"
        )


def waiting_count(client: aio.Client, name: str) -> int:
    """How many acquisitions of a client wait for a lock: at the backend (at most one), or in the client's queue."""
    # Only the client's engine knows.
    return client._engine.acquisitions.waiting_count(name)


# -- blocking ----------------------------------------------------------------------------------------------------------


class SyncDriver(FaceDriver):
    """Threads and `lockkit.connect`."""

    face: Face = "blocking"

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return drive(self._play(body))

    def run_bare(self, body: Coroutine[Any, Any, T]) -> T:
        return drive(body)

    def make_client(self, target: Target | None = None, **options: Any) -> aio.Client:
        # The adapter has the interface of aio.Client; each of its coroutines is one blocking call.
        return cast("aio.Client", adapt((target or self.target).connect(**options)))

    def _spawn(self, body: Coroutine[Any, Any, T]) -> BackgroundCall[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        thread = threading.Thread(target=_run, args=(future, body), name="conformance-call", daemon=True)
        thread.start()

        async def join(seconds: Seconds) -> None:
            thread.join(seconds)

        return BackgroundCall(future, join)

    def stop_event(self) -> threading.Event:
        return threading.Event()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop: to block is what this face does

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


def _run(future: Future[T], body: Coroutine[Any, Any, T]) -> None:
    try:
        future.set_result(drive(body))
    except BaseException as error:  # noqa: BLE001 - handed to the caller of result()
        future.set_exception(error)


def _twins() -> dict[type, type]:
    """Return the classes of the sync API with those of the async API that have the same names."""
    public = [getattr(sync, name) for name in sync.__all__] + [SyncOnce, SyncAttempt]
    others = {other.__name__: other for other in (*(getattr(aio, name) for name in aio.__all__), Once, Attempt)}
    return {one: others[one.__name__] for one in public if isinstance(one, type) and one.__name__ in others}


TWINS = {**_twins(), sync_lock.Attempt: aio_lock.Attempt}


def adapt(value: Any) -> Any:  # noqa: ANN401 - whatever the sync API gives
    """Give an object of the sync API the interface of its twin in the async API; leave others as they are."""
    if isinstance(value, Iterator):
        return _read(value)
    return Adapter(value) if type(value) in TWINS else value


class Adapter:
    """
    `lockkit.aio`'s interface on an object of the sync API: what is a coroutine there is one blocking call here.

    It looks up each name in the class of the async API, so it knows of a new method without being told.
    """

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - of any class in TWINS
        self.inner = inner
        self._twin = TWINS[type(inner)]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the object has
        value = getattr(self.inner, name)
        if not callable(value):
            return adapt(value)
        # `campaign` is none there: it returns an object that can be awaited or entered.
        if inspect.iscoroutinefunction(getattr(self._twin, name, None)) or name == "campaign":
            return partial(_call, value)
        return lambda *arguments, **keywords: adapt(value(*arguments, **keywords))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adapter) and self.inner is other.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - whatever the object has
        return adapt(self.inner[key])

    def __iter__(self) -> Iterator[Any]:
        return map(adapt, self.inner)

    def __call__(self, function: Callable[..., T]) -> Callable[..., T]:
        wrapper: Callable[..., T] = self.inner(function)
        return wrapper

    async def __aenter__(self) -> Any:  # noqa: ANN401 - whatever the object has
        entered = self.inner.__enter__()
        return self if entered is self.inner else adapt(entered)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)


async def _call(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of any method
    """Make the blocking call, with a function in place of a coroutine function (as that of `lockkit.Election.run`)."""
    given = [_blocking(one) if inspect.iscoroutinefunction(one) else one for one in arguments]
    return adapt(method(*given, **keywords))


def _blocking(work: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    return lambda *arguments: drive(work(*map(adapt, arguments)))


async def _read(values: Iterator[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value


# -- asyncio -----------------------------------------------------------------------------------------------------------


class AsyncDriver(FaceDriver):
    """Tasks of one event loop and `lockkit.aio`."""

    face: Face = "asyncio"

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(self._watched(self._play(body)))

    def run_bare(self, body: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(body)

    async def _watched(self, play: Coroutine[Any, Any, T]) -> T:
        """Fail when anything of the client's that ran in the background died, which would only be logged."""
        problems: list[dict[str, Any]] = []

        def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # grpc.aio waits in one loop for all loops of the process, also for those that are closed by now.
            if not ("PollerCompletionQueue" in context["message"] and "closed" in str(context.get("exception"))):
                problems.append(context)

        asyncio.get_running_loop().set_exception_handler(note)
        result = await play
        assert not problems, f"the event loop reported {problems}"
        return result

    def make_client(self, target: Target | None = None, **options: Any) -> aio.Client:
        return (target or self.target).connect_aio(**options)

    def _spawn(self, body: Coroutine[Any, Any, T]) -> BackgroundCall[T]:
        task = asyncio.create_task(body)
        return BackgroundCall(task, lambda seconds: asyncio.wait([task], timeout=seconds))

    def stop_event(self) -> asyncio.Event:
        return asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(function, *arguments)


DRIVERS: dict[Face, type[FaceDriver]] = {"blocking": SyncDriver, "asyncio": AsyncDriver}
FACES: tuple[Face, ...] = tuple(DRIVERS)


def open_fds() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/dev/fd")) - 1  # noqa: PTH208 - one of them is the listing's own
