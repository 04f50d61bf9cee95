"""Holders that are killed or frozen, for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockkit_tools.bench import catalog
from lockkit_tools.bench.subject import Face
from tests.bench.fakes import subject
from tests.bench.test_honesty import SHORT, measure, nothing_left

SETTINGS = replace(SHORT, crash_ttl=3.0)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_lockkit_is_taken_over_from_a_holder_that_is_killed_or_frozen(tmp_path: Path, face: Face) -> None:
    """Both ways; the frozen one has its ttl to the end, counted from its last renewal."""
    subjects = catalog.subjects(["file:"], faces=(face,), scratch={"file:": tmp_path}, peers=False)

    outcome = measure(subjects, "crash", "freeze", settings=SETTINGS)

    crash, freeze = (cell.rounds[0].figures for cell in outcome.cells)
    assert crash["never"] == freeze["never"] == 0
    assert freeze["fraction"] > 0.2
    assert freeze["seconds"] == pytest.approx(freeze["fraction"] * 3.0)


def test_leases_are_not_shorter_than_the_backend_grants(tmp_path: Path) -> None:
    """Else lockkit would refuse them, and the run would end as failed: object stores have none below 5 s."""
    (stores,) = catalog.subjects(["s3://bucket"], faces=["blocking"], peers=False)

    outcome = measure(
        [replace(subject("Good", tmp_path), ttl_min=0.5)], "freeze", settings=replace(SHORT, crash_ttl=0.2)
    )

    assert (stores.ttl_min, stores.poll) == (5.0, 1.0)
    assert outcome.cells[0].rounds[0].figures == {"never": 1, "ttl": 0.5}


def test_lock_that_its_frozen_holder_keeps_is_told(tmp_path: Path) -> None:
    """An open file is locked as long as its process lives, so there is no figure, but a sentence."""
    outcome = measure([subject("Good", tmp_path)], "freeze", settings=replace(SHORT, crash_ttl=0.2))

    (cell,) = outcome.cells
    assert cell.status == "ok"
    assert cell.rounds[0].figures == {"never": 1, "ttl": 0.2}
    assert "still locked" in cell.rounds[0].note


def test_waiter_that_is_let_in_before_the_crash_breaks_exclusion(tmp_path: Path) -> None:
    """Where the holder renews; a lock that is not renewed has run out, which is told."""
    renewing, other = subject("Leaky", tmp_path, renews=True), subject("Leaky", tmp_path, number=2)

    outcome = measure([renewing, other], "crash")

    broken, lapsed = outcome.cells
    assert "let in while the holder lived" in broken.broken
    assert not lapsed.broken
    assert "ran out before" in lapsed.rounds[0].note


def test_neither_killed_nor_frozen_processes_are_left(tmp_path: Path) -> None:
    """A frozen process would stay for ever."""
    with nothing_left():
        measure([subject("Good", tmp_path)], "crash", "freeze", settings=replace(SHORT, crash_ttl=0.2))
