"""The primitives beyond one lock, without servers; those on servers are in ``test_libraries.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lockkit_tools.bench import catalog
from lockkit_tools.bench.run import Cell, Outcome, Run
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads import WORKLOADS
from tests.bench.fakes import subject
from tests.bench.test_honesty import SHORT, measure

NEW = ("read", "write", "readers", "permits", "locks", "election", "once")
SETTINGS = replace(SHORT, seconds=0.1, handoffs=3, warm_up=3)


def measure_all(subjects: Sequence[Subject], *workloads: str) -> Outcome:
    """Run; nothing may fail or be broken."""
    outcome = measure(subjects, *workloads, settings=SETTINGS)
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
    outcome = measure_all(catalog.subjects(["memory://"], faces=[face], peers=True), *NEW)  # type: ignore[list-item]

    assert measured(outcome)["lockkit"] == set(NEW)
    assert measured(outcome)["threading.Semaphore" if face == "blocking" else "asyncio.Semaphore"] == {"permits"}
    assert_figures(outcome.cells)


def test_baselines_take_several_locks_one_after_the_other(tmp_path: Path) -> None:
    """All of them held at the same time, and all freed."""
    found = catalog.subjects([f"file://{tmp_path}", f"sqlite:///{tmp_path / 'locks.db'}"], faces=["blocking"])
    baselines = [one for one in found if one.role == "baseline"]

    outcome = measure_all(baselines, "locks")

    assert measured(outcome) == {"flock + read + write": {"locks"}, "sqlite3, by hand": {"locks"}}
    assert_figures(outcome.cells)


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
        (cell,) = measure([leaky], workload, settings=settings).cells
        assert not cell.failed
        if cell.broken:
            return
