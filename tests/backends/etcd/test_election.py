"""Elections on etcd: on the same keys as ``etcdctl elect``, and never won with a dead key."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

import lockkit
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer
from lockkit_tools.servers.binaries import find_program
from tests.backends.etcd.support import queue_of, session_of, until_waiting
from tests.tries import have_time_to_answer

LONG = 120.0


@pytest.fixture
def client(server: EtcdServer) -> Iterator[lockkit.Client]:
    """A client."""
    with lockkit.connect(server.url) as one:
        yield one


@contextmanager
def etcdctl_elect(server: EtcdServer, *arguments: str) -> Iterator[IO[str]]:
    """Run ``etcdctl elect`` as a process; gives its output, and ends it in order."""
    process = subprocess.Popen(
        [str(find_program("etcdctl")), f"--endpoints={server.endpoint}", "elect", *arguments],
        env={"ETCDCTL_API": "3"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        process.terminate()
        process.communicate(timeout=4 * PATIENCE)


def test_etcdctl_waits_for_our_leader_and_we_for_theirs(
    server: EtcdServer, client: lockkit.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue; each sees the other's leader."""
    have_time_to_answer(monkeypatch)
    contest = client.election("shared", ttl=LONG, value="ours:80")
    ours = contest.campaign(PATIENCE)
    with etcdctl_elect(server, "lockkit/shared", "theirs:80") as output:
        until_waiting(client, "shared", 1)
        assert not ours.must_stop()

        ours.resign()

        key, value = output.readline().strip(), output.readline().strip()
        assert (key.rpartition("/")[0], value) == ("lockkit/shared", "theirs:80")
        leader = contest.leader()
        assert leader is not None
        assert (leader.owner, leader.value) == (key.rpartition("/")[2], "theirs:80")
        assert leader.term is not None
        assert leader.term > ours.token
        with pytest.raises(lockkit.LockTimeout):
            contest.campaign(timeout=0)

    with contest.campaign(PATIENCE) as next_term:
        assert next_term.token > leader.term


def test_etcdctl_shows_our_leader(server: EtcdServer, client: lockkit.Client) -> None:
    """``etcdctl elect -l`` prints the key, and what lockkit stores: the owner, and JSON with the value."""
    with (
        client.election("seen", ttl=LONG, value="ours:80").campaign(PATIENCE) as term,
        etcdctl_elect(server, "-l", "lockkit/seen") as output,
    ):
        key, value = output.readline().strip(), output.readline().strip()

    assert [key.rpartition("/")[0]] == ["lockkit/seen"]
    owner, _, metadata = value.partition(" ")
    assert owner == term.owner
    assert json.loads(metadata)["value"] == "ours:80"


def test_candidate_whose_session_ended_never_wins_with_its_dead_key(server: EtcdServer, client: lockkit.Client) -> None:
    """It takes a new place in the queue, and leads with a key that is there."""
    with lockkit.connect(server.url) as other:
        leader = other.election("dead", ttl=LONG).campaign(PATIENCE)
        terms: list[lockkit.Term] = []
        thread = threading.Thread(target=lambda: terms.append(client.election("dead", ttl=LONG).campaign(PATIENCE)))
        thread.start()
        until_waiting(other, "dead", 1)
        _, dead = queue_of(server, "lockkit/dead/")
        server.etcdctl("lease", "revoke", f"{session_of(server, dead):x}")

        leader.resign()
        thread.join(PATIENCE)

        (term,) = terms
        assert queue_of(server, "lockkit/dead/") != [dead]
        assert term.confirm()
        assert not term.must_stop()
        seen = other.election("dead").leader()
        assert seen is not None
        assert seen.term == term.token
        term.resign()
