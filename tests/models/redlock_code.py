"""
Redlock's backend under random schedules, for the replay against `models/redlock.pml`.

The engine and `RedlockBackend` ship; the nodes are those of the simulation (`lockkit_tools.simulation.redlock`). What
the model does not have does not happen: restarts, renewals, crashes, and a vote that comes when its client has given
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockkit.aio import Client, Lease
from lockkit.backends.redlock.backend import OPTIONS, RedlockBackend
from lockkit.backends.redlock.nodes import ACQUIRE, FENCE, RELEASE, UNDO, Answer, Argument, LockKeys, Op
from lockkit_tools.simulation import Network, Process, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.redlock import Hosting, SimulatedNodes, VotingNode
from tests.models.replay import Event, Recorder
from tests.models.schedules import TTL, Plan, run

NODES = 3
NODE_TIMEOUT = 4.0
"""Seconds, more than any message takes."""


class NotingNode(VotingNode):
    """A node that notes what it did."""

    recorder: Recorder

    @property
    def index(self) -> int:
        """Its number, from 0 on."""
        return int(self.node.name.removeprefix("node"))

    def execute(self, run: int, op: Op, lock: str, arguments: Sequence[Argument]) -> Answer | str:
        """Do what came, and note it."""
        answer = super().execute(run, op, lock, arguments)
        if op in {ACQUIRE, FENCE}:
            done = isinstance(answer, int) and answer > 0
            self.recorder.add("ACQUIRED" if op is ACQUIRE else "WRITTEN", str(arguments[0]), self.index * 2 + done)
        elif op in {RELEASE, UNDO} and answer == 1:
            self.recorder.add("RELEASED", str(arguments[0]), self.index)
        return answer


class NotingNodes(SimulatedNodes):
    """A client's connections, which note when it begins an attempt."""

    recorder: Recorder

    async def ask(self, op: Op, keys: LockKeys, arguments: Sequence[Argument], **options: Any) -> list[Answer]:
        """Ask the nodes."""
        if op is ACQUIRE:
            self.recorder.asks(self._process, str(arguments[0]))
        return await super().ask(op, keys, arguments, **options)


def value_of(lease: Lease) -> str:
    """Return what the nodes have for a lease."""
    return str(lease._record.grant.state.value)


def admit(plan: Plan, nodes: Sequence[NotingNode]) -> None:
    """Let all nodes vote from the begin on."""
    del plan
    for one in nodes:
        one.admit("", 0, int(TTL * 1000), b"")


def trace(
    seed: int,
    node: type[NotingNode] = NotingNode,
    backend: type[RedlockBackend] = RedlockBackend,
    *,
    connections: type[NotingNodes] = NotingNodes,
    recording: type[Recorder] = Recorder,
    begin: Callable[[Plan, Sequence[Any]], None] = admit,
    plan: Plan | None = None,
) -> list[Event]:
    """Run the schedule of a seed."""
    plan = plan or replace(Plan.draw(seed), seconds=45.0, timeouts=(200.0,))
    # Votes that arrive far apart make the nodes' keys end in different parts of a tick, which the model cannot tell.
    conditions = replace(plan.conditions, latency=(0.001, 0.005), slow=0.0)
    plan = replace(plan, conditions=conditions, renews=False, crashes=False)
    world = World(seed)
    network = Network(world, plan.conditions)
    processes = plan.processes(world)
    recorder = recording(world, processes, value_of)
    nodes = [node(world, index, rate=1.0, wall_offset=0.001 * index) for index in range(NODES)]
    for one in nodes:
        one.recorder = recorder
    begin(plan, nodes)
    options = {name: option.default for name, option in OPTIONS.items()}

    def connected(process: Process) -> Client:
        asked = connections(process, nodes, network, NODE_TIMEOUT)
        asked.recorder = recorder
        made = backend("redlock://simulated", asked, options, Hosting(process))
        return client_of(process, lambda _: made, ttl=TTL, unavailable_after=60.0)

    clients = {process: connected(process) for process in processes}
    run(plan, clients, recorder, network, [one.node for one in nodes])
    return recorder.events
