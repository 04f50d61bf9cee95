"""tooz on every server that it has a driver for; on Redis it is measured with the others there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockkit_tools.bench.adapters.tooz import coordinator_url
from lockkit_tools.bench.catalog import ENTRIES
from lockkit_tools.servers import EtcdServer, MariaServer, PostgresServer, Server, ZooKeeperServer
from tests.bench.test_honesty import SHORT, measure
from tests.tries import until

SERVERS: list[Callable[[], Server]] = [
    EtcdServer,
    ZooKeeperServer,
    lambda: PostgresServer(password="p@ss"),  # noqa: S106
    lambda: MariaServer(password="p@ss"),  # noqa: S106
]


@pytest.mark.parametrize("make", SERVERS)
def test_tooz_locks_on_the_server(make: Callable[[], Server]) -> None:
    """It excludes two processes."""
    with make() as server:
        scheme = server.url.partition(":")[0]
        (entry,) = [entry for entry in ENTRIES if entry.label == "tooz" and scheme in entry.schemes]
        subject = entry.subject(server.url, "here")

        def sections() -> float | None:
            outcome = measure([subject], "contention", settings=replace(SHORT, seconds=0.5, processes=2))
            assert [problem for cell in outcome.cells if (problem := cell.failed or cell.broken)] == []
            return outcome.cells[0].rounds[0].figures["sections"]

        until(sections)  # again where both come too late for a turn


def test_url_is_told_in_tooz_s_words() -> None:
    """With its times in whole seconds, and a password that it does not decode."""
    told = {
        "redis://u:p%40w@h:1/2": "redis://u:p@w@h:1?lock_timeout=3&timeout=3&db=2",
        "etcd://h1:1,h2": "etcd3+http://h1:1?timeout=3&lock_timeout=3",
        "zookeeper://h1:1,h2:2": "kazoo://h1:1,h2:2?timeout=3",
        "postgresql://u@h:1/db?mode=advisory": "postgresql://u@h:1/db",
        "mariadb://u:p%40w@h:1/db": "mysql://u:p@w@h:1/db",
        "file:///var/lock": "file:///var/lock",
    }

    assert {url: coordinator_url(url, 3.7) for url in told} == told
