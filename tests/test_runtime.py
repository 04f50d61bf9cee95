"""The runtimes: the same coroutine, blocking and awaited."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

import lockkit
import lockkit.aio
from lockkit.runtime import (
    AsyncioRuntime,
    BlockingRuntime,
    Runtime,
    _acquired,
    _BlockingEvent,
    drive,
)
from lockkit.testing.timing import PATIENCE
from tests.interrupts import OpcodeStrike, elsewhere
from tests.tries import until_async


def test_drive_returns_the_result_and_passes_exceptions() -> None:
    """Without an event loop."""

    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise KeyError("x")

    assert drive(answer()) == 42
    with pytest.raises(KeyError):
        drive(fail())


def test_drive_names_the_coroutine_that_suspended() -> None:
    """A bug of ours or of a backend; its finally blocks still run."""
    ended: list[bool] = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match=r"suspends suspended under the blocking runtime"):
        drive(suspends())
    assert ended == [True]


def test_clock_counts_suspended_time() -> None:
    """CLOCK_BOOTTIME on Linux: here it is an hour ahead of CLOCK_MONOTONIC, as after a suspend."""
    script = """
        import time
        real = time.clock_gettime
        time.clock_gettime = lambda clock: real(clock) + (3600 if clock == time.CLOCK_BOOTTIME else 0)
        from lockkit.runtime import AsyncioRuntime, BlockingRuntime, monotonic
        for now in (monotonic, BlockingRuntime().now, AsyncioRuntime().now):
            assert now() - real(time.CLOCK_MONOTONIC) > 3500, now
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.parametrize("kind", [BlockingRuntime, AsyncioRuntime])
def test_event_is_set_from_another_thread(kind: type[Runtime]) -> None:
    """And waited for without polling."""
    runtime = kind()

    async def scenario() -> None:
        event = runtime.event()
        assert not await event.wait(0.01)
        threading.Timer(0.05, event.set).start()
        assert await event.wait(30)
        assert event.is_set()
        assert await event.wait(0)
        event.clear()
        assert not event.is_set()
        assert not await event.wait(0)

    # In debug mode asyncio refuses calls from other threads that do not wake the loop.
    drive(scenario()) if isinstance(runtime, BlockingRuntime) else asyncio.run(
        asyncio.wait_for(scenario(), PATIENCE), debug=True
    )


@pytest.mark.parametrize("kind", [BlockingRuntime, AsyncioRuntime])
def test_readable(kind: type[Runtime]) -> None:
    """A pipe with and without something in it."""
    runtime = kind()

    async def scenario() -> None:
        reader, writer = os.pipe()
        try:
            assert not await runtime.readable(reader, 0.01)
            threading.Timer(0.05, os.write, (writer, b"x")).start()
            assert await runtime.readable(reader, 30)
            assert await runtime.readable(reader, None)
        finally:
            os.close(reader)
            os.close(writer)

    drive(scenario()) if isinstance(runtime, BlockingRuntime) else asyncio.run(scenario())


def wait_for(event: _BlockingEvent, seconds: float) -> bool:
    """As a blocking client does."""
    return drive(event.wait(seconds))


def test_interrupt_anywhere_in_a_wait_harms_nobody_else() -> None:
    """Others go on to set the flag, and to wait for it."""
    number = 0
    while True:
        event = _BlockingEvent()
        strike = OpcodeStrike(number, _BlockingEvent.wait.__code__, _acquired.__code__)
        strike.during(partial(wait_for, event, 0.001))

        assert elsewhere(event.set), f"instruction {number}"
        assert elsewhere(partial(wait_for, event, 20)), f"instruction {number}"
        if not strike.struck:
            break
        number += 1
    assert number > 10


def test_sleep_that_is_over_already_is_no_error() -> None:
    """A caller looks at the clock, and its time is over when it sleeps."""
    drive(BlockingRuntime().sleep(-1e-6))
    asyncio.run(AsyncioRuntime().sleep(-1e-6))


def test_very_long_wait_is_no_overflow() -> None:
    """Beyond what the operating system takes for a timeout."""
    runtime = BlockingRuntime()
    event = runtime.event()
    threading.Timer(0.02, event.set).start()

    assert drive(event.wait(1e12))


