"""Every library and baseline, on each kind of server that it locks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
from kazoo.client import KazooClient

from lockkit_tools.bench.adapters.tooz import coordinator_url
from lockkit_tools.bench.catalog import ENTRIES, Entry
from lockkit_tools.bench.observers import watch
from lockkit_tools.bench.redis_connection import connect_to, node_urls
from lockkit_tools.servers import EtcdServer, MariaServer, PostgresServer, RedisNodes, RedisServer, ZooKeeperServer
from lockkit_tools.servers.base import Service
from lockkit_tools.servers.resp import encode
from tests.bench.test_command import report
from tests.bench.test_honesty import SHORT, measure
from tests.tries import until

SERVERS: dict[str, Callable[[], Service]] = {
    "redis": lambda: RedisServer(password="p@ss:word"),  # noqa: S106 - of a throw-away server
    "redlock": lambda: RedisNodes(3),
    "etcd": EtcdServer,
    "zookeeper": ZooKeeperServer,
    "postgresql": lambda: PostgresServer(password="p@ss"),  # noqa: S106
    "mariadb": lambda: MariaServer(password="p@ss"),  # noqa: S106
}
CASES = [
    pytest.param(scheme, entry, id=f"{scheme}-{entry.template.target.rpartition('.')[2]}")
    for scheme in (*SERVERS, "sqlite")
    for entry in ENTRIES
    # mithril-locks asks for an older redis-py, so the tests do not install it: the comparison does.
    if scheme in entry.schemes and entry.mode in {None, "table"} and entry.distribution != "mithril-locks"
]
SETTINGS = replace(SHORT, lease_ttl=20.0, settle=0.5)


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start each kind of server when a test first asks for it."""
    with ExitStack() as running:

        @cache
        def find(scheme: str) -> str:
            if scheme == "sqlite":
                return f"sqlite:///{tmp_path_factory.mktemp('bench')}/bench.db"
            return running.enter_context(SERVERS[scheme]()).url

        yield find


@pytest.mark.parametrize(("scheme", "entry"), CASES)
def test_subject_locks_and_excludes(url_of: Callable[[str], str], scheme: str, entry: Entry) -> None:
    """Alone and among contenders, where the witness sees nobody beside it; on Redis it hands over and waits too."""
    workloads = ["pair", "contention", *(["handoff", "idle", "held"] if scheme == "redis" else [])]
    subject = entry.subject(url_of(scheme), "here")
    assert not subject.missing

    def sections() -> float:
        outcome = measure([subject], *workloads, settings=SETTINGS)
        assert [problem for cell in outcome.cells if (problem := cell.failed or cell.broken)] == []
        figures = {cell.workload.name: cell.rounds[0].figures for cell in outcome.cells if cell.rounds}
        assert figures.keys() >= set(subject.workloads or workloads) & set(workloads) - {"held"}
        assert ("held" in figures) == ("held" in workloads and subject.renews)
        return figures.get("contention", {"sections": 1})["sections"]

    until(sections)  # again where all come too late for a turn


def test_nodes_of_other_libraries_are_removed(url_of: Callable[[str], str]) -> None:
    """Those of the locks of kazoo, its baseline and tooz, which ZooKeeper keeps when a lock is released."""
    url = url_of("zookeeper")
    found = report(url, "--workload", "pair", "--face", "sync", "--rounds", "1", "--seconds", "0.01")

    assert {row["status"] for row in found["workloads"][0]["results"]} == {"ok"}
    client = KazooClient(url.partition("://")[2])
    client.start()
    try:
        assert client.exists("/lockkit-bench") is None
        assert client.get_children("/tooz/locks") == []
    finally:
        client.stop()
        client.close()


def test_observer_counts_commands_and_connections_of_others(url_of: Callable[[str], str]) -> None:
    """Its own questions are not counted."""
    with watch(url_of("redis")) as observer, connect_to(url_of("redis")) as connection:
        observer.begin()
        for _ in range(10):
            connection.ask(encode(b"PING"))
        seen = observer.end()

    assert seen["connections"] == 1
    # Ten PINGs and nothing else, in a time that is not known exactly.
    assert seen["commands_per_second"] > 0


def test_url_is_told_in_the_words_of_each_library() -> None:
    """Tooz wants whole seconds and a password that it does not decode; libraries of Redlock want one URL a node."""
    told = {
        "redis://u:p%40w@h:1/2": "redis://u:p@w@h:1?lock_timeout=3&timeout=3&db=2",
        "etcd://h1:1,h2": "etcd3+http://h1:1?timeout=3&lock_timeout=3",
        "zookeeper://h1:1,h2:2": "kazoo://h1:1,h2:2?timeout=3",
        "postgresql://u@h:1/db?mode=advisory": "postgresql://u@h:1/db",
        "mariadb://u:p%40w@h:1/db": "mysql://u:p@w@h:1/db",
        "file:///var/lock": "file:///var/lock",
    }

    assert {url: coordinator_url(url, 3.7) for url in told} == told
    assert node_urls("redlock://u:p%40w@h1:1,h2,:x@[::1]:3/4") == [
        "redis://u:p%40w@h1:1/4",
        "redis://u:p%40w@h2/4",
        "redis://:x@[::1]:3/4",
    ]
