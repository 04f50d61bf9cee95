"""A small world for the tests of single parts: one server, one network, and clients by name."""

from __future__ import annotations

import gc
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from lockkit.aio import Client
from lockkit_tools.simulation import (
    Conditions,
    History,
    LockServer,
    Network,
    Node,
    Process,
    SimulatedRuntime,
    World,
    connect,
)
from lockkit_tools.simulation.server import Wakeup


def apart(seeds: Iterable[int]) -> Iterator[int]:
    """
    Seeds of schedules, each of which the garbage collector leaves alone.

    A lease that a schedule drops, with a cycle around it, would otherwise be collected when so many objects were made,
    by schedules before it or by pytest: what happens would not depend on the seed alone.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for seed in seeds:
            yield seed
            # What the schedule made is young, since nothing was collected meanwhile. What the process has from before
            # can be a million objects, and takes longer than the schedule.
            gc.collect(0)
    finally:
        if enabled:
            gc.enable()


def known_first(known: int, seeds: range) -> Iterator[int]:
    """Give seeds, beginning with one that showed what is looked for: any may, and most runs need no other."""
    yield known
    yield from (seed for seed in seeds if seed != known)


class Stage:
    """A world with a lock server."""

    def __init__(self, seed: int = 1, *, conditions: Conditions | None = None, wakeup: Wakeup = "fair") -> None:
        """Make it; messages take 0.2 to 2 ms unless `conditions` say otherwise."""
        self.world = World(seed)
        self.network = Network(self.world) if conditions is None else Network(self.world, conditions)
        self.node = Node(self.world, "server")
        self.history: History = []
        self.server = LockServer(self.node, self.network, self.history, wakeup=wakeup)

    def process(self, name: str = "alice", **details: float) -> Process:
        """Start a process."""
        return self.world.process(name, **details)

    def client(self, process: Process, *, call_timeout: float = 1.0, ttl: float = 30.0) -> Client:
        """Connect it."""
        return connect(process, self.server, self.network, call_timeout=call_timeout, ttl=ttl)

    def play(self, process: Process, story: Coroutine[Any, Any, None]) -> None:
        """Run a story in a process to its end; what it raises, raises here, and so does what breaks beside it."""
        task = process.start(story, "story", awaited=True)
        self.world.run(task=task)
        assert task.done, "the story waits for something that cannot happen any more"
        task.result()
        for _, error in self.world.failures:
            raise error

    def end(self) -> None:
        """Kill what is left."""
        self.world.end()


async def sleep(process: Process, seconds: float) -> None:
    """Wait on the process's clock."""
    await SimulatedRuntime(process).sleep(seconds)
