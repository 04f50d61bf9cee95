"""Virtual time, and the order in which tasks run."""

from __future__ import annotations

import pytest

from lockkit.runtime import Runtime
from lockkit_tools.simulation import Cancelled, Overrun, Process, SimulatedRuntime, World
from tests.simulation.support import sleep


def order(seed: int, tasks: int = 6) -> str:
    """The order in which tasks that could all run did run."""
    world = World(seed)
    process = world.process("p")
    ran = []

    async def run(name: str) -> None:
        for _ in range(3):
            ran.append(name)
            await sleep(process, 1.0)

    for number in range(tasks):
        process.start(run(str(number)), str(number))
    world.run()
    return "".join(ran)


def test_order_is_fixed_by_the_seed() -> None:
    """Equal seeds run the tasks in one order; other seeds in others."""
    assert order(1) == order(1)

    assert len({order(seed) for seed in range(20)}) == 20


def test_every_runnable_task_may_be_next() -> None:
    """Each of three tasks is the first in some seed."""
    assert {order(seed, tasks=3)[0] for seed in range(50)} == {"0", "1", "2"}


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


def test_time_jumps_to_the_next_timer() -> None:
    """An hour passes at once, and a process sees it on its own clock."""
    world = World(1)
    process = world.process("p", rate=1.5, offset=100.0)
    times = []

    async def run() -> None:
        times.append(process.now())
        await sleep(process, 3600.0)
        times.append(process.now())

    world.run(task=process.start(run(), "run"))

    assert times == pytest.approx([100.0, 3700.0])
    assert world.now == pytest.approx(2400.0)


@pytest.mark.parametrize("offset", [0.0, 12345.678, 1e5])
def test_timed_wait_never_ends_early(offset: float) -> None:
    """However the clocks round, who waits for a deadline has reached it: a loop that waits would spin otherwise."""
    world = World(1)
    process = world.process("p", rate=0.9971, offset=offset)
    early = []

    async def run() -> None:
        for step in range(1, 500):
            deadline = process.now() + step * 1e-4
            await sleep(process, deadline - process.now())
            if process.now() < deadline:
                early.append(deadline)

    world.run(task=process.start(run(), "run"))

    assert early == []


def test_paused_process_runs_nothing_while_its_clock_goes_on() -> None:
    """What became due meanwhile happens when it goes on."""
    world = World(1)
    process = world.process("p")
    woken = []

    async def run() -> None:
        await sleep(process, 1.0)
        woken.append(process.now())

    process.start(run(), "run")
    world.call_at(0.5, process.pause)
    world.call_at(30.0, process.resume)
    world.run()

    assert woken == [30.0]


def test_paused_process_receives_when_it_goes_on() -> None:
    """In the order of arrival; what a dead one receives is lost."""
    world = World(1)
    process, dead = world.process("p"), world.process("q")
    received = []

    world.call_at(0.5, process.pause)
    world.call_at(0.5, dead.pause)
    for at in (0.1, 1.0, 2.0):
        world.call_at(at, process.receive, lambda at=at: received.append((at, world.now)))
        world.call_at(at, dead.receive, lambda: received.append(("dead", world.now)))
    world.call_at(1.5, dead.crash)
    world.call_at(30.0, process.resume)
    world.call_at(30.0, dead.resume)
    world.run()

    assert received == [(0.1, 0.1), ("dead", 0.1), (1.0, 30.0), (2.0, 30.0)]


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


def test_exception_that_nobody_waits_for_is_kept() -> None:
    """A background task that breaks does not do so in silence."""
    world = World(1)

    async def run() -> None:
        message = "broken"
        raise ValueError(message)

    world.process("p").start(run(), "run")
    world.run()

    ((task, error),) = world.failures
    assert task.name == "p/run"
    assert repr(error) == "ValueError('broken')"


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


