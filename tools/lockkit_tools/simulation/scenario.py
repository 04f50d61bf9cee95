"""What a schedule happens to: a world with its network, the lock server, the storage, and the history of it all."""

from __future__ import annotations

from lockkit.units import Seconds
from lockkit_tools.simulation.history import History, Wrote
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.schedule import Schedule
from lockkit_tools.simulation.server import LockServer
from lockkit_tools.simulation.world import Process, World

WALL_CLOCK_WRONG = 1000.0
"""The server's time of day is wrong by up to this, seconds. It must not matter."""


class Scenario:
    """
    The world of one schedule, without its clients.

    Attributes:
        chance: Draws what differs between the machines.
    """

    def __init__(self, schedule: Schedule, server: type[LockServer]) -> None:
        self.schedule = schedule
        self.history: History = []
        self.world = World(schedule.seed)
        self.network = Network(self.world, schedule.conditions)
        self.chance = self.world.chance("machines")
        wrong = self.chance.uniform(-WALL_CLOCK_WRONG, WALL_CLOCK_WRONG)
        self.node = Node(self.world, "server", rate=schedule.server_rate, wall_offset=wrong)
        self.server = server(self.node, self.network, self.history, wakeup=schedule.wakeup, tells=schedule.tells)
        self.storage = Storage(self.world, self.network, self.history)
        self._calls = 0

    def next_call(self) -> int:
        """Number the calls of ``acquire``."""
        self._calls += 1
        return self._calls


class Storage:
    """What the locks protect: it compares fencing tokens, so a late write of a former holder is refused."""

    def __init__(self, world: World, network: Network, history: History) -> None:
        self.node = Node(world, "storage")
        self._network = network
        self._history = history
        self._newest: dict[str, int] = {}

    async def write(self, process: Process, name: str, token: int, timeout: Seconds) -> None:
        """Send a write, and wait for the answer for a while; whether it was accepted is for the history."""
        try:
            await self._network.call(process, self.node, lambda: self._accept(name, token), timeout)
        except NoAnswer:
            return  # it may have been written or not, as any write

    def _accept(self, name: str, token: int) -> None:
        accepted = token >= self._newest.get(name, 0)
        if accepted:
            self._newest[name] = token
        self._history.append(Wrote(self.node.world.now, name, token, accepted))
