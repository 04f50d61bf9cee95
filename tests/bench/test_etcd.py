"""Every library and baseline on etcd, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lockkit_tools.bench.catalog import ENTRIES, Entry
from lockkit_tools.bench.run import Run
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers import EtcdServer
from tests.bench.test_honesty import SHORT
from tests.tries import until

SETTINGS = replace(SHORT, lease_ttl=20.0, settle=0.5)
ON_ETCD = [entry for entry in ENTRIES if entry.target.startswith("etcd:")]


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """Give one member."""
    with EtcdServer() as member:
        yield member


@pytest.mark.parametrize("entry", ON_ETCD, ids=lambda entry: entry.target)
def test_subject_on_one_member(server: EtcdServer, entry: Entry) -> None:
    """It excludes, and hands over."""
    subject = entry.subject(server.url, "here")
    assert not subject.missing

    chosen = [WORKLOADS[name] for name in ("pair", "contention")]

    def sections() -> float | None:
        outcome = Run([subject], chosen, SETTINGS, seed=1).go(lambda *_: None)
        assert [problem for cell in outcome.cells if (problem := cell.failed or cell.broken)] == []
        figures = {cell.workload.name: cell.rounds[0].figures for cell in outcome.cells if cell.rounds}
        assert figures.keys() == {"pair", "contention"}
        return figures["contention"]["sections"]

    until(sections)  # again where all come too late for a turn
