"""
A fleet of clients comes back from an outage: how long renewals queue at the server, and how much time the leases had.

``python -m tests.engine.fleet`` writes the data and the chart of ``docs/explanation/scale.md`` anew.

The engine is lockkit's own, on simulated time. The server runs one batch of renewals after the other; while it is down
it refuses connections, as a server that restarts does. It renews whatever it is asked to: nobody else wants the locks.
Each simulated lease stands for `WEIGHT` of them, each of which takes its time at the server: so the queue is that of a
fleet so much larger.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
FOLDER = Path(__file__).parents[2] / "docs" / "explanation"


@dataclass
class Fleet:
    """
    What a run has shown. Times are whole seconds since the start.

    Attributes:
        delays: The longest wait of a renewal that was sent in this second, seconds.
        margins: How much time was left to the lease of these that was nearest to its deadline when its answer came,
            seconds.
        lost: How many leases were lost.
        lost_in_outage: How many of them because their deadline came while the server was down.
    """

    delays: dict[int, float] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    lost: int = 0
    lost_in_outage: int = 0


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
        fleet.lost_in_outage += weight * (OUTAGE[0] <= world.now < OUTAGE[1])

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


def at_cost(micros: int) -> dict[str, float]:
    """Run fewer clients at a server that takes so many µs for a renewal; sum up the time after the outage."""
    fleet = run(200, seconds=micros / 1e6)
    after = [second for second in fleet.delays if second >= OUTAGE[1]]
    return {
        "lost": fleet.lost,
        "longest wait": max(fleet.delays[second] for second in after),
        "least left": min(fleet.margins[second] for second in after),
    }


def data() -> dict[str, Any]:
    """Run the fleet both ways, for the chart, and at slower servers."""
    chart = {name: asdict(run(jitter=jitter)) for name, jitter in (("spread", True), ("in step", False))}
    return {"chart": chart, "by cost in µs": {micros: at_cost(micros) for micros in (3, 5, 7)}}


def as_json(runs: dict[str, Any]) -> str:
    """Write data down as it is committed."""
    return json.dumps(runs, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


WIDTH, HEIGHT, LEFT, TOP = 720, 200, 60, 34
FONT = 'font-family="sans-serif" font-size="12" fill="#777"'
COLOURS = {"spread": "#2066c4", "in step": "#c23b2e"}
LABELS = {"spread": "spread by lockkit", "in step": "in step, for comparison"}


def chart(runs: dict[str, Any]) -> str:
    """Draw the delays of the renewals, and below them the time that the leases had left."""
    height = 2 * (HEIGHT + TOP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" {FONT}>',
        "<title>Renewals of a fleet around an outage of 20 s</title>",
    ]
    parts += _panel(runs, "delays", "Longest wait of a renewal for its answer, seconds", 0, 3)
    parts += _panel(runs, "margins", "Least time that a renewed lease had left, seconds", HEIGHT + TOP, 25)
    for number, name in enumerate(runs):
        x = LEFT + 200 * number
        parts.append(f'<circle cx="{x}" cy="{height - 12}" r="4" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 10}" y="{height - 8}">{LABELS[name]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(runs: dict[str, Any], what: str, title: str, top: int, highest: int) -> list[str]:
    def x(second: float) -> float:
        return LEFT + (second - 40.0) / (END - 40.0) * (WIDTH - LEFT - 10)

    def y(value: float) -> float:
        return top + HEIGHT - max(0.0, value) / highest * (HEIGHT - TOP)

    begin, end = map(x, OUTAGE)
    size = f'width="{end - begin:.1f}" height="{HEIGHT - TOP}"'
    parts = [
        f'<text x="{LEFT}" y="{top + 20}">{title}</text>',
        f'<rect x="{begin:.1f}" y="{y(highest):.1f}" {size} fill="#999" opacity=".2"/>',
        f'<text x="{(begin + end) / 2:.1f}" y="{y(highest) + 16:.1f}" text-anchor="middle">server down</text>',
    ]
    for part in range(6):
        value = highest * part / 5
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - 10}" stroke="#999" stroke-width=".4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts += [
        f'<text x="{x(second):.1f}" y="{y(0) + 16:.1f}" text-anchor="middle">{second} s</text>'
        for second in range(40, int(END) + 1, 10)
    ]
    parts += [
        f'<circle cx="{x(int(second) + 0.5):.1f}" cy="{y(value):.1f}" r="3.5" fill="{COLOURS[name]}" opacity=".8"/>'
        for name, fleet in runs.items()
        for second, value in fleet[what].items()
        if int(second) >= 40
    ]
    return parts


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    text = as_json(data())
    (FOLDER / "fleet.json").write_text(text, "utf-8")
    (FOLDER / "fleet.svg").write_text(chart(json.loads(text)["chart"]), "utf-8")
