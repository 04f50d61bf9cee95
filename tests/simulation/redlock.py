"""
Random schedules on a Redlock of simulated nodes (`lockkit_tools.simulation.redlock`).

Everything that decides is the code that users run: `lockkit.backends.redlock.backend` and its treatment of restarted
nodes, and the engine above them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockkit.backend import Busy, Grant, Request
from lockkit.backends.redlock.backend import OPTIONS, RedlockBackend
from lockkit.backends.redlock.votes import Count
from lockkit_tools.simulation import (
    Fault,
    History,
    LockServer,
    Network,
    Node,
    Process,
    Schedule,
    Simulation,
    Verdict,
    draw,
)
from lockkit_tools.simulation.history import Quiet
from lockkit_tools.simulation.member import Member
from lockkit_tools.simulation.redlock import Hosting, SimulatedNodes, VotingNode
from tests.simulation.support import judge_by_clients

NODES = 5


class RecordingBackend(RedlockBackend):
    """Takes down each grant, also of those that come too late to be handed out."""

    grants: list[tuple[str, int]]
    second_rounds = 0

    async def _write_token(self, *arguments: Any) -> Count | None:
        self.second_rounds += 1
        return await super()._write_token(*arguments)

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        outcome = await super().try_acquire(request)
        if hasattr(outcome, "token"):
            self.grants.append((request.name, outcome.token))
        return outcome


class SimulatedServers(LockServer):
    """All the nodes, in the place of the one server that the simulation knows."""

    def __init__(self, node: Node, network: Network, history: History, **options: Any) -> None:
        """Start with no nodes; the simulation makes them."""
        super().__init__(node, network, history, **options)
        self.nodes: list[VotingNode] = []
        self.grants: list[tuple[str, int]] = []
        self.backends: list[RecordingBackend] = []

    @property
    def one_round_count(self) -> int:
        """How many grants took one round; no more than that, because some second rounds came to nothing."""
        return len(self.grants) - sum(backend.second_rounds for backend in self.backends)

    def left(self, *, final: bool) -> Quiet:
        """See `LockServer.left`. Of no interest here."""
        return Quiet(self.node.world.now, final, (), ())


def redlock_at(
    process: Process, nodes: Sequence[VotingNode], network: Network, timeout: float, **options: object
) -> RecordingBackend:
    """Make the backend of a process; `options` in place of the defaults."""
    given = {name: option.default for name, option in OPTIONS.items()} | options
    simulated = SimulatedNodes(process, nodes, network, timeout)
    backend = RecordingBackend("redlock://simulated", simulated, given, Hosting(process))
    backend.grants = []
    return backend


class RedlockSimulation(Simulation):
    """A random schedule on several nodes."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        fencing: bool = True,
        durable: bool = False,
        snapshots: bool = True,
        node_rate: float | None = None,
        wall_offset: float | None = None,
        spared: int = 1,
    ) -> None:
        """Make the world of a schedule."""
        self.spared = spared
        self.snapshots = snapshots

        def connect(process: Process, server: LockServer, network: Network, call_timeout: float) -> RedlockBackend:
            assert isinstance(server, SimulatedServers)
            if not server.nodes:
                server.nodes = self._make_nodes(schedule, node_rate, wall_offset)
            made = redlock_at(process, server.nodes, network, call_timeout, fencing=fencing, durable=durable)
            made.grants = server.grants
            server.backends.append(made)
            return made

        super().__init__(schedule, server=SimulatedServers, backend=connect)
        assert isinstance(self.server, SimulatedServers)
        self.servers = self.server

    def _make_nodes(self, schedule: Schedule, rate: float | None, offset: float | None) -> list[VotingNode]:
        chance = self.world.chance("nodes")
        offset = _wall_offset(schedule) if offset is None else offset
        drift = abs(schedule.server_rate - 1.0)
        return [
            VotingNode(
                self.world,
                index,
                rate=1.0 + chance.uniform(-drift, drift) if rate is None else rate,
                wall_offset=chance.uniform(-offset, offset),
            )
            for index in range(NODES)
        ]

    def _apply(self, fault: Fault) -> None:
        nodes = self.servers.nodes
        # Several at a time, now and then more than a majority.
        chance = self.world.chance(f"fault {fault.at}")
        chosen = chance.sample(range(NODES), chance.choice((1, 1, 2, 2, 3, 4)))
        if self.healed:
            return
        if fault.kind == "server pause":
            for index in chosen:
                nodes[index].node.pause()
                self.world.call_in(fault.seconds, nodes[index].node.resume)
        elif fault.kind == "server restart":
            for index in chosen:
                nodes[index].saves = self.snapshots and chance.random() < 0.5
                nodes[index].node.stop(lose_data=fault.variant < 0.5 and index >= self.spared)
                self.world.call_in(fault.seconds * chance.random(), nodes[index].node.start)
        elif fault.kind == "clock jump":
            nodes[chosen[0]].node.wall_clock.jump(fault.seconds)
        elif fault.kind == "cut":
            for index in chosen:
                self._cut_node(self.clients[fault.client], nodes[index].node, fault)
        else:
            super()._apply(fault)

    def _cut_node(self, member: Member, node: Node, fault: Fault) -> None:
        requests, answers = fault.variant < 0.67, fault.variant > 0.33
        self.network.cut(member.process, node, requests=requests, answers=answers)
        self.world.call_in(fault.seconds, self.network.heal, member.process, node)

    def _heal(self) -> None:
        if not self.healed:
            for voting in self.servers.nodes:
                voting.node.start()
                voting.node.resume()
                for member in self.clients:
                    self.network.heal(member.process, voting.node)
        super()._heal()

    def judge(self) -> Verdict:
        """Run it, and judge by what clients believed and were given; there is no single server to compare with."""
        self.run()
        return judge_by_clients(self, self.servers.grants)


def _loses_data(schedule: Schedule) -> bool:
    return any(fault.kind == "server restart" and fault.variant < 0.5 for fault in schedule.faults)


def _wall_offset(schedule: Schedule) -> float:
    """
    How far the nodes' times of day are apart: it does not matter unless data are lost.

    After a loss, tokens stand on the time of day: apart by less than the shortest wait of a restarted node.
    Where they show the same, most grants take one round.
    """
    return 0.05 * schedule.ttl if _loses_data(schedule) else 1000.0 * (schedule.seed % 2)


def schedule_of(seed: int) -> Schedule:
    """
    Draw the schedule of a seed, for several nodes.

    Without `break_lock`, which makes second holders on purpose; without clocks that jump where data are lost, because
    the wait after a restart is timed by the node's own clock. With more faults than of a single server.
    """
    schedule = draw(seed)
    chance = random.Random(f"{seed} nodes")
    more = [
        Fault(
            chance.uniform(0.0, schedule.healed_at),
            chance.choice(("server restart", "server pause")),
            0,
            chance.uniform(0.05, 1.0) * schedule.ttl,
            chance.random(),
        )
        for _ in range(chance.choice((0, 1, 2, 4)))
    ]
    schedule = replace(schedule, faults=tuple(sorted([*schedule.faults, *more])))
    kinds = {"break", "clock jump"} if _loses_data(schedule) else {"break"}
    return replace(schedule, faults=tuple(fault for fault in schedule.faults if fault.kind not in kinds))
