"""Every library and baseline, on each kind of server that it locks on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
import sqlalchemy
from kazoo.client import KazooClient
from psycopg import connect

from lockkit_tools.bench import catalog
from lockkit_tools.bench.adapters.sql import Dlock
from lockkit_tools.bench.adapters.tooz import coordinator_url
from lockkit_tools.bench.catalog import ENTRIES, Entry
from lockkit_tools.bench.observers import watch
from lockkit_tools.bench.redis_connection import connect_to, node_urls
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers.resp import encode
from tests.bench.conftest import SERVERS
from tests.bench.test_command import report
from tests.bench.test_honesty import SHORT, measure
from tests.bench.test_primitives import NEW, assert_figures, measure_all, measured
from tests.bench.test_servers_asked import assert_shown
from tests.tries import until

CASES = [
    pytest.param(scheme, entry, id=f"{scheme}-{entry.template.target.rpartition('.')[2]}")
    for scheme in (*SERVERS, "sqlite")
    for entry in ENTRIES
    # mithril-locks asks for an older redis-py, so the tests do not install it: the comparison does.
    if scheme in entry.schemes and entry.mode in {None, "table"} and entry.distribution != "mithril-locks"
]
SETTINGS = replace(SHORT, lease_ttl=6.0, settle=0.5)


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


@pytest.mark.parametrize(
    ("scheme", "name", "expected"),
    [("zookeeper", "ZooKeeper", {}), ("etcd", "etcd", {}), ("postgresql", "PostgreSQL", {"fsync": "off"})],
)
def test_server_is_shown(url_of: Callable[[str], str], scheme: str, name: str, expected: dict[str, str]) -> None:
    """As in ``test_servers_asked.py``, where what is durable is asked."""
    assert_shown(url_of(scheme), name, expected)


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


# -- primitives beyond one lock ----------------------------------------------------------------------------------------


def test_redis_has_what_its_backend_offers(url_of: Callable[[str], str]) -> None:
    """Whatever that is, the reason for the rest names the capability; the raw socket has its own scripts."""
    found = [
        one
        for one in catalog.subjects([url_of("redis")], faces=["blocking"], peers=True)
        if one.label in {"lockkit", "raw socket", "raw socket + BLPOP"}
    ]
    outcome = measure_all(found, *NEW)

    ours = next(one for one in found if one.label == "lockkit")
    lacking = {name for name in NEW if WORKLOADS[name].kind in ours.lacks}
    assert measured(outcome)["lockkit"] == set(NEW) - lacking
    assert measured(outcome)["raw socket"] == {"read", "write", "readers", "permits", "locks", "once"}
    assert measured(outcome)["raw socket + BLPOP"] == {"election"}
    for cell in outcome.cells:
        if cell.subject is ours and cell.workload.name in lacking:
            assert "capabilities." in cell.skipped
    assert_figures(outcome.cells)


@pytest.mark.parametrize(
    ("target", "scheme"), [("zookeeper:KazooLock", "zookeeper"), ("etcd:RawEtcd", "etcd")], ids=["kazoo", "etcd"]
)
def test_recipes_are_all_but_once(url_of: Callable[[str], str], target: str, scheme: str) -> None:
    """Of kazoo, and of etcd's Go client by hand; several locks are locks one after the other."""
    (entry,) = [entry for entry in ENTRIES if entry.template.target.endswith(target)]
    outcome = measure_all([entry.subject(url_of(scheme), "here")], *NEW)

    assert list(measured(outcome).values()) == [set(NEW) - {"once"}]


# -- SQL ---------------------------------------------------------------------------------------------------------------

DLOCKS = [entry for entry in ENTRIES if "sql:Dlock" in entry.template.target and entry.mode == "advisory"]


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
@pytest.mark.parametrize("entry", DLOCKS, ids=lambda entry: entry.template.target)
def test_idle_waiters_of_sqlalchemy_dlock_wait_for_the_lock(
    url_of: Callable[[str], str], scheme: str, entry: Entry
) -> None:
    """Each on a connection of its own, not for one of the pool's; and what they leave open at the end is no failure."""
    settings = replace(SHORT, waiters=40, settle=2.0, idle_seconds=0.5, patience=120)

    outcome = measure([entry.subject(url_of(scheme), "here")], "idle", settings=settings)

    (cell,) = outcome.cells
    assert not cell.failed
    assert cell.rounds[0].figures["connections"] > settings.waiters


def test_sqlalchemy_dlock_waits_at_the_server(url_of: Callable[[str], str]) -> None:
    """With a time limit it would look once a second on PostgreSQL, and hand-offs would take as long."""
    url = url_of("postgresql")
    adapter = Dlock(url, 30.0)
    asyncio.run(adapter.open())

    def enter() -> None:
        with adapter.lock("seat"):
            pass

    waiter = threading.Thread(target=enter)
    with connect(url, autocommit=True) as eye, adapter.lock("seat"):
        waiter.start()
        query = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: eye.execute(query).fetchone())
    waiter.join()
    asyncio.run(adapter.close())


@pytest.mark.parametrize(
    ("scheme", "mode", "tables"),
    [
        *((scheme, "table", {"lockkit_bench_baseline"}) for scheme in ("postgresql", "mariadb", "sqlite")),
        # The baselines of mode=advisory have the same tables.
        *((scheme, "row", {"lockkit_bench_rows", "lockkit_bench_tokens"}) for scheme in ("postgresql", "mariadb")),
    ],
)
def test_tables_of_the_baselines_are_removed(
    url_of: Callable[[str], str], scheme: str, mode: str, tables: set[str]
) -> None:
    """Nothing of theirs stays in the user's database."""
    url = url_of(scheme)
    engine = sqlalchemy.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:")
    )
    arguments = ["--workload", "pair", "--face", "sync", "--rounds", "1", "--seconds", "0.01"]

    found = report(f"{url}?mode={mode}", *arguments)

    assert "ok" in {row["status"] for row in found["workloads"][0]["results"] if "by hand" in row["subject"]}
    with closing(engine.connect()) as connection:
        assert tables.isdisjoint(sqlalchemy.inspect(connection).get_table_names())
    engine.dispose()
