"""Small random schedules for the replay: two or three clients use one lock, a few times each, and things go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from lockkit.aio import Client
from lockkit.errors import LockError
from lockkit_tools.simulation import Conditions, Network, Node, Process, SimulatedRuntime, World
from tests.models.replay import Recorder

Use = Callable[[random.Random, Process, Client], Coroutine[None, None, None]]
"""What one client does."""

TTL = 20.0
"""Seconds, and ticks: margins of clocks (0.2 s) are less than one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in one schedule."""

    chance: random.Random
    clients: int
    conditions: Conditions
    seconds: float = 100.0
    timeouts: tuple[float, ...] = (0.0, 5.0, 3 * TTL)
    renews: bool = True
    crashes: bool = True
    faults: bool = True  # of processes and of the network
    cuts: bool = True  # of the network
    use: Use | None = None  # if not `_use`

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Draw the plan of a seed."""
        chance = random.Random(f"{seed} replay")
        lost = chance.choice((0.0, 0.0, 0.05, 0.15))
        conditions = Conditions(
            latency=(0.001, chance.choice((0.005, 0.5))), requests_lost=lost, answers_lost=lost,
            slow=chance.choice((0.0, 0.0, 0.1)), slow_max=chance.choice((3.0, 1.2 * TTL)),
        )  # fmt: skip
        return cls(chance, chance.choice((2, 3)), conditions)

    def processes(self, world: World) -> list[Process]:
        """Start a process for each client; their clocks differ by less than the margin."""
        return [
            world.process(f"client{index}", rate=1 + self.chance.uniform(-0.004, 0.004), offset=100.0 * index)
            for index in range(self.clients)
        ]


def run(
    plan: Plan, clients: Mapping[Process, Client], recorder: Recorder, network: Network, nodes: Sequence[Node] = ()
) -> None:
    """Let it happen."""
    world, processes = network.world, list(clients)
    for process, client in clients.items():
        process.probe = recorder.look
        chance = world.chance(process.name)
        using = _use(chance, process, client, recorder, plan) if plan.use is None else plan.use(chance, process, client)
        process.start(using, "use")
        for _ in range(plan.chance.choice((0, 0, 1, 2)) if plan.faults else 0):
            at, lasts = plan.chance.uniform(0.0, plan.seconds), plan.chance.uniform(0.5, 1.5 * TTL)
            if not (nodes and plan.cuts) or plan.chance.random() < 0.5:
                world.call_at(at, process.pause)
                world.call_at(at + lasts, process.resume)
            else:
                node = plan.chance.choice(nodes)
                world.call_at(at, network.cut, process, node)
                world.call_at(at + lasts, network.heal, process, node)
    if plan.crashes and plan.chance.random() < 0.3:
        process = plan.chance.choice(processes)
        world.call_at(plan.chance.uniform(0.0, plan.seconds), crash, process, recorder)
    world.run(until=plan.seconds)
    recorder.look()
    problems = [f"{task.name}: {error!r}" for task, error in world.failures]
    world.end()
    assert not problems, problems


def crash(process: Process, recorder: Recorder) -> None:
    """Crash a client."""
    recorder.crashes(process)
    process.crash()


async def _use(chance: random.Random, process: Process, client: Client, recorder: Recorder, plan: Plan) -> None:
    runtime = SimulatedRuntime(process)
    while True:
        await runtime.sleep(chance.uniform(0.0, 10.0))
        renewed = plan.renews and chance.random() < 0.7
        lock = client.lock("x", timeout=chance.choice(plan.timeouts), renew=renewed)
        try:
            lease = await lock.acquire()
        except LockError:
            continue
        recorder.holds(process, lease)
        await runtime.sleep(chance.choice((0.0, chance.uniform(0.0, 5.0), chance.uniform(0.0, 2 * TTL))))
        try:
            await lease.release()
        except LockError:
            continue
