"""Background work goes on whatever happens to it: exceptions, threads that cannot be started, cancelled tasks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.background import Background
from lockkit.errors import LockError
from lockkit.runtime import AsyncioRuntime, BlockingRuntime
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import Gate, MovableClock, fail, pass_time, scripted
from tests.tries import until, until_async, until_renewed, until_renewed_async

SOON = 0.6
"""The ttl of a lease that is to be lost, seconds."""
LONG = 60.0


class NoThreads:
    """A system that refuses to start threads of some names for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: dict[str, int] = {}
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.refused.get(thread.name, 0) > 0:
                self.refused[thread.name] -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


# -- the primitive -----------------------------------------------------------------------------------------------------


def test_work_that_fails_is_logged_and_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """It does not die with the first exception, and says what happened."""
    done = threading.Event()
    failures = iter([RuntimeError("a bug"), None])

    async def work() -> None:
        if (error := next(failures)) is not None:
            raise error
        done.set()

    background = Background(BlockingRuntime(), "lockkit-test", work)
    with caplog.at_level(logging.ERROR, "lockkit"):
        background.wake()
        background.start()
        assert done.wait(PATIENCE)
        until(lambda: not background.running)

    assert "lockkit-test failed" in caplog.text
    assert "a bug" in caplog.text


def test_wake_up_in_the_instant_of_the_end_is_not_missed() -> None:
    """Work that comes while the coroutine returns is done, by this thread or by the next."""
    todo: list[int] = []
    done: list[int] = []

    async def work() -> None:
        while todo:
            done.append(todo.pop())

    background = Background(BlockingRuntime(), "lockkit-test", work)
    for number in range(3000):
        todo.append(number)
        background.wake()
        background.start()
    until(lambda: len(done) == 3000)


# -- renewals and losses -----------------------------------------------------------------------------------------------


def test_renewer_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system out of threads for a moment costs no lease."""
    system = NoThreads(monkeypatch)
    system.refused["lockkit-renew"] = 2
    client = lockkit.connect("memory://renewer")

    with client.lock("x", ttl=LONG) as lease:
        until_renewed(lease, begin=client._engine.confirm_soon)
    assert system.refused["lockkit-renew"] == 0
    client.close()


def test_grant_that_nothing_can_watch_over_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not handed out: its loss could not be told. The next try works."""
    system = NoThreads(monkeypatch)
    system.refused["lockkit-watch"] = 1
    client = lockkit.connect("memory://watch")

    with pytest.raises(LockError, match="released again"):
        client.lock("x", ttl=30).acquire()
    assert client.holders("x") == []
    assert not client._engine.leases.records

    with client.lock("x", ttl=30) as lease:
        assert lease.held
    client.close()


def test_renewals_go_on_when_all_tasks_are_cancelled() -> None:
    """As some frameworks do; what goes on, goes on protected."""

    async def run() -> None:
        async with lockkit.aio.connect("memory://cancelled") as client:
            lease = await client.lock("x", ttl=LONG).acquire()
            await until_renewed_async(lease, begin=client._engine.confirm_soon)  # the renewer runs too
            for _ in range(3):
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await asyncio.sleep(0)
                await until_renewed_async(lease, begin=client._engine.confirm_soon)
            other = await client.lock("y", ttl=SOON, renew=False).acquire()
            assert await other.wait_lost(PATIENCE)
            await lease.release()

    asyncio.run(run())


def test_nothing_is_started_under_the_mutex() -> None:
    """A task factory may run a new task at once, inside the call that makes it (asyncio.eager_task_factory)."""
    client, backend = scripted(AsyncioRuntime())
    engine = client._engine
    started: list[asyncio.Task[Any]] = []

    async def run() -> None:
        def factory(loop: Any, coroutine: Any, **details: Any) -> asyncio.Task[Any]:  # noqa: ANN401 - asyncio's
            assert not engine.client.mutex.locked()
            task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **details)
            started.append(task)
            return task

        asyncio.get_running_loop().set_task_factory(factory)
        backend.before["abandon"] = fail(lockkit.BackendUnavailable("away"))
        async with client.lock("x", ttl=LONG) as held:
            assert await client.lock("x").try_acquire(0.01) is None
            await until_renewed_async(held, begin=client._engine.confirm_soon)
            lease = await client.lock("y", ttl=SOON, renew=False, on_lost=lambda *_: None).acquire()
            assert await lease.wait_lost(PATIENCE)
            await until_async(lambda: "lockkit-on-lost" in {task.get_name() for task in started})
        del backend.before["abandon"]
        await client.close()

    asyncio.run(run())

    names = {task.get_name() for task in started}
    assert names >= {"lockkit-watch", "lockkit-renew", "lockkit-cleanup", "lockkit-on-lost"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio.eager_task_factory is new in Python 3.12")
def test_eager_tasks_do_not_freeze_the_loop() -> None:
    """They begin to run inside ``create_task``."""

    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        async with lockkit.aio.connect("memory://eager") as client, client.lock("x", ttl=LONG) as lease:
            await until_renewed_async(lease, begin=client._engine.confirm_soon)

    asyncio.run(run())


# -- logging -----------------------------------------------------------------------------------------------------------


class SlowHandler(logging.Handler):
    """Uses a lock of the client that logs, and takes its time."""

    def __init__(self, client: lockkit.Client) -> None:
        super().__init__()
        self.client = client
        self.gate = Gate()
        self.over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one record."""
        if "renewal" in record.getMessage():
            with self.client.lock("log", ttl=1000, timeout=PATIENCE):
                self.gate()
            self.over.set()


def test_handler_that_blocks_delays_no_loss_and_no_lock() -> None:
    """Nothing is logged under the mutex: a handler may use locks of the same client, and hang."""
    client, backend = scripted(MovableClock())
    backend.before["renew"] = fail(lockkit.BackendUnavailable("away"))
    handler = SlowHandler(client)
    logger = logging.getLogger("lockkit")
    logger.addHandler(handler)
    try:
        # Not `wait_lost`: it would look at the clock itself, log the loss in this thread, and wait for the handler.
        lost = threading.Event()
        lease = client.lock("x", ttl=LONG, on_lost=lambda *_: lost.set()).acquire()
        pass_time(client, 25.0)
        handler.gate.reached()
        pass_time(client, 36.0)
        assert lost.wait(PATIENCE)
        assert lease.lost
        with client.lock("y", ttl=LONG, renew=False) as other:
            assert other.held
    finally:
        handler.gate.open.set()
        logger.removeHandler(handler)
    assert handler.over.wait(PATIENCE)
    client.close()
