"""What the pages say of tests is true: the tests are there, and the tables are those that are checked."""

from __future__ import annotations

import re

from tests.docs.story import ROOT
from tests.interop.redis_py_differences import DIFFERENCES

EXPLANATION = ROOT / "docs" / "explanation"


def test_every_test_that_shows_a_claim_is_there() -> None:
    """docs/explanation/what-failover-does.md names a test for each of its claims."""
    sources = [path.read_text() for folder in ("tests", "lockkit/testing") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`(test_\w+)`", (EXPLANATION / "what-failover-does.md").read_text()))

    assert named
    assert [name for name in sorted(named) if not any(f"def {name}(" in source for source in sources)] == []


def test_every_row_on_failover_names_its_test() -> None:
    """A claim without a test is none."""
    rows = re.findall(r"^\| (?!event|---).*$", (EXPLANATION / "what-failover-does.md").read_text(), re.MULTILINE)

    assert rows
    assert [row for row in rows if "`test_" not in row] == []


def test_differences_from_redis_py_are_those_that_its_suite_checks() -> None:
    """The page has the table of the nox session: the same tests, with the same reasons."""
    page = (EXPLANATION / "redis-py-differences.md").read_text()
    documented = {
        name: reason
        for names, reason in re.findall(r"^\| (`test_.*?) \| (.*) \|$", page, re.MULTILINE)
        for name in re.findall(r"test_\w+", names)
    }

    assert documented == {name: reason for reasons in DIFFERENCES.values() for name, reason in reasons.items()}