class TestRuntime:
    """`SimulatedRuntime` keeps the promises of `lockkit.runtime.Runtime`."""

    @pytest.fixture
    def process(self) -> Process:
        """A process."""
        return World(1).process("p")

    def test_is_a_runtime(self, process: Process) -> None:
        """By its type, as the type checker sees it."""
        runtime: Runtime = SimulatedRuntime(process)

        assert runtime.kind == "simulated"

    def test_owners_are_random_from_the_seed(self) -> None:
        """32 hexadecimal digits, another each time, the same in each run."""
        first, second = (SimulatedRuntime(World(7).process("p")) for _ in range(2))

        owners = [first.owner() for _ in range(3)]
        assert owners == [second.owner() for _ in range(3)]
        assert len(set(owners)) == 3
        assert all(len(owner) == 32 and int(owner, 16) >= 0 for owner in owners)

    def test_event_wakes_all_who_wait(self, process: Process) -> None:
        """In time, by its timeout, or at once if it is set already."""
        runtime = SimulatedRuntime(process)
        event = runtime.event()
        answers = []

        async def wait(timeout: float | None) -> None:
            answers.append((timeout, await event.wait(timeout), round(process.now(), 3)))

        for timeout in (None, 1.0, 3.0):
            process.start(wait(timeout), "wait")
        process.world.call_at(2.0, event.set)
        process.world.call_at(5.0, lambda: process.start(wait(0.0), "late"))
        process.world.run()

        assert sorted(answers, key=repr) == [(0.0, True, 5.0), (1.0, False, 1.0), (3.0, True, 2.0), (None, True, 2.0)]
        event.clear()
        assert not event.is_set()

    def test_settle_runs_to_its_end_though_the_caller_is_cancelled(self, process: Process) -> None:
        """What must be undone is undone."""
        runtime = SimulatedRuntime(process)
        log = []

        async def undo() -> None:
            await runtime.sleep(5.0)
            log.append("undone")

        task = process.start(runtime.settle(undo(), 10.0), "caller", awaited=True)
        process.world.call_at(1.0, task.cancel)
        process.world.run()

        assert task.done
        assert log == ["undone"]

    def test_settle_waits_only_so_long(self, process: Process) -> None:
        """Then it is a `TimeoutError`, and the coroutine goes on."""
        runtime = SimulatedRuntime(process)
        log = []

        async def undo() -> str:
            await runtime.sleep(5.0)
            log.append("undone")
            return "done"

        task = process.start(runtime.settle(undo(), 1.0), "caller", awaited=True)
        patient = process.start(runtime.settle(undo(), 60.0), "caller", awaited=True)
        process.world.run()

        with pytest.raises(TimeoutError):
            task.result()
        assert patient.result() == "done"
        assert log == ["undone", "undone"]

    def test_cancelled_background_work_may_clean_up(self, process: Process) -> None:
        """As when an event loop ends."""
        runtime = SimulatedRuntime(process)
        log = []

        async def work() -> None:
            await runtime.sleep(100.0)

        async def clean_up() -> None:
            await runtime.sleep(1.0)
            log.append(process.now())

        def cancel_all() -> None:
            for task in list(process.tasks.values()):
                task.cancel()

        runtime.spawn("work", work, clean_up)
        process.world.call_at(2.0, cancel_all)
        process.world.run()

        assert log == [pytest.approx(3.0)]

    def test_io_awaits_what_can_be_awaited(self, process: Process) -> None:
        """One spelling for values and coroutines."""
        runtime = SimulatedRuntime(process)

        async def run() -> list[object]:
            return [await runtime.io(1), (await runtime.io(runtime.sleep(1.0)))]

        task = process.start(run(), "run", awaited=True)
        process.world.run()

        assert task.result() == [1, None]

    def test_file_descriptors_are_refused(self, process: Process) -> None:
        """Nothing of this machine belongs to a simulated world."""
        task = process.start(SimulatedRuntime(process).readable(0, 1.0), "run", awaited=True)
        process.world.run()

        with pytest.raises(RuntimeError, match="simulate the backend"):
            task.result()
