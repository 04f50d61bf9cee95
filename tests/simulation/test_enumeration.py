"""Every schedule of small cases: how many there are, that none is left out, and that mistakes are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lockkit.engine.lease_record import LeaseRecord
from lockkit_tools.simulation import LockServer, Node
from lockkit_tools.simulation.enumeration import Bounds, ChosenWorld, Found, search
from lockkit_tools.simulation.history import Granted
from lockkit_tools.simulation.redlock import VotingNode
from tests.simulation.enumeration import CASES, LATE, TTL, Case, admit, find, one_server, redlock
from tests.simulation.test_mutants import believe_from_the_answer


def _messages(world: ChosenWorld, nodes: int, seen: set[tuple[str, ...]]) -> str:
    """Three processes send one message each."""
    order: list[str] = []
    world.nodes = [Node(world, f"node{index}") for index in range(nodes)]

    async def send(index: int) -> None:
        node = world.nodes[index % nodes]
        await world.network.call(processes[index], node, lambda: order.append(processes[index].name), 1.0)

    processes = [world.process(name) for name in "ABC"]
    for index, process in enumerate(processes):
        process.start(send(index), "send")
    world.run()
    seen.add(tuple(order))
    return ""


@pytest.mark.parametrize(("nodes", "schedules"), [(1, 6), (2, 2), (3, 1)])
def test_only_what_meets_at_one_machine_has_an_order(nodes: int, schedules: int) -> None:
    """Three messages to one node come in six orders; to three nodes, one run stands for all."""
    seen: set[tuple[str, ...]] = set()
    found = search(Bounds(), partial(_messages, nodes=nodes, seen=seen))
    assert (found.schedules, found.cut, len(seen)) == (schedules, 0, schedules)


@pytest.mark.parametrize("faults", [Bounds(), Bounds(1, ("lost",)), Bounds(1, ("killed",))], ids=str)
def test_reduced_search_ends_in_each_way_that_the_whole_one_does(faults: Bounds) -> None:
    """It runs fewer schedules, and loses none of what may come of them."""
    ends: dict[bool, set[Any]] = {True: set(), False: set()}
    counts = {}
    for reduced, reached in ends.items():
        bounds = Bounds(faults.faults, faults.kinds, reduced=reduced)

        def play(world: ChosenWorld, reached: set[Any] = reached) -> str:
            kept: list[LockServer] = []

            class Kept(LockServer):
                def __init__(self, *arguments: Any, **options: Any) -> None:
                    super().__init__(*arguments, **options)
                    kept.append(self)

            problem = one_server(world, Kept)
            grants = [event.client for event in kept[0].history if isinstance(event, Granted)]
            reached.add((*grants, *(process.dead for process in world.processes)))
            return problem

        counts[reduced] = find(Case(play, bounds)).schedules
    assert ends[True] == ends[False]
    assert counts[True] < counts[False]


@pytest.mark.parametrize("name", ["one server", "one server, one fault", "Redlock"])
def test_every_schedule_keeps_every_promise(name: str) -> None:
    """The larger cases: ``nox -s interleavings``."""
    found = find(CASES[name])
    assert (found.problem, found.trail) == ("", [])
    assert found.schedules > 1


def _votes_at_once(world: ChosenWorld) -> str:
    """A node that has lost its data votes as if nothing had happened."""
    with pytest.MonkeyPatch.context() as patch:
        forget = VotingNode._forget

        def keep_mark(self: VotingNode) -> None:
            forget(self)
            admit(self)

        patch.setattr(VotingNode, "_forget", keep_mark)
        return redlock(world)


def _counts_from_the_answer(world: ChosenWorld) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeaseRecord, "set_deadline", believe_from_the_answer)
        return one_server(world)


MUTANTS: dict[str, tuple[Callable[[ChosenWorld], str], Bounds]] = {
    "deadline from the answer": (
        _counts_from_the_answer,
        Bounds(2, ("late", "paused"), pause=TTL + LATE / 2, late=LATE),
    ),
    "restart without waiting": (_votes_at_once, Bounds(1, ("wiped",))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistake_is_found(mutant: str) -> None:
    """With the choices that lead there."""
    play, bounds = MUTANTS[mutant]
    found: Found = find(Case(play, bounds))
    assert found.problem
    assert any(step.endswith(bounds.kinds) for step in found.trail)
