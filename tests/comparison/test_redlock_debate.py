"""
The debate on Redlock of 2016, scene by scene: what either side described is done, and looked at.

Martin Kleppmann, "How to do distributed locking"; Salvatore Sanfilippo, "Is Redlock safe?".
On real nodes where the order of events can be had there, else on simulated ones, with the backend's own code asking.
The page on it is docs/comparison/redlock-debate.md.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis

import lockkit
from lockkit import aio
from lockkit.engine.lease_record import LeaseState
from lockkit.sync import Client, Lease
from lockkit_tools.servers import FaultProxy, RedisNodes, RedisServer, require, wait_until
from lockkit_tools.simulation import Conditions, LockServer, Network, Node, Process, SimulatedRuntime, World, connect
from lockkit_tools.simulation.redlock import VotingNode
from tests.comparison.support import LONG, PATIENCE, run_out
from tests.simulation.redlock import redlock_at

NAME = "seat"
KEY = f"lockkit:{NAME}"
MARK = "{lockkit}:redlock"


@pytest.fixture(scope="module")
def five() -> Iterator[RedisNodes]:
    """Five nodes for all tests of this module."""
    require("redis", local=True)
    with RedisNodes(5) as nodes:
        yield nodes


@pytest.fixture
def nodes(five: RedisNodes) -> list[RedisServer]:
    """All up, and in use for long, without any lock."""
    for node in five.nodes:
        with node.connect() as connection:
            connection.call("FLUSHALL")
    with lockkit.connect(five.url) as client:
        client.lock("first").acquire(timeout=PATIENCE).release()
    for node in five.nodes:
        with node.connect() as connection:
            run, ttl_ms, _, until_us = str(connection.call("GET", MARK)).split(" ")
            connection.call("SET", MARK, f"{run} {ttl_ms} 1 {until_us}")
    return five.nodes


@pytest.fixture
def links(nodes: list[RedisServer]) -> Iterator[list[FaultProxy]]:
    """A's ways to the last two nodes, which are closed at first."""
    with ExitStack() as opened:
        found = [opened.enter_context(FaultProxy(node.host, node.port)) for node in nodes[3:]]
        for link in found:
            link.refuse()
        yield found


def near_url(nodes: list[RedisServer], links: list[FaultProxy]) -> str:
    """The last two nodes by these ways."""
    return f"redlock://{','.join([*(node.address for node in nodes[:3]), *(link.address for link in links)])}"


@pytest.fixture
def near_three(nodes: list[RedisServer], links: list[FaultProxy]) -> Iterator[Client]:
    """The client of A, who reaches the first three nodes only, and so is granted locks by a bare majority."""
    with lockkit.connect(near_url(nodes, links)) as client:
        yield client


@pytest.fixture
def everywhere(five: RedisNodes, nodes: list[RedisServer]) -> Iterator[Client]:
    """The client of B, who reaches all."""
    assert nodes
    with lockkit.connect(five.url) as client:
        yield client


@pytest.fixture
def storage(nodes: list[RedisServer]) -> Iterator[redis.Redis]:
    """Where the data are. Any store will do; this one is at hand."""
    with redis.Redis(port=nodes[0].port, decode_responses=True) as client:
        yield client


@contextmanager
def at(node: RedisServer) -> Iterator[redis.Redis]:
    """Look at one node."""
    with redis.Redis(port=node.port, decode_responses=True) as client:
        yield client


def voted(nodes: list[RedisServer]) -> list[bool]:
    """On which nodes the lock is."""
    found = []
    for node in nodes:
        with at(node) as client:
            found.append(bool(client.exists(KEY)))
    return found


def replaced(first: Client, second: Client) -> tuple[Lease, Lease]:
    """Pause the first one until its lease has run out and the second has the lock."""
    paused = first.lock(NAME, ttl=0.5, renew=False).acquire(timeout=PATIENCE)
    assert paused.wait_lost(PATIENCE)
    return paused, second.lock(NAME, ttl=LONG).acquire(timeout=PATIENCE)


def let_go(*leases: Lease | aio.Lease) -> None:
    """Give leases up without a word: they have done their part."""
    for lease in leases:
        lease._record.state = LeaseState.RELEASED


