"""Runs a schedule: makes its world, does to it what the schedule says, and judges the history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from lockkit.backend import LockBackend
from lockkit_tools.simulation.backend import SimulatedBackend, connect
from lockkit_tools.simulation.checker import Verdict, check
from lockkit_tools.simulation.history import Broken, Cut, Ended, Healed, History, Stuck
from lockkit_tools.simulation.member import Member
from lockkit_tools.simulation.network import CALM, Network, Node
from lockkit_tools.simulation.schedule import EXTENDED_MAX, Fault, Schedule, draw
from lockkit_tools.simulation.server import LockServer, Storage
from lockkit_tools.simulation.worker import start_workers
from lockkit_tools.simulation.world import Overrun, Process, Task, World


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule came to."""

    schedule: Schedule
    history: History
    verdict: Verdict


def simulate(seed: int, **parts: Any) -> Outcome:
    """Run the schedule of a seed and judge what happened."""
    return Simulation(draw(seed), **parts).run()


WALL_CLOCK_WRONG = 1000.0
"""The server's time of day is wrong by up to this, seconds. It must not matter."""


class Simulation:
    """One run of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        server: type[LockServer] = LockServer,
        backend: Callable[[Process, LockServer, Network, float], LockBackend] = SimulatedBackend,
    ) -> None:
        self.schedule = schedule
        self.history: History = []
        self.world = World(schedule.seed)
        self.network = Network(self.world, schedule.conditions)
        self.chance = self.world.chance("machines")  # draws what differs between the machines
        wrong = self.chance.uniform(-WALL_CLOCK_WRONG, WALL_CLOCK_WRONG)
        self.node = Node(self.world, "server", rate=schedule.server_rate, wall_offset=wrong)
        self.server = server(self.node, self.network, self.history, wakeup=schedule.wakeup, tells=schedule.tells)
        self.storage = Storage(self.world, self.network, self.history)
        self.calls = count(1)  # numbers the calls of ``acquire``
        self.limits = schedule.limits()
        self._backend = backend
        self.clients = [self._join(index, rate) for index, rate in enumerate(schedule.client_rates)]
        self.healed = False
        self._director = self.world.process("director")

    def _join(self, index: int, rate: float) -> Member:
        schedule, offset = self.schedule, self.chance.uniform(0.0, 1e5)
        process = self.world.process(f"client{index}", rate=rate, offset=offset, lateness=schedule.lateness)
        client = connect(
            process,
            self.server,
            self.network,
            call_timeout=schedule.call_timeout,
            backend=self._backend,
            schedule=schedule,
            ttl=schedule.ttl,
            unavailable_after=30.0,
        )
        return Member(schedule, index, process, client, storage=self.storage, history=self.history, calls=self.calls)

    def run(self) -> Outcome:
        """Let it happen, once."""
        world, history = self.world, self.history
        faulty = not self.schedule.calm
        if faulty:
            history.append(Cut(0.0))
        workers = [worker for member in self.clients for worker in start_workers(member)]
        for fault in self.schedule.faults:
            world.call_at(fault.at, self._apply, fault)
        world.call_at(self.schedule.healed_at, self._heal)
        direction = self._director.start(self._direct(workers, faulty=faulty), "main")
        try:
            world.run(task=direction)
        except Overrun as error:
            world.end()
            return Outcome(self.schedule, history, Verdict("unknown", reason=str(error)))
        for task, failure in world.failures:
            history.append(Broken(world.now, task.name, repr(failure)))
        history.append(Ended(world.now))
        world.end()
        return Outcome(self.schedule, history, check(history, self.limits))

    async def _direct(self, workers: list[Task[None]], *, faulty: bool) -> None:
        """Wait for the workers, heal, close what still lives, and look what is left."""
        schedule = self.schedule
        # Enough for every worker to get every lock after everybody else, each held up by everything there is.
        patience = 60 * schedule.ttl * schedule.rounds + 100 * self.limits.free_after_expiry
        for worker in workers:
            if not await worker.join(patience):
                self.history.append(Stuck(self.world.now, worker.process.name, worker.name))
        self._heal()
        # What is still under way arrives, and what must be undone is tried once more (every 0.2 to 0.5 s).
        await self._sleep(self.network.slowest + schedule.call_timeout + 0.6)
        if faulty:
            self.history.append(Healed(self.world.now))
        for member in self.clients:
            await member.leave()
        self.history.append(self.server.left(final=False))
        await self._sleep(2 * EXTENDED_MAX * schedule.ttl)
        self.history.append(self.server.left(final=True))

    async def _sleep(self, seconds: float) -> None:
        await self._director.waiter(seconds).park()

    # -- what is done to them --------------------------------------------------------------------------------------

    def _apply(self, fault: Fault) -> None:
        if self.healed:
            return
        if fault.kind in {"pause", "crash", "exit", "close", "break", "cut close", "no threads"}:
            self.clients[fault.client].suffer(fault)
        elif fault.kind == "cut":
            self._cut(self.clients[fault.client], fault)
        elif fault.kind == "server pause":
            self.node.pause()
            self.world.call_in(fault.seconds, self.node.resume)
        elif fault.kind == "server restart":
            self.node.stop(lose_data=fault.variant < 0.5)
            self.world.call_in(fault.seconds, self.node.start)
        else:
            assert fault.kind == "clock jump", fault
            self.node.wall_clock.jump(fault.seconds)

    def _cut(self, member: Member, fault: Fault) -> None:
        requests, answers = fault.variant < 0.67, fault.variant > 0.33  # one of them, or both
        self.network.cut(member.process, self.node, requests=requests, answers=answers)
        self.world.call_in(fault.seconds, self.network.heal, member.process, self.node)

    def _heal(self) -> None:
        """Make everything well that is not dead."""
        if self.healed:
            return
        self.healed = True
        self.network.conditions = CALM
        self.node.start()
        self.node.resume()
        for member in self.clients:
            self.network.heal(member.process, self.node)
            member.resume()
