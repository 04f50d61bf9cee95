"""What the pages say of tests is true: the tests are there, and the tables are those that are checked."""

from __future__ import annotations

import re

import pytest

from tests.docs.story import ROOT
from tests.interop.kazoo_differences import DIFFERENCES as KAZOO_DIFFERENCES
from tests.interop.redis_py_differences import DIFFERENCES

EXPLANATION = ROOT / "docs" / "explanation"


@pytest.mark.parametrize("page", ["what-failover-does.md", "sql-modes.md"])
def test_every_test_that_shows_a_claim_is_there(page: str) -> None:
    """These pages of docs/explanation name a test for each of their claims."""
    sources = [path.read_text() for folder in ("tests", "lockkit/testing") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`(test_\w+)`", (EXPLANATION / page).read_text()))

    assert named
    assert [name for name in sorted(named) if not any(f"def {name}(" in source for source in sources)] == []


@pytest.mark.parametrize(("page", "header"), [("what-failover-does.md", "event"), ("sql-modes.md", "what happens")])
def test_every_row_of_events_names_its_test(page: str, header: str) -> None:
    """A claim without a test is none."""
    tables = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", (EXPLANATION / page).read_text(), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]

    assert rows
    assert [row for row in rows if "`test_" not in row] == []


def documented_differences(page: str) -> dict[str, str]:
    """The tests of another project that a page says to fail, and why."""
    text = (EXPLANATION / page).read_text()
    return {
        name: reason
        for names, reason in re.findall(r"^\| (`test_.*?) \| (.*) \|$", text, re.MULTILINE)
        for name in re.findall(r"test_\w+", names)
    }


def test_differences_from_redis_py_are_those_that_its_suite_checks() -> None:
    """The page has the table of the nox session: the same tests, with the same reasons."""
    expected = {name: reason for reasons in DIFFERENCES.values() for name, reason in reasons.items()}

    assert documented_differences("redis-py-differences.md") == expected


def test_differences_from_kazoo_are_those_that_its_suite_checks() -> None:
    """As for redis-py."""
    assert documented_differences("kazoo-differences.md") == KAZOO_DIFFERENCES
