"""The witness of exclusion: what it takes for a violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit.testing.witness import Entry, Witness, read

GOOD = ["enter a 1", "leave a 1", "enter b 2", "leave b 2", "enter a 5", "leave a 5"]


def test_row_of_pairs_is_exclusion() -> None:
    """Nothing to say, and the shares are counted."""
    report = read(GOOD)

    report.expect_exclusion(3)
    assert report.entries == [Entry("a", 1), Entry("b", 2), Entry("a", 5)]
    assert report.shares() == {"a": 2, "b": 1}
    assert report.shares(2) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["enter a 1", "enter b 2", "leave a 1", "leave b 2"], "entered while"),
        (["enter a 1", "overlap b 2", "enter b 2", "leave b 2", "leave a 1"], "met somebody"),
        (["enter a 2", "leave a 2", "enter b 1", "leave b 1"], "no higher token"),
        (["enter a 2", "leave a 2", "enter b 2", "leave b 2"], "no higher token"),
        (["enter a 1"], "never left"),
        (["leave a 1"], "without having entered"),
    ],
)
def test_everything_else_is_a_violation(lines: list[str], said: str) -> None:
    """Each kind has its sentence."""
    report = read(lines)

    assert any(said in violation for violation in report.violations)
    with pytest.raises(AssertionError, match=said):
        report.expect_exclusion(len(report.entries))


def test_witness_that_saw_too_little_is_no_witness() -> None:
    """A short log does not pass."""
    with pytest.raises(AssertionError):
        read(GOOD).expect_exclusion(4)


def test_second_inside_is_noticed(tmp_path: Path) -> None:
    """By the marker file, whatever the order of the lines."""
    first, second = Witness(tmp_path), Witness(tmp_path)
    first.enter("a", 1)
    second.enter("b", 2)
    second.leave("b", 2)
    first.leave("a", 1)

    assert len(first.report().violations) >= 2
