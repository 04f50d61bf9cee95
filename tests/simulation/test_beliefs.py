"""Each check of leases that are held beside others finds what it is for, and nothing in what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest

from lockkit.backend import Mode
from lockkit_tools.simulation import Process, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.beliefs import (
    Access,
    Belief,
    Wait,
    Witness,
    guard,
    limit,
    overlap,
    own_limits,
    progress,
    slots,
    tokens,
)
from lockkit_tools.simulation.checker import Problem
from lockkit_tools.simulation.claims import ClaimBackend, ClaimServer
from lockkit_tools.simulation.history import Granted
from lockkit_tools.simulation.network import Network, Node
from tests.simulation.support import sleep


def belief(owner: str, start: float, end: float, mode: Mode = "shared", slot: int | None = None) -> Belief:
    """Make the belief of an owner, whose token is its first letter."""
    return Belief("x", f"client of {owner}", owner, mode, slot, ord(owner[0]), start, end)


def access(at: float, owner: str, *, shared: bool = False, accepted: bool = True) -> Access:
    """Let an owner come by."""
    return Access(at, "x", owner, ord(owner[0]), None, shared, accepted)


def times(problems: Iterable[Problem]) -> list[float]:
    """When something was found."""
    return [problem.at for problem in problems]


def test_readers_may_overlap_and_writers_may_not() -> None:
    """Nor a writer and a reader; what only touches does not overlap."""
    first, second = belief("a", 0.0, 2.0), belief("b", 1.0, 3.0)
    writer = belief("c", 2.5, 4.0, "exclusive")
    assert times(overlap([first, second])) == []
    assert times(overlap([first, second, writer])) == [2.5]
    assert times(overlap([writer, belief("d", 3.0, 5.0, "exclusive")])) == [3.0]
    assert times(overlap([writer, belief("d", 4.0, 5.0, "exclusive")])) == []
    later = belief("d", 4.0, 5.0)
    later.name = writer.name = "y"
    assert times(overlap([first, second, writer, later])) == []


def test_slot_has_one_believer() -> None:
    """And each permit has a slot."""
    first, second = belief("a", 0.0, 2.0, "permit", 0), belief("b", 1.0, 3.0, "permit", 1)
    assert times(slots([first, second])) == []
    assert times(slots([first, second, belief("c", 1.5, 1.8, "permit", 0)])) == [1.5]
    assert times(slots([first, second, belief("c", 2.0, 2.5, "permit", 0)])) == []
    assert times(slots([belief("a", 0.0, 2.0, "permit")])) == [0.0]


def test_limit_counts_all_at_one_instant() -> None:
    """Of three that each overlap another one, two at most at a time."""
    three = [belief("a", 0.0, 2.0, "permit", 0), belief("b", 1.0, 4.0, "permit", 1), belief("c", 3.0, 5.0, "permit", 0)]
    assert times(limit(three, 2)) == []
    assert times(limit(three, 1)) == [1.0, 3.0]
    assert times(limit([*three, belief("d", 3.5, 3.6, "permit", 2)], 2)) == [3.5]


def test_own_limit_counts_older_beliefs_only() -> None:
    """A client with limit 1 may find a younger one beside it, but no older one."""
    older, younger = belief("a", 1.0, 3.0, "permit", 0), belief("b", 0.0, 3.0, "permit", 1)
    limits = {"client of a": 1, "client of b": 2}
    assert times(own_limits([younger, older], limits)) == []
    later = belief("c", 2.0, 2.5, "permit", 2)
    assert times(own_limits([younger, older, later], {**limits, "client of c": 3})) == []
    assert times(own_limits([younger, older, later], {**limits, "client of c": 2})) == [2.0]


def test_tokens_increase_and_are_those_of_the_grants() -> None:
    """Over all modes; other names count apart."""

    def granted(at: float, owner: str, token: int, name: str = "x") -> Granted:
        return Granted(at, "client", name, owner, token, at + 1.0)

    grants = [granted(0.0, "a", ord("a")), granted(1.0, "b", ord("b")), granted(2.0, "a2", 1, "y")]
    assert times(tokens(grants, [belief("a", 0.0, 1.0)])) == []
    assert times(tokens([*grants, granted(3.0, "c", ord("b"))], [])) == [3.0]
    assert times(tokens(grants[1:], [belief("a", 0.5, 1.0)])) == [0.5]


def test_guard_refuses_nobody_who_believes() -> None:
    """A reader beside another; a writer may be refused once it believes only as a reader, or no more."""
    readers = [belief("a", 0.0, 2.0), belief("b", 0.0, 2.0)]
    assert times(guard([access(1.0, "a", shared=True, accepted=False)], readers)) == [1.0]
    assert times(guard([access(1.0, "a", accepted=False)], readers)) == []
    assert times(guard([access(2.5, "a", shared=True, accepted=False)], readers)) == []
    writer = belief("c", 3.0, 4.0, "exclusive")
    assert times(guard([access(3.5, "c", accepted=False)], [writer])) == [3.5]


def test_guard_accepts_no_stale_writer() -> None:
    """After a newer reader or writer; of readers only after a newer writer; its own token is not newer."""
    assert times(guard([access(1.0, "b", shared=True), access(2.0, "a", shared=True)], [])) == []
    assert times(guard([access(1.0, "b", shared=True), access(2.0, "a")], [])) == [2.0]
    assert times(guard([access(1.0, "b"), access(2.0, "a")], [])) == [2.0]
    assert times(guard([access(1.0, "b"), access(2.0, "a", shared=True)], [])) == [2.0]
    assert times(guard([access(1.0, "b"), access(2.0, "b", shared=True), access(3.0, "c")], [])) == []


def test_wait_that_never_ends_is_found() -> None:
    """Also one that began before the time that counts; what ends in time is none."""
    waits = [Wait("x", "a", "shared", 0.0, 12.0), Wait("x", "b", "exclusive", 3.0, inf), Wait("x", "c", "shared", 19.0)]
    assert times(progress(waits, 5.0, since=10.0, until=20.0)) == [3.0]


@pytest.fixture
def world() -> World:
    """A world of its own."""
    return World(1)


def test_belief_follows_renewal_downgrade_and_loss(world: World) -> None:
    """From the hand-over to the deadline, which moves; as a reader after a downgrade; to the deadline if paused."""
    network = Network(world)
    server = ClaimServer(Node(world, "server"), network, [])
    witness = Witness(world)
    process = world.process("alice", rate=1.0, offset=50.0)
    witness.join(process)
    client = client_of(process, lambda _: ClaimBackend(process, server, network, 1.0), ttl=10.0)

    async def story(process: Process) -> None:
        lease = await client.rwlock("x").write().acquire()
        watch = witness.watch(process, lease, "x")
        await sleep(process, 20.0)
        watch.weaken()
        await lease.downgrade()
        await sleep(process, 10.0)
        await lease.release()
        held = await client.rwlock("x", renew=False).read().acquire()
        witness.watch(process, held, "x")
        await sleep(process, 100.0)

    process.start(story(process), "story")
    world.run(until=60.0)
    process.crash()
    world.end()

    writer, reader, lost = witness.beliefs
    assert (writer.mode, reader.mode, lost.mode) == ("exclusive", "shared", "shared")
    assert [writer.end, reader.start, reader.end] == pytest.approx([20.0, 20.0, 30.0], abs=0.1)
    assert [lost.start, lost.end] == pytest.approx([30.0, 39.9], abs=0.1)


def test_crash_ends_beliefs_and_waits(world: World) -> None:
    """The client believes and waits no more."""
    network = Network(world)
    server = ClaimServer(Node(world, "server"), network, [])
    witness = Witness(world)
    process = world.process("alice")
    witness.join(process)
    client = client_of(process, lambda _: ClaimBackend(process, server, network, 1.0), ttl=10.0)

    async def story(process: Process) -> None:
        lease = await client.semaphore("x", limit=1).acquire()
        witness.watch(process, lease, "x")
        wait = witness.wait(process, "x", "permit")
        assert wait.end == inf
        await client.semaphore("x", limit=1).acquire()

    process.start(story(process), "story")
    world.call_at(5.0, process.crash)
    world.run(until=20.0)
    world.end()

    assert [one.end for one in witness.beliefs] == [5.0]
    assert [one.end for one in witness.waits] == [5.0]
