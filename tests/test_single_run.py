"""A single run in the background survives what may happen to it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lockkit.background import SingleRun
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from tests.backends.redis.support import Face
from tests.backends.support import StubHost

FACES = "sync", "asyncio"


def test_one_run_at_a_time() -> None:
    """Who asks while a run is under way waits for that one."""

    async def scenario(host: StubHost) -> None:
        runs, may_end = [], host.runtime.event()

        async def work() -> None:
            runs.append(1)
            await may_end.wait(20.0)

        background = SingleRun(host.runtime, "test", work)
        ended = background.start()
        assert background.start() is ended
        assert background.under_way
        may_end.set()
        assert await ended.wait(20.0)
        assert await background.start().wait(20.0)
        assert len(runs) == 2
        assert not background.under_way

    for face in FACES:
        Face(face).run(scenario)


def test_exception_is_logged_and_the_next_start_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """It does not stay "under way" for ever."""

    async def scenario(host: StubHost) -> None:
        outcomes = [ValueError("a bug"), None]
        done = []

        async def work() -> None:
            if (error := outcomes.pop(0)) is not None:
                raise error
            done.append(1)

        background = SingleRun(host.runtime, "lockkit-test", work)
        with caplog.at_level(logging.ERROR, "lockkit"):
            assert await background.start().wait(20.0)
        assert "lockkit-test failed" in caplog.text
        assert await background.start().wait(20.0)
        assert done == [1]
        caplog.clear()

    for face in FACES:
        Face(face).run(scenario)


def test_no_thread_to_run_in(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, and tried again at the next start."""
    runtime = BlockingRuntime()
    done = []

    async def work() -> None:
        done.append(1)

    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    background = SingleRun(runtime, "lockkit-test", work)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "lockkit"):
        patch.setattr(runtime, "spawn", full)
        assert background.start().is_set()
    assert "can't start new thread" in caplog.text
    assert drive(background.start().wait(20.0))
    assert done == [1]


def test_task_cancelled_before_its_first_step() -> None:
    """Its end is told all the same, and the next start begins anew."""
    begun = []

    async def work() -> None:
        begun.append(1)
        await asyncio.sleep(3600 if len(begun) == 1 else 0)

    async def scenario() -> None:
        background = SingleRun(AsyncioRuntime(), "lockkit-test", work)
        ended = background.start()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        assert await ended.wait(20.0)
        assert not background.under_way
        assert await background.start().wait(20.0)
        assert len(begun) == 2

    asyncio.run(scenario())
