"""Leaders that are killed or frozen, on real servers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import pytest

import lockkit
from lockkit.runtime import monotonic
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer, PostgresServer, RedisServer, require

SERVERS: dict[str, Callable[[], Any]] = {"redis": RedisServer, "etcd": EtcdServer, "postgresql": PostgresServer}
TTL = 4.0

LEADER = """
import sys
import lockkit
from lockkit.runtime import monotonic
with lockkit.connect(sys.argv[1]) as client:
    try:
        with client.election("x", ttl=float(sys.argv[2]), value="leader").campaign() as term:
            print("term", term.token, flush=True)
            while not term.must_stop(0.01):
                print("act", monotonic(), flush=True)
            print("stopped", monotonic(), flush=True)
    except lockkit.LockLost:
        print("lost", monotonic(), flush=True)
"""


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server for the tests of this module."""
    require(request.param, local=True)
    with SERVERS[request.param]() as server:
        yield server.url


class Leader:
    """A process that leads."""

    def __init__(self, url: str) -> None:
        """Start it; returns once it leads."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER, url, str(TTL)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        word, _, number = self.process.stdout.readline().partition(" ")
        assert word == "term"
        self.term = int(number)

    def rest(self) -> list[tuple[str, float]]:
        """Return what it says until it ends."""
        said, _ = self.process.communicate(timeout=4 * PATIENCE)
        return [(word, float(at)) for word, at in (line.split() for line in said.splitlines())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def candidate(url: str) -> Iterator[lockkit.Client]:
    """Another candidate's client."""
    with lockkit.connect(url) as client:
        yield client


def won_after(strike: Callable[[], None], candidate: lockkit.Client, leader: Leader) -> lockkit.Term:
    """Strike while the candidate campaigns; returns its term."""
    contest = candidate.election("x", ttl=60)
    before = contest.leader()
    assert before is not None
    assert (before.term, before.value) == (leader.term, "leader")
    terms: list[lockkit.Term] = []
    thread = threading.Thread(target=lambda: terms.append(contest.campaign(timeout=TTL + PATIENCE)))
    thread.start()
    strike()
    thread.join(TTL + 2 * PATIENCE)
    return terms[0]


def test_killed_leader_is_replaced(url: str, candidate: lockkit.Client) -> None:
    """With a later term."""
    with Leader(url) as leader, won_after(leader.process.kill, candidate, leader) as term:
        assert term.token > leader.term
        assert not term.must_stop()


def test_frozen_leader_is_replaced_and_stops_when_it_wakes(url: str, candidate: lockkit.Client) -> None:
    """It may be frozen between the question and its act: that one act is what the term number is for."""
    with ExitStack() as stack:
        leader = stack.enter_context(Leader(url))
        term = won_after(lambda: leader.process.send_signal(signal.SIGSTOP), candidate, leader)
        stack.enter_context(term)
        won_at = monotonic()
        guard = lockkit.fencing.TokenGuard("x")
        guard.accept(term.token)

        leader.process.send_signal(signal.SIGCONT)
        said = leader.rest()

        assert [word for word, _ in said[-2:]] == ["stopped", "lost"]
        assert len([at for word, at in said if word == "act" and at >= won_at]) <= 1
        with pytest.raises(lockkit.StaleToken):
            guard.accept(leader.term)
        assert not term.must_stop()