# -- the pause after the grant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "file", "redis", "redlock"])
def test_the_pause_is_the_same_with_every_kind_of_lock(
    scheme: str, five: RedisNodes, nodes: list[RedisServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """
    Kleppmann's pictures. Sanfilippo: whatever frees locks by itself has this problem. Tokens help with each of them.

    A  is granted the lock, looks at its clock, and is paused
       the lease runs out
    B  is granted the lock, writes
    A  goes on and writes: over what B wrote, unless storage compares tokens
    """
    urls = {
        "memory": "memory://debate",
        "file": f"file://{tmp_path_factory.mktemp('locks')}/locks",
        "redis": nodes[0].url,
        "redlock": five.url,
    }
    with lockkit.connect(urls[scheme]) as first, lockkit.connect(urls[scheme]) as second:
        paused, lease = replaced(first, second)
        guard = lockkit.fencing.TokenGuard("file")
        data = {}
        with guard.writing(lease.token):
            data["file"] = "B's"

        with pytest.raises(lockkit.StaleToken), guard.writing(paused.token):
            data["file"] = "A's"

        assert lease.held
        assert data["file"] == "B's"
        lease.release()


# -- the pause before the grant ----------------------------------------------------------------------------------------


class Theatre:
    """Five simulated nodes, and A and B."""

    def __init__(self, **options: object) -> None:
        """Begin; each message takes a tenth of a second. `options` are the backend's."""
        self.options = options
        self.world = World(1)
        self.network = Network(self.world, Conditions(latency=(0.1, 0.1)))
        self.nodes = [VotingNode(self.world, index, rate=1.0, wall_offset=0.0) for index in range(5)]
        self.a, self.b = self.world.process("a"), self.world.process("b")
        self.director = self.world.process("director")

    def client(self, process: Process) -> aio.Client:
        """Connect a program to all nodes."""
        unused = LockServer(Node(self.world, f"unused by {process.name}"), self.network, [])
        return connect(
            process,
            unused,
            self.network,
            backend=lambda *_: redlock_at(process, self.nodes, self.network, 1.0, **self.options),
        )

    async def acquire(self, process: Process, client: aio.Client, ttl: float, timeout: float = PATIENCE) -> aio.Lease:
        """Have a program acquire the lock, and wait for it."""
        lock = client.lock(NAME, ttl=ttl, renew=False)
        task = process.start(lock.acquire(timeout=timeout), "acquire", awaited=True)
        await task.join()
        return task.result()

    async def meet(self, process: Process, client: aio.Client) -> None:
        """Have a program learn the nodes, so that its next lock takes two rounds and no more."""
        lease = await self.acquire(process, client, 1.0)
        releasing = process.start(lease.release(), "release", awaited=True)
        await releasing.join()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await SimulatedRuntime(self.director).sleep(seconds)

    def voted_for(self, lease: aio.Lease) -> int:
        """On how many nodes the lock is this lease's."""
        return sum((node._get("lock", KEY) or "").startswith(lease.owner) for node in self.nodes)

    def taken(self) -> int:
        """On how many nodes the lock is anybody's."""
        return sum(node._get("lock", KEY) is not None for node in self.nodes)

    def play(self, story: Coroutine[Any, Any, None]) -> None:
        """Play a story to its end."""
        task = self.director.start(story, "story", awaited=True)
        self.world.run(task=task)
        task.result()
        self.world.end()


@pytest.mark.parametrize("fencing", [False, True], ids=["one round", "two rounds"])
def test_pause_before_the_answers_are_read_grants_nothing(*, fencing: bool) -> None:
    """
    Kleppmann: A is paused after the nodes have voted, before it reads that. Sanfilippo: then it looks at its clock.

    A  asks all nodes, and all vote for it; is paused before their answers arrive
       the votes run out
    B  is granted the lock
    A  reads five votes, and its clock: too late, so it is granted nothing
    """
    theatre = Theatre(fencing=fencing)

    async def story() -> None:
        first, second = theatre.client(theatre.a), theatre.client(theatre.b)
        await theatre.meet(theatre.a, first)
        asking = theatre.a.start(first.lock(NAME, ttl=10.0).acquire(timeout=0), "acquire", awaited=True)
        await theatre.sleep(0.15)
        assert theatre.taken() == 5
        theatre.a.pause()

        lease = await theatre.acquire(theatre.b, second, LONG)
        theatre.a.resume()
        await asking.join()

        with pytest.raises((lockkit.LockTimeout, lockkit.BackendUnavailable)):
            asking.result()
        await theatre.sleep(5.0)
        assert lease.held
        assert theatre.voted_for(lease) == 5, "and what A undoes is not B's"
        let_go(lease)

    theatre.play(story())


def test_requests_that_arrive_late_make_no_second_holder() -> None:
    """
    A message can be under way for longer than anybody waits for it.

    A  asks all nodes; the questions hang; A ends
       the questions arrive, and all nodes vote for A
    B  is granted the lock when these votes have run out, and then alone
    """
    theatre = Theatre()

    async def story() -> None:
        first, second = theatre.client(theatre.a), theatre.client(theatre.b)
        await theatre.meet(theatre.a, first)
        await theatre.meet(theatre.b, second)
        for node in theatre.nodes:
            node.node.pause()
        theatre.a.start(first.lock(NAME, ttl=10.0).acquire(), "acquire")
        await theatre.sleep(0.5)
        theatre.a.crash()

        for node in theatre.nodes:
            node.node.resume()  # what piled up is run now
        assert theatre.taken() == 5
        arrived = theatre.world.now
        lease = await theatre.acquire(theatre.b, second, LONG)

        assert theatre.world.now - arrived >= 9.0, "not before A's time was over, had it been granted the lock"
        assert theatre.voted_for(lease) >= 3
        let_go(lease)

    theatre.play(story())


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_clock_of_a_node_that_jumps_makes_a_second_holder(
    near_three: Client,
    everywhere: Client,
    nodes: list[RedisServer],
    links: list[FaultProxy],
    storage: redis.Redis,
) -> None:
    """
    Kleppmann's third scenario. Redis expires keys by the time of day: ahead by a ttl, and the vote is over.

    A  is granted the lock by 1, 2 and 3; 4 and 5 cannot be reached
       3's clock jumps ahead, and its vote for A ends
    B  is granted the lock by 3, 4 and 5; both believe
    B  writes; A writes, and is refused
    """
    first = near_three.lock(NAME, ttl=LONG, renew=False).acquire(timeout=PATIENCE)
    assert voted(nodes) == [True, True, True, False, False]
    with at(nodes[2]) as jumping:
        run_out(jumping, KEY)

    second = everywhere.lock(NAME, ttl=LONG, renew=False).acquire(timeout=PATIENCE)

    assert first.held
    assert second.held
    assert second.token > first.token, "node 3 has voted for both, so B's is higher"
    guard = lockkit.fencing.RedisGuard(storage)
    guard.set("file", "B's", token=second.token)
    with pytest.raises(lockkit.StaleToken):
        guard.set("file", "A's", token=first.token)
    for link in links:
        link.accept()
    wait_until(lambda: "A believes on" if first.confirm() else None, timeout=PATIENCE)
    assert first.lost, "as soon as it reaches the others, A is told"
    second.release()


# -- what a token must be ----------------------------------------------------------------------------------------------

WRITE_IF_MARKED = """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""


def mark(storage: redis.Redis, lease: Lease) -> None:
    """Sanfilippo's proposal, first step: put the random value of one's grant beside the data."""
    storage.set("file:mark", lease.owner)


def write_if_marked(storage: redis.Redis, value: str, lease: Lease) -> bool:
    """Second step: write if one's own value is still there, in one atomic operation of the store."""
    return bool(storage.eval(WRITE_IF_MARKED, 2, "file", "file:mark", value, lease.owner))


def test_random_value_as_mark_refuses_the_paused_holder(
    near_three: Client, everywhere: Client, storage: redis.Redis
) -> None:
    """Sanfilippo: uniqueness is enough, if each holder marks the data first and writes by compare-and-set."""
    paused = near_three.lock(NAME, ttl=0.5, renew=False).acquire(timeout=PATIENCE)
    mark(storage, paused)
    assert paused.wait_lost(PATIENCE)
    with everywhere.lock(NAME, ttl=LONG).acquire(timeout=PATIENCE) as lease:
        mark(storage, lease)
        assert write_if_marked(storage, "B's", lease)

        assert not write_if_marked(storage, "A's", paused)

    assert storage.get("file") == "B's"


def test_random_value_that_comes_late_shuts_the_holder_out(
    near_three: Client, everywhere: Client, storage: redis.Redis
) -> None:
    """
    A random value has no order: storage cannot tell which of two is the newer one.

    A  is granted the lock, and is paused before it has marked the data
    B  is granted the lock, marks the data
    A  goes on and marks the data
    B  holds, and is refused
    """
    paused, lease = replaced(near_three, everywhere)
    mark(storage, lease)
    mark(storage, paused)

    assert lease.held
    assert not write_if_marked(storage, "B's", lease)
    assert write_if_marked(storage, "A's", paused)
    lease.release()
