"""Elections on ZooKeeper: on the same nodes as kazoo's ``Election``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit_tools.servers import ZooKeeperServer
from tests.backends.zookeeper.support import PATIENCE, Tree, kazoo_client

LONG = 60.0


@pytest.fixture
def ours(server: ZooKeeperServer) -> Iterator[lockkit.Client]:
    """A client of lockkit's."""
    with lockkit.connect(server.url) as client:
        yield client


@pytest.fixture
def theirs(server: ZooKeeperServer) -> Iterator[KazooClient]:
    """A client of kazoo's."""
    with kazoo_client(server.address) as client:
        yield client


def test_kazoo_waits_for_our_leader_and_we_for_theirs(ours: lockkit.Client, theirs: KazooClient) -> None:
    """One queue; each sees the other's leader."""
    contest = ours.election("x", ttl=LONG, value="ours:80")
    term = contest.campaign(PATIENCE)
    election = theirs.Election("/lockkit/x", "theirs:80")
    leading, enough = threading.Event(), threading.Event()

    def lead() -> None:
        leading.set()
        assert enough.wait(PATIENCE)

    thread = threading.Thread(target=lambda: election.run(lead))
    thread.start()
    Tree(theirs).until_waiting("/lockkit/x", 2)
    first, second = election.contenders()
    assert json.loads(first)["value"] == "ours:80"
    assert second == "theirs:80"
    assert not leading.is_set()

    term.resign()

    assert leading.wait(PATIENCE)
    leader = contest.leader()
    assert leader is not None
    assert leader.value == "theirs:80"
    assert leader.term is not None
    assert leader.term > term.token
    with pytest.raises(lockkit.LockTimeout):
        contest.campaign(timeout=0.2)

    enough.set()
    with contest.campaign(PATIENCE) as again:
        assert again.token > leader.term
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_candidate_of_ours_takes_over_when_kazoo_cancels(ours: lockkit.Client, theirs: KazooClient) -> None:
    """A place in the queue that kazoo gives up holds nobody up."""
    term = ours.election("y", ttl=LONG).campaign(PATIENCE)
    election = theirs.Election("/lockkit/y", "theirs")
    thread = threading.Thread(target=lambda: election.run(lambda: None))
    thread.start()
    Tree(theirs).until_waiting("/lockkit/y", 2)
    got: list[lockkit.Term] = []
    waiting = threading.Thread(target=lambda: got.append(ours.election("y", ttl=LONG).campaign(PATIENCE)))
    waiting.start()
    Tree(theirs).until_waiting("/lockkit/y", 3)

    election.cancel()
    thread.join(PATIENCE)
    term.resign()

    waiting.join(PATIENCE)
    assert got[0].token > term.token
    got[0].resign()


def test_kazoo_sees_new_metadata_of_our_leader(ours: lockkit.Client, theirs: KazooClient) -> None:
    """The node stays, so kazoo's contender goes on waiting, and ours goes on leading."""
    term = ours.election("z", ttl=LONG, value="ours:80").campaign(PATIENCE)
    election = theirs.Election("/lockkit/z", "theirs")
    led = threading.Event()
    thread = threading.Thread(target=lambda: election.run(led.set))
    thread.start()
    Tree(theirs).until_waiting("/lockkit/z", 2)

    term.update({"step": 2})

    first, second = election.contenders()
    assert json.loads(first)["step"] == 2
    assert second == "theirs"
    assert term.confirm()
    assert not led.is_set()
    term.resign()
    assert led.wait(PATIENCE)
    thread.join(PATIENCE)
