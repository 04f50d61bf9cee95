"""Virtual time, and the order in which tasks run."""

from __future__ import annotations

import pytest

from lockkit_tools.simulation import Cancelled, Overrun, SimulatedRuntime, World
from tests.simulation.support import sleep


def test_order_does_not_depend_on_the_order_of_waking() -> None:
    """Tasks woken in the order of a set (which differs from run to run) step in the order of the seed."""

    def ran(*, backwards: bool) -> list[int]:
        world = World(3)
        process = world.process("p")
        runtime = SimulatedRuntime(process)
        events = [runtime.event() for _ in range(8)]
        done: list[int] = []

        async def wait(number: int) -> None:
            await events[number].wait(None)
            done.append(number)

        def wake() -> None:
            for event in reversed(events) if backwards else events:
                event.set()

        for number in range(8):
            process.start(wait(number), str(number))
        world.call_at(1.0, wake)
        world.run()
        return done

    assert ran(backwards=False) == ran(backwards=True)


def test_crashed_process_has_no_effect_any_more() -> None:
    """Its finally blocks run, as the interpreter closes coroutines, but they can neither wait nor start anything."""
    world = World(1)
    process = world.process("p")
    effects: list[str] = []

    async def other() -> None:
        effects.append("a task started by a dead process")

    async def run() -> None:
        try:
            await sleep(process, 10.0)
        finally:
            process.start(other(), "other")
            await sleep(process, 1.0)
            effects.append("waited")

    task = process.start(run(), "run")
    watcher = world.process("watcher")
    joined = watcher.start(task.join(), "join")
    world.call_at(1.0, process.crash)
    world.run()

    assert effects == []
    assert task.done
    assert joined.result() is True, "who waits elsewhere for a task of it learns of its end"


def test_cancelled_task_is_interrupted_where_it_waits() -> None:
    """Also if what it waited for has happened in the same instant; and its clean-up may wait."""
    world = World(1)
    process = world.process("p")
    event = SimulatedRuntime(process).event()
    log = []

    async def run() -> None:
        try:
            await event.wait(None)
            log.append("went on")
        except Cancelled:
            await sleep(process, 1.0)
            log.append("cleaned up")
            raise

    task = process.start(run(), "run")

    def both() -> None:
        event.set()
        task.cancel()

    world.call_at(1.0, both)
    world.run()

    assert log == ["cleaned up"]
    with pytest.raises(Cancelled):
        task.result()


def test_endless_loop_is_an_overrun() -> None:
    """A task that never lets time pass does not hang the test."""
    world = World(1, steps_max=100)
    process = world.process("p")

    async def run() -> None:
        while True:
            await sleep(process, 0.0)

    process.start(run(), "run")

    with pytest.raises(Overrun, match="p/run"):
        world.run()
    world.end()


def test_waiting_inside_a_mutex_is_found() -> None:
    """Nothing may be awaited while the engine's mutex is held: a thread would hold up all the others."""
    world = World(1)
    process = world.process("p")
    runtime = SimulatedRuntime(process)

    async def run() -> None:
        with runtime.mutex():
            await runtime.sleep(1.0)

    process.start(run(), "run")

    with pytest.raises(AssertionError, match="inside a mutex"):
        world.run()
    world.mutexes_held = 0
    world.end()
