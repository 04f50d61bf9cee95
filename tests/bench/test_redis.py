"""Every library and baseline on Redis, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lockkit_tools.bench.catalog import ENTRIES, Entry
from lockkit_tools.bench.redis_connection import connect_to, node_urls
from lockkit_tools.bench.run import Outcome, Run
from lockkit_tools.bench.server import watch
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers import RedisNodes, RedisServer
from lockkit_tools.servers.resp import ServerSaid, encode
from tests.bench.test_honesty import SHORT
from tests.tries import until

SETTINGS = replace(SHORT, lease_ttl=2.0, settle=0.5)
# mithril-locks asks for an older redis-py, so the tests do not install it: the comparison does.
ON_NODE = [entry for entry in ENTRIES if "redis" in entry.schemes and entry.distribution != "mithril-locks"]
ON_REDLOCK = [entry for entry in ENTRIES if "redlock" in entry.schemes]


@pytest.fixture(scope="module")
def node() -> Iterator[RedisServer]:
    """Give one node."""
    with RedisServer(password="p@ss:word") as server:  # noqa: S106 - of a throw-away server
        yield server


@pytest.fixture(scope="module")
def nodes() -> Iterator[RedisNodes]:
    """Give three independent nodes."""
    with RedisNodes(3) as group:
        yield group


def measure(entry: Entry, url: str, *workloads: str) -> dict[str, dict[str, float]]:
    """Figures by workload; fails if the subject does, or is not installed."""
    subject = entry.subject(url, "here")
    assert not subject.missing

    def go(settings: Settings) -> Outcome:
        return Run([subject], [WORKLOADS[name] for name in workloads], settings, seed=1).go(lambda *_: None)

    outcome = go(SETTINGS)
    if [cell.workload.name for cell in outcome.cells if cell.failed or cell.broken] == ["held"]:
        outcome = go(replace(SETTINGS, lease_ttl=9.0))  # the machine may have stood still for the ttl

    assert [problem for cell in outcome.cells if (problem := cell.failed or cell.broken)] == []
    return {cell.workload.name: cell.rounds[0].figures for cell in outcome.cells if cell.rounds}


@pytest.mark.parametrize("entry", ON_NODE, ids=lambda entry: entry.target)
def test_subject_on_one_node(node: RedisServer, entry: Entry) -> None:
    """It excludes, hands over and waits, behind a password."""
    figures = measure(entry, node.url, "pair", "contention", "handoff", "idle", "held")

    assert figures.keys() >= set(entry.workloads or ("pair", "contention", "handoff", "idle"))
    assert ("held" in figures) == entry.renews
    if "idle" in figures:
        assert figures["idle"]["connections"] >= 1


@pytest.mark.parametrize("entry", ON_REDLOCK, ids=lambda entry: entry.target)
def test_subject_on_independent_nodes(nodes: RedisNodes, entry: Entry) -> None:
    """It excludes with a majority of three."""
    until(lambda: measure(entry, nodes.url, "pair", "contention")["contention"]["sections"])


def test_observer_counts_commands_and_connections_of_others(node: RedisServer) -> None:
    """Its own questions are not counted."""
    with watch(node.url) as observer, connect_to(node.url) as connection:
        observer.begin()
        for _ in range(10):
            connection.ask(encode(b"PING"))
        seen = observer.end()
        about = observer.about()

    assert seen["connections"] == 1
    # Ten PINGs and nothing else, in a time that is not known exactly.
    assert seen["commands_per_second"] > 0
    assert about["appendonly"] == "no"
    assert about["version"]


def test_observer_counts_nothing_when_nothing_is_asked(node: RedisServer) -> None:
    """An idle server has no commands, though it is watched."""
    with watch(node.url) as observer:
        observer.begin()
        seen = observer.end()

    assert seen == {"commands_per_second": 0.0, "connections": 0}


def test_server_that_refuses_the_password_is_an_os_error_without_it(node: RedisServer) -> None:
    """So that the subject fails, and the run goes on."""
    with pytest.raises(ConnectionError) as caught:
        watch(node.url.replace(":p%40ss", ":hidden"))

    assert "hidden" not in str(caught.value)
    assert "WRONGPASS" in str(caught.value)


def test_urls_of_the_nodes_keep_their_own_credentials() -> None:
    """A Redlock URL is taken apart for libraries that want one URL for each node."""
    assert node_urls("redlock://u:p%40w@h1:1,h2,:x@[::1]:3/4") == [
        "redis://u:p%40w@h1:1/4",
        "redis://u:p%40w@h2/4",
        "redis://:x@[::1]:3/4",
    ]
    assert node_urls("redis://h/1") == ["redis://h/1"]


def test_raw_answers_are_parsed(node: RedisServer) -> None:
    """Strings, numbers, lists, nothing, and errors."""
    with connect_to(node.url) as connection:
        assert connection.ask(encode(b"PING")) == b"PONG"
        assert connection.ask(encode(b"GET", b"none")) is None
        assert connection.ask(encode(b"SET", b"k", b"v" * 10_000)) == b"OK"
        assert connection.ask(encode(b"GET", b"k")) == b"v" * 10_000
        assert connection.ask(encode(b"DEL", b"k")) == 1
        assert connection.ask(encode(b"MGET", b"k", b"l")) == [None, None]
        with pytest.raises(ServerSaid, match="ERR unknown command"):
            connection.ask(encode(b"NONSENSE"))
