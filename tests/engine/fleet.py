"""
A fleet of clients comes back from an outage: how long renewals queue at the server, and how much time the leases had.

``python -m tests.engine.fleet`` prints the table of ``docs/explanation/scale.md``.

The engine is lockkit's own, on simulated time. The server runs one batch of renewals after the other; while it is down
it refuses connections, as a server that restarts does. It renews whatever it is asked to: nobody else wants the locks.
Each simulated lease stands for `WEIGHT` of them, each of which takes its time at the server: so the queue is that of a
fleet so much larger.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockkit.backend import Grant, Renewal, Renewed
from lockkit.errors import BackendUnavailable
from lockkit_tools.simulation import (
    LockServer,
    Network,
    Node,
    Process,
    SimulatedBackend,
    SimulatedRuntime,
    World,
    connect,
)

CLIENTS, LEASES, WEIGHT = 1000, 2, 500
TTL = 30.0
RENEWAL_SECONDS = 3e-6
"""What one renewal takes at the server, seconds."""

OUTAGE = (60.0, 80.0)
END = 120.0
START_SECONDS = 1.0
"""All clients start within this time: the worst case, a fleet that was deployed at once."""

CALL_SECONDS = 5.0
REFUSED_SECONDS = 0.001


@dataclass
class Fleet:
    """
    What a run has shown. Times are whole seconds since the start.

    Attributes:
        delays: The longest wait of a renewal that was sent in this second, seconds.
        margins: How much time was left to the lease of these that was nearest to its deadline when its answer came,
            seconds.
        lost: How many leases were lost.
    """

    delays: dict[int, float] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    lost: int = 0


class BusyServer(LockServer):
    """A server with a queue, for renewals only."""

    def __init__(self, world: World, fleet: Fleet, seconds: float) -> None:
        """Start idle; a simulated lease takes so many seconds."""
        self._seconds = seconds
        self.network = Network(world)
        super().__init__(Node(world, "server"), self.network, [])
        self._world = world
        self._fleet = fleet
        self._free_at = 0.0
        self.deadlines: dict[str, Any] = {}

    def enqueue(self, grants: Sequence[Grant]) -> float | None:
        """Take in a batch; return in how many seconds it is done, None if the server is down."""
        now, fleet = self._world.now, self._fleet
        if OUTAGE[0] <= now < OUTAGE[1]:
            return None
        self._free_at = max(self._free_at, now) + len(grants) * self._seconds
        delay = self._free_at - now
        left = min(self.deadlines[grant.owner].valid_until for grant in grants) - now - delay
        second = int(now)
        fleet.delays[second] = max(fleet.delays.get(second, 0.0), delay)
        fleet.margins[second] = min(fleet.margins.get(second, TTL), left)
        return delay


class QueueingBackend(SimulatedBackend):
    """Renewals go through the queue."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """Wait as long as the server takes."""
        assert isinstance(self._server, BusyServer)
        delay, runtime = self._server.enqueue(grants), SimulatedRuntime(self._process)
        if delay is None or delay > CALL_SECONDS:
            await runtime.sleep(REFUSED_SECONDS if delay is None else CALL_SECONDS)
            message = "connection refused" if delay is None else "no answer"
            raise BackendUnavailable(message)
        await runtime.sleep(delay + 0.001)
        return [Renewed()] * len(grants)


class Steady(random.Random):
    """Not random where lockkit spreads its calls: a third of the ttl, and the middle of each pause."""

    def uniform(self, a: float, b: float) -> float:
        """Give always the same."""
        return b if b < 1 else (a + b) / 2


def run(clients: int = CLIENTS, *, jitter: bool = True, seconds: float = RENEWAL_SECONDS, seed: int = 1) -> Fleet:
    """Run a fleet."""
    fleet, world = Fleet(), World(seed, steps_max=100_000_000)
    weight = WEIGHT * CLIENTS // clients
    server = BusyServer(world, fleet, weight * seconds)

    def lost(*_: object) -> None:
        fleet.lost += weight

    async def hold(process: Process, names: list[str]) -> None:
        if not jitter:
            process.random = Steady(process.name)
        client = connect(process, server, server.network, backend=QueueingBackend, ttl=TTL)
        leases = [await client.lock(name, renew=True, on_lost=lost).acquire() for name in names]
        for lease in leases:
            server.deadlines[lease.owner] = lease._record
        await SimulatedRuntime(process).sleep(2 * END)

    for number in range(clients):
        process = world.process(f"client{number}")
        names = [f"{number}-{lease}" for lease in range(LEASES)]
        world.call_at(number / clients * START_SECONDS, process.start, hold(process, names), "hold")
    world.run(until=END)
    world.end()
    for _, error in world.failures:
        raise error
    return fleet


def row(name: str, fleet: Fleet) -> str:
    """Sum a run up, as a row of the table of the page."""
    after = max(delay for second, delay in fleet.delays.items() if second >= OUTAGE[1])
    return f"| {name} | {after:.1f} s | {min(fleet.margins.values()):.1f} s | {fleet.lost:,} |"


RUNS: dict[str, Callable[[], Fleet]] = {
    "at random times, as lockkit does": run,
    "at random times, 7 µs for a renewal": lambda: run(200, seconds=7e-6),
    "in step, for comparison": lambda: run(jitter=False),
}
"""The rows of the page: when clients renew. The last takes minutes."""


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for name, make in RUNS.items():
        sys.stdout.write(f"{row(name, make())}\n")
