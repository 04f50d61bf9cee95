"""What the pages of docs/comparison say has a test, and every test here is told of on a page."""

from __future__ import annotations

import re

import pytest

from lockkit import registry
from lockkit.url import parse
from tests.comparison import capability_page
from tests.docs.story import ROOT

FOLDER = ROOT / "docs" / "comparison"
TESTS = {
    "naive-ways.md": "test_naive_ways.py",
    "redlock-debate.md": "test_redlock_debate.py",
}
CLAIM = re.compile(r"`(test_\w+)`")


def defined(text: str) -> set[str]:
    """The tests that a source defines."""
    return set(re.findall(r"def (test_\w+)\(", text))


def rows(page: str) -> list[str]:
    """The rows of the tables of a page, without heads and rules."""
    lines = (FOLDER / page).read_text().splitlines()
    return [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("| ") and not after.startswith("|---")
    ]


@pytest.mark.parametrize("page", sorted(path.name for path in FOLDER.glob("*.md")))
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    """A claim that leads nowhere is none."""
    known = set().union(
        *(
            defined(path.read_text())
            for folder in ("tests", "lockkit/testing")
            for path in (ROOT / folder).rglob("*.py")
        )
    )

    assert sorted(set(CLAIM.findall((FOLDER / page).read_text())) - known) == []


@pytest.mark.parametrize("page", TESTS)
def test_every_row_names_its_test(page: str) -> None:
    """What goes wrong, and what goes right, are both shown."""
    found = rows(page)

    assert found
    assert [row for row in found if not CLAIM.search(row)] == []


@pytest.mark.parametrize(("page", "tests"), TESTS.items())
def test_every_test_is_told_of(page: str, tests: str) -> None:
    """A scenario that no page mentions helps nobody to choose."""
    here = defined((ROOT / "tests" / "comparison" / tests).read_text())

    assert here
    assert sorted(here - set(CLAIM.findall((FOLDER / page).read_text()))) == []


def test_capabilities_are_those_of_the_backends() -> None:
    """The page is written by a program: `nox -s comparison` brings it up to date."""
    assert capability_page.PAGE.read_text() == capability_page.text()


def test_every_backend_has_its_row() -> None:
    """Whatever the registry leads to is compared, in each of its modes."""
    shown = set()
    for subject in capability_page.BACKENDS:
        url = parse(subject.url)
        shown.add(registry.find(url.scheme, dict(url.query).get("mode")))

    assert shown == {registry.find(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)}


def test_the_tree_leads_to_every_backend() -> None:
    """Whoever follows it ends somewhere, and each page of a backend is linked."""
    page = (FOLDER / "choosing.md").read_text()
    pages = {path.name for path in (ROOT / "docs" / "backends").glob("*.md")}

    assert pages == set(re.findall(r"\.\./backends/(\w+\.md)", page))
