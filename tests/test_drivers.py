"""Drivers that know only one form serve both APIs."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

import pytest

from lockkit.drivers import DriverLoop, in_thread
from lockkit.errors import BackendUnavailable
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.testing.timing import PATIENCE

T = TypeVar("T")
RUNTIMES = [BlockingRuntime, AsyncioRuntime]


def run(runtime: Runtime, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it as the API of that runtime does."""
    return drive(coroutine) if runtime.kind == "blocking" else asyncio.run(coroutine)


class Interrupted(BlockingRuntime):
    """One whose waits Ctrl-C strikes, as soon as what they wait for has begun."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self._begun = begun

    def event(self) -> Any:  # noqa: ANN401 - of the base
        event = super().event()

        async def wait(_: float | None) -> bool:
            assert self._begun.wait(PATIENCE)
            raise KeyboardInterrupt

        class Struck:
            set = event.set

        struck: Any = Struck()
        struck.wait = wait
        return struck


@pytest.mark.parametrize("make", RUNTIMES)
class TestInThread:
    """A function that blocks."""

    def test_result_comes_from_another_thread(self, make: Callable[[], Runtime]) -> None:
        """So an event loop goes on meanwhile."""
        runtime = make()

        assert run(runtime, in_thread(runtime, threading.get_ident, PATIENCE)) != threading.get_ident()

    def test_exception_is_raised_where_it_is_waited_for(self, make: Callable[[], Runtime]) -> None:
        """The driver's own one, for the backend to translate."""
        runtime = make()

        with pytest.raises(ZeroDivisionError):
            run(runtime, in_thread(runtime, lambda: 1 // 0, PATIENCE))

    def test_hanging_function_is_left_in_time(self, make: Callable[[], Runtime]) -> None:
        """Its thread goes on."""
        runtime = make()
        release, ended = threading.Event(), threading.Event()

        def hang() -> None:
            release.wait(PATIENCE)
            ended.set()

        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            run(runtime, in_thread(runtime, hang, 0.05))

        assert not ended.is_set()
        release.set()
        assert ended.wait(PATIENCE)

    def test_where_no_thread_starts_it_runs_here(
        self, make: Callable[[], Runtime], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As while the interpreter exits, when clients release what they hold; but it blocks no event loop."""
        runtime = make()

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)

            assert drive(in_thread(runtime, threading.get_ident, PATIENCE)) == threading.get_ident()
            if runtime.kind == "asyncio":
                with pytest.raises(BackendUnavailable, match="can't create new thread"):
                    run(runtime, in_thread(runtime, threading.get_ident, PATIENCE))


@pytest.mark.parametrize("make", RUNTIMES)
class TestDriverLoop:
    """A driver that knows only asyncio."""

    def test_all_coroutines_run_in_one_loop(self, make: Callable[[], Runtime]) -> None:
        """Also if the sync API calls from several threads: a connection belongs to its loop."""
        runtime = make()
        loop = DriverLoop(runtime)

        async def which() -> tuple[int, int]:
            return id(asyncio.get_running_loop()), threading.get_ident()

        async def twice() -> list[tuple[int, int]]:
            return [await loop.run(which()) for _ in range(2)]

        first, second = run(runtime, twice())
        loop.stop()

        assert first == second
        assert (first[1] == threading.get_ident()) == (runtime.kind == "asyncio")

    def test_exception_is_raised_where_it_is_waited_for(self, make: Callable[[], Runtime]) -> None:
        """The driver's own one."""
        runtime = make()
        loop = DriverLoop(runtime)

        async def fail() -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(runtime, loop.run(fail()))
        loop.stop()


async def stubborn(begun: threading.Event, ended: threading.Event) -> None:
    """Swallow a cancellation, as a driver does that waits with `asyncio.wait_for` before Python 3.12."""
    try:
        begun.set()
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        begun.set()
    try:
        await asyncio.sleep(3600)
    finally:
        ended.set()


def test_swallowed_cancellation_is_repeated() -> None:
    """The task of the caller ends cancelled, and the driver's coroutine has ended before."""
    begun, ended = threading.Event(), threading.Event()

    async def main() -> None:
        task = asyncio.create_task(DriverLoop(AsyncioRuntime()).run(stubborn(begun, ended)))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)

    asyncio.run(main())
    assert ended.is_set()


def test_interrupt_of_the_sync_api_cancels_the_coroutine() -> None:
    """Nothing goes on at the server that nobody waits for."""
    begun, ended = threading.Event(), threading.Event()
    loop = DriverLoop(Interrupted(begun))

    with pytest.raises(KeyboardInterrupt):
        drive(loop.run(stubborn(begun, ended)))

    assert ended.wait(PATIENCE)
    loop.stop()


def test_stopped_loop_ends_its_thread_and_starts_anew() -> None:
    """A client that was closed leaves no thread behind."""
    loop = DriverLoop(BlockingRuntime())

    async def thread() -> threading.Thread:
        return threading.current_thread()

    first = drive(loop.run(thread()))
    loop.stop()
    first.join(PATIENCE)

    assert not first.is_alive()
    assert drive(loop.run(thread())) is not first
    loop.stop()


def test_loop_that_is_dropped_ends_its_thread() -> None:
    """An application that connects for each call and closes no client gathers no threads."""
    loop = DriverLoop(BlockingRuntime())

    async def thread() -> threading.Thread:
        return threading.current_thread()

    its_thread = drive(loop.run(thread()))
    del loop
    gc.collect()
    its_thread.join(PATIENCE)

    assert not its_thread.is_alive()


def test_loop_without_a_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more of them for a while: a call would wait for ever for a loop that nobody runs."""
    loop = DriverLoop(BlockingRuntime())

    async def thread() -> threading.Thread:
        return threading.current_thread()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailable, match="can't start new thread"):
            drive(loop.run(thread()))

    assert drive(loop.run(thread())) is not threading.current_thread()
    loop.stop()


@pytest.mark.parametrize("swallows", [False, True])
def test_stopped_loop_ends_calls_under_way(monkeypatch: pytest.MonkeyPatch, *, swallows: bool) -> None:
    """With an error that backends know: a CancelledError would end the caller's thread, or nothing would."""
    monkeypatch.setattr("lockkit.drivers._LAST_SECONDS", 0.05 if swallows else PATIENCE)
    loop, begun, raised = DriverLoop(BlockingRuntime()), threading.Event(), []

    async def answer_never() -> None:
        begun.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not swallows:
                    raise

    def call() -> None:
        with pytest.raises(BackendUnavailable, match="the client was closed") as caught:
            drive(loop.run(answer_never()))
        raised.append(caught.value)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE)
    loop.stop()
    thread.join(PATIENCE)

    assert raised


def test_call_that_begins_while_the_loop_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came to a loop that was closed by then, and its coroutine was never awaited."""
    loop = DriverLoop(BlockingRuntime())
    started = loop._started
    stoppers: list[threading.Thread] = []

    def started_and_stopped() -> asyncio.AbstractEventLoop:
        first = started()
        stoppers.append(threading.Thread(target=loop.stop))
        stoppers[0].start()
        stoppers[0].join(0.2)  # it may not come between: then it waits for the mutex
        return first

    async def answer_never() -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(loop, "_started", started_and_stopped)
    with pytest.raises(BackendUnavailable):
        drive(loop.run(answer_never()))
    stoppers[0].join(PATIENCE)


def test_stopped_loop_ends_what_the_driver_left_behind() -> None:
    """Tasks that go on in the background are cancelled, and their cleaning up is awaited."""
    loop = DriverLoop(BlockingRuntime())
    cleaned = threading.Event()
    tasks = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    async def begin() -> None:
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    drive(loop.run(begin()))
    loop.stop()

    assert cleaned.wait(PATIENCE)


@pytest.mark.parametrize("make", RUNTIMES)
def test_stop_waits_for_the_threads_of_a_driver_in_rust(make: Callable[[], Runtime]) -> None:
    """While one keeps the context of a call it may need the interpreter, which must not end before."""
    runtime = make()
    kept: list[Context] = []
    touched: list[int] = []

    def touch() -> None:
        touched.append(len(kept))
        if len(touched) == 3:
            kept.clear()

    async def answered() -> str:
        kept.append(copy_context())
        return "answer"

    loop = DriverLoop(runtime, touch)
    assert run(runtime, loop.run(answered())) == "answer"
    assert touched == []

    loop.stop()
    loop.stop()

    assert touched == [1, 1, 1]
