"""What simulated background work has in common with that of the other runtimes."""

from __future__ import annotations

from tests.simulation.support import Stage, sleep


def test_background_work_begins_before_it_is_cancelled() -> None:
    """As in an event loop that ends: what was started last runs up to its first wait."""
    stage = Stage()
    alice = stage.process("alice")
    runtime = stage.client(alice)._engine.runtime
    begun: list[float] = []

    async def work() -> None:
        begun.append(alice.now())
        await sleep(alice, 1.0)
        begun.append(alice.now())

    async def story() -> None:
        runtime.spawn("work", work)
        for task in list(alice.tasks.values()):
            if task.name.endswith("/work"):
                task.cancel()
        await sleep(alice, 5.0)

    began = alice.now()
    stage.play(alice, story())
    assert begun == [began]
