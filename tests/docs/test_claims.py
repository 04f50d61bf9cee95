"""What the pages say of tests is true: the tests are there, and the tables are those that are checked."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.story import ROOT
from tests.interop.kazoo_differences import DIFFERENCES as KAZOO
from tests.interop.redis_py_differences import DIFFERENCES as REDIS_PY

EXPLANATION = ROOT / "docs" / "explanation"


NAME = re.compile(r"`(test_\w+)`")
PATH = re.compile(r"`((?:tests|lockkit|packages|docs|examples|compose)/[\w./-]+)`")
# These name tests of another project.
FOREIGN = {"kazoo-differences.md", "redis-py-differences.md"}
PAGES = {page: page.read_text() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}
CLAIMS = [page for page, text in PAGES.items() if page.name not in FOREIGN and NAME.search(text)]


@cache
def known() -> set[str]:
    """All tests, the conformance suite among them."""
    files = [path for folder in ("tests", "lockkit/testing") for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in re.findall(r"def (test_\w+)\(", path.read_text())}


@pytest.mark.parametrize("page", CLAIMS, ids=lambda page: page.name)
def test_every_test_that_shows_a_claim_is_there(page: Path) -> None:
    """A claim that leads nowhere is none."""
    assert sorted(set(NAME.findall(PAGES[page])) - known()) == []


def test_every_file_that_a_page_names_is_there() -> None:
    """A reader who follows it finds it."""
    named = {(page.name, path) for page, text in PAGES.items() for path in PATH.findall(text)}

    assert named
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []


def test_commands_quote_what_a_shell_would_expand() -> None:
    """zsh, the shell of macOS, runs nothing where a ? matches no file."""
    commands = re.compile(r"^\$ (.+)$|`(lockkit [^`]+)`", re.MULTILINE)
    texts = {page: text for page, text in PAGES.items() if page.parent.name != "decisions"}  # kept as they were
    found = [(page.name, "".join(words)) for page, text in texts.items() for words in commands.findall(text)]
    quoted = re.compile(r"'[^']*'|\"[^\"]*\"")

    assert found
    assert [command for command in found if re.search(r"\w\?\w+=", quoted.sub("", command[1]))] == []


@pytest.mark.parametrize(("page", "header"), [("what-failover-does.md", "event"), ("sql-modes.md", "what happens")])
def test_every_row_of_events_names_its_test(page: str, header: str) -> None:
    """A claim without a test is none."""
    tables = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", (EXPLANATION / page).read_text(), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]

    assert rows
    assert [row for row in rows if "`test_" not in row] == []


@pytest.mark.parametrize(("page", "differences"), [("redis-py", REDIS_PY), ("kazoo", KAZOO)])
def test_documented_differences_are_those_that_the_suite_checks(
    page: str, differences: dict[str, dict[str, str]]
) -> None:
    """The page has the table of the nox session: the same tests, with the same reasons."""
    text = (EXPLANATION / f"{page}-differences.md").read_text()
    rows = re.findall(r"^\| (`test_.*?) \| (.*) \|$", text, re.MULTILINE)
    documented = {name: reason for names, reason in rows for name in re.findall(r"test_\w+", names)}

    assert documented == {name: reason for reasons in differences.values() for name, reason in reasons.items()}
