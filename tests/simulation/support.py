"""A small world for the tests of single parts: one server, one network, and clients by name."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

from lockkit.aio import Client
from lockkit_tools.simulation import (
    CHECKS,
    Conditions,
    History,
    LockServer,
    Network,
    Node,
    Process,
    SimulatedRuntime,
    Simulation,
    Verdict,
    World,
    connect,
)
from lockkit_tools.simulation.checker import Problem
from lockkit_tools.simulation.evidence import read
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


def judge_by_clients(simulation: Simulation, grants: Sequence[tuple[str, int]]) -> Verdict:
    """
    Judge a schedule that was run by what clients believed, where no lock server is to compare with.

    Args:
        simulation: The schedule.
        grants: Name and token of each grant, also of those that were not handed out.
    """
    try:
        seen = read(simulation.history)
    except Exception as error:  # noqa: BLE001 - nothing is known about this history
        return Verdict("unknown", reason=f"{type(error).__name__}: {error}")
    problems = [
        problem
        for name in ("exclusion", "deadlines", "loss", "storage")
        for problem in CHECKS[name](seen, simulation.limits)
    ]
    problems += [Problem("progress", bug.at, repr(bug)) for bug in seen.bugs]
    problems += [
        Problem("tokens", 0.0, f"lock {name!r}: token {token} was granted {times} times")
        for (name, token), times in Counter(grants).items()
        if times > 1
    ]
    newest: dict[str, int] = {}
    for acquired in sorted((lease.acquired for lease in seen.leases.values()), key=lambda acquired: acquired.at):
        if acquired.token <= newest.get(acquired.name, 0):
            text = f"lock {acquired.name!r}: token {acquired.token} after {newest[acquired.name]}"
            problems.append(Problem("tokens", acquired.at, text))
        newest[acquired.name] = max(acquired.token, newest.get(acquired.name, 0))
    return Verdict("invalid", tuple(problems)) if problems else Verdict("valid")


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
