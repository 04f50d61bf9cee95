"""
Runs every schedule of small cases, within bounds: ``nox -s interleavings``.

What decides is the code that users run, the engine and Redlock, as in the random schedules. Two clients want one lock,
hold it for a while, use it and release it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockkit.aio import Client, Lease
from lockkit.errors import LockError
from lockkit_tools.simulation import LockServer, Node, Process, SimulatedRuntime, connect
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.enumeration import Bounds, ChosenWorld, Clock, Found, search
from lockkit_tools.simulation.redlock import VotingNode
from tests.simulation.night import be_quiet, say
from tests.simulation.redlock import redlock_at

TTL = 10.0
HOLD = 0.3
"""Seconds: the other client asks at least once meanwhile."""
TIMEOUT = 40.0
"""How long a client waits for the lock: longer than a lease that nobody releases."""


@dataclass
class Belief:
    """That a client holds the lock, from one step of it to another."""

    process: Process
    lease: Lease
    ended: int | None = None  # in steps of its process, when it called release()

    def is_over(self, seen: Clock) -> bool:
        """Tell whether it had ended in every order of what happened so far, for one who has seen so much."""
        process = self.process
        if process.dead or process.now() >= self.lease._record.valid_until:
            return True
        return self.ended is not None and seen.get(process.name, 0) >= self.ended


@dataclass
class Witness:
    """What the clients believe, and the storage that compares tokens."""

    world: ChosenWorld
    beliefs: list[Belief] = field(default_factory=list)
    newest: int = 0
    problems: list[str] = field(default_factory=list)

    def granted(self, process: Process, lease: Lease) -> Belief:
        """Compare with the grants before."""
        belief, seen = Belief(process, lease), self.world.clocks[process.name]
        for other in self.beliefs:
            if not other.is_over(seen):
                names = f"{other.process.name} and {process.name}"
                self.problems.append(f"{names} hold the lock at {self.world.now:.3f} s, or may in another order")
            if lease.token <= other.lease.token:
                self.problems.append(f"{process.name} got token {lease.token} after {other.lease.token}")
        self.beliefs.append(belief)
        return belief

    def write(self, process: Process, lease: Lease) -> None:
        """Write to the storage, which refuses a smaller token than the newest; never that of a holder."""
        if lease.token < self.newest:
            self.problems.append(f"the write of {process.name}, which holds the lock, was refused")
        self.newest = max(self.newest, lease.token)


async def use(process: Process, client: Client, witness: Witness) -> None:
    """Take the lock, work, release."""
    try:
        lease = await client.lock("x", ttl=TTL, timeout=TIMEOUT).acquire()
    except LockError:
        return
    belief = witness.granted(process, lease)
    await SimulatedRuntime(process).sleep(HOLD)
    if lease.held:
        witness.write(process, lease)
    # It ends within this step, and what is sent from the next one on comes after it.
    belief.ended = witness.world.clocks[process.name].get(process.name, 0)
    try:
        await lease.release()
    except LockError:
        return


def run(world: ChosenWorld, processes: Sequence[Process], connected: Callable[[Process], Client]) -> str:
    """Have each process use the lock; return what broke a promise."""
    witness = Witness(world)
    tasks = [process.start(use(process, connected(process), witness), "use") for process in processes]
    for task in tasks:
        world.run(task=task)
        if not task.done:
            witness.problems.append(f"{task.name} never ends")
    witness.problems += [f"{task.name} raised {error!r}" for task, error in world.failures]
    return "; ".join(witness.problems)


def clients(world: ChosenWorld) -> list[Process]:
    """Start two, whose clocks differ."""
    return [world.process("A", rate=1.0003), world.process("B", rate=0.9996)]


def one_server(world: ChosenWorld, server_class: type[LockServer] = LockServer) -> str:
    """A fair server with a queue, as Redis is to lockkit."""
    node = Node(world, "server")
    world.nodes = [node]
    server = server_class(node, world.network, [])
    return run(world, clients(world), lambda process: connect(process, server, world.network, ttl=TTL))


def redlock(world: ChosenWorld) -> str:
    """Three nodes that vote already."""
    nodes = [VotingNode(world, index, rate=1.0, wall_offset=0.001 * index) for index in range(3)]
    for voting in nodes:
        admit(voting)
    world.nodes = [voting.node for voting in nodes]

    def connected(process: Process) -> Client:
        return client_of(process, lambda _: redlock_at(process, nodes, world.network, 1.0), ttl=TTL)

    return run(world, clients(world), connected)


def admit(voting: VotingNode) -> None:
    """Have a node vote from now on."""
    voting.admit("x", 0, int(TTL * 1000), b"")


class Case(NamedTuple):
    """A case and how far it is searched."""

    play: Callable[[ChosenWorld], str]
    bounds: Bounds


PAUSE = 2 * TTL
LATE = 0.5
"""Seconds: shorter than a client waits for an answer."""

CASES = {
    "one server": Case(one_server, Bounds()),
    "one server, one fault": Case(
        one_server, Bounds(1, ("lost", "late", "restarted", "paused", "killed"), pause=PAUSE, late=LATE)
    ),
    "one server, two faults": Case(
        one_server, Bounds(2, ("lost", "late", "restarted", "paused", "killed"), pause=TTL + LATE / 2, late=LATE)
    ),
    "one server, messages later than a lease": Case(one_server, Bounds(2, ("late", "killed"), late=TTL + LATE)),
    "Redlock": Case(redlock, Bounds()),
    "Redlock, a message lost or late": Case(redlock, Bounds(1, ("lost", "late"), late=LATE)),
    "Redlock, a node restarted or wiped": Case(redlock, Bounds(1, ("restarted", "wiped"))),
    "Redlock, a client paused or killed": Case(redlock, Bounds(1, ("paused", "killed"), pause=PAUSE)),
}


def find(case: Case) -> Found:
    """Search a case; the garbage collector runs between schedules, where it changes nothing."""
    played = itertools.count(1)

    def play(world: ChosenWorld) -> str:
        if next(played) % 100 == 0:
            gc.collect()
        return case.play(world)

    gc.disable()
    try:
        return search(case.bounds, play)
    finally:
        gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Search the cases that the command line names; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="nox -s interleavings --", description=__doc__)
    parser.add_argument("case", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}; default: all")
    given = parser.parse_args(arguments)
    be_quiet()
    failed = False
    for name in given.case or CASES:
        began = time.monotonic()
        found = find(CASES[name])
        seconds = time.monotonic() - began
        say(
            f"{name}: {found.schedules:,} schedules, all run ({found.cut:,} more begun that repeat one of them, "
            f"{found.choices} choices at most), {seconds:.1f} s"
        )
        if found.problem:
            failed = True
            say(f"  {found.problem}\n    " + "\n    ".join(found.trail))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
