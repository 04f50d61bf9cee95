"""
Redlock under random schedules of crashes, restarts, lost messages and clocks that run wrong.

CI runs some of them; all: ``LOCKKIT_SIM_SEED=0-19999 pytest tests/simulation/test_redlock.py``.
A seed that failed: the same with its number.
"""

from __future__ import annotations

from typing import Any

import pytest

import lockkit
from lockkit.aio import Client, Lease
from lockkit.engine.lease_record import LeaseState
from lockkit_tools.simulation import LockServer, Network, Node, Process, SimulatedRuntime, World, connect
from lockkit_tools.simulation.redlock import VotingNode
from tests.simulation.redlock import RedlockSimulation, redlock_at, schedule_of
from tests.simulation.support import apart, known_first

# A holder that forgets its lease is part of the schedules.
pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")

# Twice what the wrong variants below need; `nox -s simulate` runs ten thousand.
SEEDS = "0-359"
PART = 180


def found(seeds: range, **parts: Any) -> set[str]:
    """Run schedules on a `RedlockSimulation` with these parts; return which checks found something."""
    checks: set[str] = set()
    for seed in apart(seeds):
        verdict = RedlockSimulation(schedule_of(seed), **parts).judge()
        assert verdict.word != "unknown", f"seed {seed}: {verdict}"
        checks |= {problem.check for problem in verdict.problems}
    return checks


@pytest.mark.timeout(600)
def test_no_two_holders_and_no_token_twice(seeds: range) -> None:
    """While clocks run within the allowance, and not all nodes lose their data: nothing is wrong, ever."""
    grants_count = one_round_count = 0
    for seed in apart(seeds):
        simulation = RedlockSimulation(schedule_of(seed))
        verdict = simulation.judge()
        assert verdict, f"seed {seed}: {verdict}"
        grants_count += len(simulation.servers.grants)
        one_round_count += max(0, simulation.servers.one_round_count)

    assert grants_count > len(seeds)
    assert one_round_count > len(seeds) / 10


def test_one_round_gives_a_token_twice_or_a_lower_one() -> None:
    """``fencing=off`` is what it says: the second round is there for a reason."""
    assert found(range(180), fencing=False) == {"tokens"}


def test_restarted_nodes_that_vote_at_once_make_second_holders() -> None:
    """``durable=1`` on nodes that do lose their data: the wait is there for a reason."""
    parts = (range(seed, seed + 1) for seed in known_first(357, range(1500)))

    assert any("exclusion" in found(seeds, durable=True, snapshots=False) for seeds in parts)


@pytest.mark.parametrize("info", [True, False], ids=["run known", "run unknown"])
def test_old_snapshot_makes_no_second_holder_where_the_run_is_known(*, info: bool) -> None:
    """
    A holds 0 and 1 of three; 1 comes back with a snapshot from before, also of its mark, and is asked with 2.

    Where the run of a server is unknown, the mark is taken for a present one: therefore such a node is not asked.
    """
    world = World(1)
    network = Network(world)
    nodes = [VotingNode(world, index, rate=1.0, wall_offset=0.0, info=info) for index in range(3)]
    outcome: list[bool] = []

    async def acquire(process: Process, timeout: float) -> Lease | None:
        client = connect_redlock(process, nodes, network)
        task = process.start(client.lock("x", ttl=60.0, renew=False).try_acquire(timeout), "acquire", awaited=True)
        await task.join()
        return task.result()

    async def story(early: Process, alice: Process, bob: Process) -> None:
        first = await acquire(early, 10.0)
        assert first is not None
        await SimulatedRuntime(director).sleep(70.0)  # the first start is long ago, the first lease over
        first._record.state = LeaseState.RELEASED
        nodes[1].saves = True
        nodes[1].save()
        network.cut(alice, nodes[2].node, requests=True, answers=True)
        older = await acquire(alice, 10.0)
        assert older is not None
        nodes[1].node.stop(lose_data=True)
        nodes[1].node.start()
        try:
            newer = await acquire(bob, 10.0)
        except lockkit.BackendUnavailable:
            newer = None
        outcome.append(older.held and newer is not None)
        for lease in (older, newer):
            if lease is not None:
                lease._record.state = LeaseState.RELEASED

    director = world.process("director")
    processes = [world.process(name) for name in ("early", "alice", "bob")]
    task = director.start(story(*processes), "story", awaited=True)
    world.run(task=task)
    task.result()
    world.end()

    assert outcome == [not info]


def test_clocks_beyond_the_allowance_make_second_holders() -> None:
    """Nodes a fifth too fast free what is still believed in. The tokens are right all the same."""
    assert found(range(150), node_rate=1.2) == {"exclusion"}


def connect_redlock(process: Process, nodes: list[VotingNode], network: Network) -> Client:
    """Make a client of simulated nodes."""
    server = LockServer(Node(process.world, "unused"), network, [])
    return connect(process, server, network, backend=lambda *_: redlock_at(process, nodes, network, 1.0))
