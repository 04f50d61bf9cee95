"""Sets of locks on simulated time: any subsets in any order, timeouts, cancellations and a network that fails."""

from __future__ import annotations

import random

from lockkit import LockError
from lockkit.aio import Client, LockSet
from lockkit_tools.simulation import Process
from lockkit_tools.simulation.world import Cancelled
from tests.simulation.support import Stage, sleep

NAMES = ("a", "b", "c", "d")
TTL = 300.0
"""Far longer than a run: what an interrupted acquisition left would be there at its end."""
UNDONE_SECONDS = 60.0
ROUNDS = 5


class Company:
    """Processes that each take some of the locks, several times."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        """Start without processes."""
        self.stage = stage
        self.chance = chance
        self.inside: dict[str, str] = {}
        self.entered = 0

    async def use(self, process: Process, locks: LockSet) -> None:
        """Be inside alone with all of the locks for a while."""
        async with locks as leases:
            for name in locks.names:
                assert name not in self.inside, f"{process.name} met {self.inside[name]} inside with {name!r}"
                self.inside[name] = process.name
            try:
                leases.check()
                self.entered += 1
                await sleep(process, self.chance.uniform(0.0, 0.5))
            finally:
                for name in locks.names:
                    del self.inside[name]

    async def work(self, process: Process, client: Client, *, failing: bool) -> None:
        """Take random sets in random order; with `failing` some give up or are cancelled."""
        chance = self.chance
        for _ in range(ROUNDS):
            names = chance.sample(NAMES, chance.randint(2, 3))
            timeout = chance.choice((0.0, chance.uniform(0.0, 2.0), None)) if failing else None
            task = process.start(self.use(process, client.locks(names, timeout=timeout)), "use", awaited=True)
            if failing and chance.random() < 0.5:
                self.stage.world.call_in(chance.uniform(0.0, 1.0), task.cancel)
            await task.join()
            try:
                task.result()
            except (LockError, Cancelled):
                assert failing


def play(seed: int, *, failing: bool) -> int:
    """Run a company to its end; return how often all locks of a set were held."""
    chance = random.Random(seed)
    stage = Stage(seed)
    company = Company(stage, chance)
    tasks = []
    for name in ("alice", "bob", "carol", "dave"):
        process = stage.process(name)
        client = stage.client(process, ttl=TTL)
        tasks.append(process.start(company.work(process, client, failing=failing), "work", awaited=True))
        if failing:
            cut_at = chance.uniform(0.0, 5.0)
            stage.world.call_at(cut_at, stage.network.cut, process, stage.node)
            stage.world.call_at(cut_at + chance.uniform(0.0, 3.0), stage.network.heal, process, stage.node)
    # Where a wake-up is lost with the network, its waiter looks again after a ttl.
    until = 100 * TTL if failing else TTL / 2
    for task in tasks:
        stage.world.run(until=until, task=task)
        assert task.done, f"seed {seed}: a process waits forever"
        task.result()
    stage.world.run(until=stage.world.now + UNDONE_SECONDS)
    assert [name for name in NAMES if stage.server.holders(name)] == [], f"seed {seed}: left held"
    assert not [error for _, error in stage.world.failures], f"seed {seed}"
    stage.end()
    return company.entered


def test_any_orders_end() -> None:
    """Without timeouts: every process gets every set that it asks for."""
    for seed in range(40):
        assert play(seed, failing=False) == 4 * ROUNDS


def test_failures_leave_none_held() -> None:
    """Timeouts, cancellations at any instant and lost answers: long before the ttl all locks are free."""
    assert sum(play(seed, failing=True) for seed in range(100)) > 100
