"""The primitives beyond one lock: lockkit, and who has them beside it, on memory and on real servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lockkit_tools.bench import catalog
from lockkit_tools.bench.run import Cell, Outcome, Run
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers import EtcdServer, RedisServer, ZooKeeperServer
from tests.bench.fakes import subject
from tests.bench.test_honesty import SHORT

NEW = ("read", "write", "readers", "permits", "locks", "election", "once")
SETTINGS = replace(SHORT, seconds=0.1, handoffs=3, warm_up=3)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """Give one node."""
    with RedisServer() as server:
        yield server


def measure(subjects: Sequence[Subject], *workloads: str) -> Outcome:
    """Run, without a progress bar; nothing may fail or be broken."""
    outcome = Run(subjects, [WORKLOADS[name] for name in workloads], SETTINGS, seed=1).go(lambda *_: None)
    assert [problem for cell in outcome.cells if (problem := cell.failed or cell.broken)] == []
    return outcome


def measured(outcome: Outcome) -> dict[str, set[str]]:
    """Which workloads each subject took part in."""
    found: dict[str, set[str]] = {}
    for cell in outcome.cells:
        if cell.rounds:
            found.setdefault(cell.subject.label, set()).add(cell.workload.name)
    return found


def assert_figures(cells: Sequence[Cell]) -> None:
    """All that the workload promises was measured."""
    for cell in cells:
        if cell.rounds:
            shown = {figure.key for figure in cell.workload.figures if figure.shown} - {"share"}
            assert cell.rounds[0].figures.keys() >= shown, cell.workload.name


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_lockkit_has_all_of_them_in_memory(face: str) -> None:
    """In both APIs; the semaphore of the standard library stands beside it as a baseline."""
    outcome = measure(catalog.subjects(["memory://"], faces=[face], peers=True), *NEW)  # type: ignore[list-item]

    assert measured(outcome)["lockkit"] == set(NEW)
    assert measured(outcome)["threading.Semaphore" if face == "blocking" else "asyncio.Semaphore"] == {"permits"}
    assert_figures(outcome.cells)


def test_redis_has_what_its_backend_offers(redis: RedisServer) -> None:
    """Whatever that is, the reason for the rest names the capability; the raw socket has its own scripts."""
    found = [
        one
        for one in catalog.subjects([redis.url], faces=["blocking"], peers=True)
        if one.label in {"lockkit", "raw socket", "raw socket + BLPOP"}
    ]
    outcome = measure(found, *NEW)

    ours = next(one for one in found if one.label == "lockkit")
    lacking = {name for name in NEW if WORKLOADS[name].kind in ours.lacks}
    assert measured(outcome)["lockkit"] == set(NEW) - lacking
    assert measured(outcome)["raw socket"] == {"read", "write", "readers", "permits", "locks", "once"}
    assert measured(outcome)["raw socket + BLPOP"] == {"election"}
    for cell in outcome.cells:
        if cell.subject is ours and cell.workload.name in lacking:
            assert "capabilities." in cell.skipped
    assert_figures(outcome.cells)


def test_kazoo_has_its_recipes() -> None:
    """All but once; several locks are its locks one after the other."""
    with ZooKeeperServer() as server:
        (entry,) = [entry for entry in catalog.ENTRIES if entry.template.label == "kazoo Lock"]
        outcome = measure([entry.subject(server.url, "here")], *NEW)

    assert measured(outcome) == {"kazoo Lock": {"read", "write", "readers", "permits", "locks", "election"}}


def test_baselines_take_several_locks_one_after_the_other(tmp_path: Path) -> None:
    """All of them held at the same time, and all freed."""
    found = catalog.subjects([f"file://{tmp_path}", f"sqlite:///{tmp_path / 'locks.db'}"], faces=["blocking"])
    baselines = [one for one in found if one.role == "baseline"]

    outcome = measure(baselines, "locks")

    assert measured(outcome) == {"flock + read + write": {"locks"}, "sqlite3, by hand": {"locks"}}
    assert_figures(outcome.cells)


def test_etcd_by_hand_has_all_but_once() -> None:
    """Read locks and the election as the recipes of its Go client."""
    with EtcdServer() as server:
        (entry,) = [entry for entry in catalog.ENTRIES if entry.template.target.endswith("etcd:RawEtcd")]
        outcome = measure([entry.subject(server.url, "here")], *NEW)

    assert measured(outcome) == {"gRPC, by hand": {"read", "write", "readers", "permits", "locks", "election"}}


def test_library_without_a_primitive_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """By its own name."""
    outcome = Run([subject("Good", tmp_path)], [WORKLOADS["permits"]], SETTINGS, seed=1).outcome

    assert [cell.skipped for cell in outcome.cells] == ["Good has no semaphore"]


@pytest.mark.parametrize("workload", ["readers", "permits"])
def test_lock_that_lets_all_in_is_broken(tmp_path: Path, workload: str) -> None:
    """The witness sees writers beside others, and more sections than there are permits."""
    leaky = replace(subject("LeakyPrimitives", tmp_path), kinds=("read", "write", "permit"))
    settings = replace(SETTINGS, processes=4, seconds=0.3)
    while True:
        outcome = Run([leaky], [WORKLOADS[workload]], settings, seed=1).go(lambda *_: None)
        (cell,) = outcome.cells
        assert not cell.failed
        if cell.broken:
            return
