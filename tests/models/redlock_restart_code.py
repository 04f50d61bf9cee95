"""
Redlock's nodes that restart without their data, for the replay against `models/redlock_restart.pml`.

The engine, `RedlockBackend` and `DelayedRestart` ship. Of the messages only a look's answers and requests to admit are
lost: what becomes of the others is compared with `models/redlock.pml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.nodes import ADMIT, FENCE, LOOK, Answer, Argument, LockKeys, Op
from lockkit.errors import BackendUnavailable
from lockkit.units import Instant
from lockkit_tools.simulation import Process
from lockkit_tools.simulation.redlock import VotingNode
from tests.models import redlock_code
from tests.models.redlock_code import NotingNode, NotingNodes
from tests.models.replay import Event, Recorder
from tests.models.schedules import TTL, Plan

LOOKS_LOST, LOOKS_PAUSED = 0.1, 0.3
"""Shares of looks and admissions that are lost, and of looks after which the client is stopped."""

WAITS = 0, int(TTL), 60
"""Seconds until a node votes, less margins: a first start, the longest ttl, and `FORGOTTEN_MS`."""


class ByClient(Recorder):
    """The events by client: in the model its attempts have one value."""

    def asks(self, process: Process, owner: str) -> None:
        """Note that a client asks, and whom its value and its looks belong to."""
        self._owners[owner] = 1 + self._clients[process.name]
        self._owners[process.name] = self._owners[owner] + len(self._clients)
        super().asks(process, owner)


class RestartingNode(NotingNode):
    """
    A node that may restart once, and notes what it is asked about its mark.

    Attributes:
        may_restart: It will, or has not yet.
    """

    may_restart = False

    def execute(self, run: int, op: Op, lock: str, arguments: Sequence[Argument]) -> Answer | str:
        """Do what came, and note it; of a look or an admission, `lock` is the client."""
        self.recorder.look()  # with the marks as they were
        if run != self.run or op is FENCE:
            return VotingNode.execute(self, run, op, lock, arguments)
        answer = super().execute(run, op, lock, arguments)
        if op is LOOK:
            assert isinstance(answer, list)
            self.recorder.add("LOOKED", lock, self.index * 4 + (0 if answer[0] != 1 else 1 if answer[1] else 2))
        elif op is ADMIT:
            wait = WAITS.index(int(arguments[0]) // 1000)
            self.recorder.add("ADMITTED", lock, self.index * 8 + wait * 2 + (answer == 1))
        return answer

    def restart(self, seconds: float) -> None:
        """Lose all data, and be down for a time."""
        if self.may_restart:
            self.may_restart = False
            self.recorder.look()
            self.node.stop(lose_data=True)
            self.recorder.add("RESTARTED", "", self.index)
            self.node.world.call_in(seconds, self.node.start)


class LookingNodes(NotingNodes):
    """A client's connections, whose looks and admissions may be lost, or come late since it is stopped between them."""

    _nodes: Sequence[RestartingNode]

    async def ask(self, op: Op, keys: LockKeys, arguments: Sequence[Argument], **options: Any) -> list[Answer]:
        """Ask the nodes."""
        answers = await super().ask(op, keys, arguments, **options)
        chance, world = self._process.random, self._process.world
        if op is LOOK and chance.random() < LOOKS_PAUSED:
            lasts = chance.uniform(0.5, 1.5 * TTL)
            self._process.pause()
            world.call_in(lasts, self._process.resume)
            world.call_in(chance.uniform(0.0, 2 * lasts), chance.choice(self._nodes).restart, 0.1)
        return answers

    async def _ask_one(
        self, index: int, op: Op, lock: str, arguments: Sequence[Argument], until: Instant = inf
    ) -> Answer:
        del until  # no vote comes when its client has given up
        self._runs[index] = self._nodes[index].run  # a connection that a restart has cut is opened before it is used
        if op not in {LOOK, ADMIT}:
            return await super()._ask_one(index, op, lock, arguments)
        if self._process.random.random() < LOOKS_LOST:
            return BackendUnavailable("lost")
        return await super()._ask_one(index, op, self._process.name, arguments)


def begin(plan: Plan, nodes: Sequence[RestartingNode]) -> None:
    """Restart two nodes; or one, of a set that no client has started yet."""
    recorder = nodes[0].recorder
    recorder.show = lambda: sum(one._is_marked() << index for index, one in enumerate(nodes))
    started = plan.chance.random() < 0.6
    for one in nodes if started else ():
        one.admit("", 0, int(TTL * 1000), b"")
    for one in nodes[1 : 2 + started]:
        one.may_restart = True
        one.node.world.call_at(plan.chance.uniform(0.0, plan.seconds), one.restart, plan.chance.uniform(0.0, 3.0))


def trace(
    seed: int, node: type[RestartingNode] = RestartingNode, backend: type[RedlockBackend] = RedlockBackend
) -> list[Event]:
    """Run the schedule of a seed."""
    drawn = Plan.draw(seed)
    conditions = replace(drawn.conditions, requests_lost=0.0, answers_lost=0.0)
    plan = replace(drawn, conditions=conditions, seconds=100.0, timeouts=(0.0, 1.0), cuts=False)
    return redlock_code.trace(seed, node, backend, connections=LookingNodes, recording=ByClient, begin=begin, plan=plan)