def test_settle_goes_on_when_the_caller_is_cancelled() -> None:
    """What is being undone is undone."""
    runtime = AsyncioRuntime()
    done = asyncio.Event()

    begun, go_on = asyncio.Event(), asyncio.Event()

    async def undo() -> None:
        begun.set()
        await go_on.wait()
        done.set()

    async def scenario() -> None:
        caller = asyncio.create_task(runtime.settle(undo(), 60))
        await begun.wait()
        caller.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.wait_for(done.wait(), PATIENCE)

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_settle_swallows_no_cancellation(turns: int) -> None:
    """Whoever is cancelled in the instant in which the undoing ends does not go on."""
    runtime = AsyncioRuntime()

    async def scenario() -> None:
        undone = asyncio.Event()
        caller = asyncio.create_task(runtime.settle(undone.wait(), 60))
        await asyncio.sleep(0.01)
        undone.set()
        for _ in range(turns):
            await asyncio.sleep(0)

        cancelled = caller.cancel()

        await asyncio.wait([caller])
        assert caller.cancelled() == cancelled

    asyncio.run(scenario())


def test_settle_is_bounded() -> None:
    """A backend that hangs does not hang the caller."""
    runtime = AsyncioRuntime()
    hang = asyncio.Event()

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await runtime.settle(hang.wait(), 0.05)

    asyncio.run(scenario())


def test_background_failure_reaches_the_loop() -> None:
    """Not swallowed, and not only when the task is collected."""
    runtime = AsyncioRuntime()
    told: list[dict[str, object]] = []

    async def fail() -> None:
        raise KeyError("x")

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        runtime.spawn("lockkit-test", fail)
        await until_async(lambda: told)

    asyncio.run(scenario())
    assert [context["message"] for context in told] == ["lockkit-test failed"]


def test_owner_ids_are_32_hexadecimal_digits_and_differ() -> None:
    """128 bits each."""
    owners = {BlockingRuntime().owner() for _ in range(1000)}

    assert len(owners) == 1000
    assert all(len(owner) == 32 and int(owner, 16) >= 0 for owner in owners)


def test_forked_child_draws_other_owner_ids() -> None:
    """Ids are drawn ahead; parent and child must not both use those that were left."""
    runtime = BlockingRuntime()
    runtime.owner()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        runtime.forked()
        os.write(writer, runtime.owner().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = os.read(reader, 32).decode()
    os.close(reader)
    os.close(writer)

    assert len(child) == 32
    assert child not in {runtime.owner() for _ in range(200)}


# -- other ways to wait ------------------------------------------------------------------------------------------------


def a_task() -> object:
    """Return one."""
    return object()


def no_task() -> object:
    """Say that there is none, as trio does."""
    raise RuntimeError("must be called from async context")


@pytest.mark.parametrize(
    ("name", "module", "attribute", "refused"),
    [
        ("eventlet.patcher", lockkit, {"already_patched": {"thread": True}}, True),
        ("eventlet.patcher", lockkit, {"already_patched": {}}, False),
        ("eventlet.hubs", lockkit, {"_threadlocal": SimpleNamespace(hub=SimpleNamespace(running=True))}, True),
        ("eventlet.hubs", lockkit, {"_threadlocal": SimpleNamespace(hub=SimpleNamespace(running=False))}, False),
        ("eventlet.hubs", lockkit, {"_threadlocal": SimpleNamespace()}, False),
        ("trio", lockkit.aio, {"lowlevel": SimpleNamespace(current_task=a_task)}, True),
        ("trio", lockkit.aio, {"lowlevel": SimpleNamespace(current_task=no_task)}, False),
        ("trio", lockkit.aio, {}, False),
        ("trio", lockkit, {"lowlevel": SimpleNamespace(current_task=a_task)}, False),
    ],
)
def test_program_on_eventlet_or_trio_is_told_when_it_connects(
    monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType, attribute: dict[str, object], *, refused: bool
) -> None:
    """Not by a hang, or an error about event loops. Seen with eventlet 0.41 and trio 0.35, as these stand-ins are."""
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attribute))
    if refused:
        with pytest.raises(lockkit.ConfigurationError, match=f"runs on {name.partition('.')[0]}, which it does not"):
            module.connect("memory://")
    else:
        module.connect("memory://")


def test_client_that_was_made_before_trio_ran_says_so_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a module."""
    client = lockkit.aio.connect("memory://")
    stand_in = SimpleNamespace(lowlevel=SimpleNamespace(current_task=a_task))
    monkeypatch.setitem(sys.modules, "trio", stand_in)

    with pytest.raises(lockkit.ConfigurationError, match="trio"):
        client.lock("a").acquire().send(None)


def test_asyncio_on_trio_is_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As trio-asyncio runs it."""
    stand_in = SimpleNamespace(lowlevel=SimpleNamespace(current_task=a_task))
    monkeypatch.setitem(sys.modules, "trio", stand_in)

    async def main() -> None:
        async with lockkit.aio.connect("memory://") as client, client.lock("a"):
            pass

    asyncio.run(main())
