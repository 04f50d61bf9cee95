"""Every code block of README.md and docs/ runs, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.docs.markdown import Block, blocks, stories
from tests.docs.story import COMMAND_SECONDS_MAX, ROOT, Story

PAGES = sorted(
    page.relative_to(ROOT) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("changelog.d/*.md"))
)
# The conformance suite runs in this one, with its waits in real time.
SLOW = "docs/tutorials/write-a-backend.md"
STORIES = [story for page in PAGES for story in stories(blocks(page, (ROOT / page).read_text()))]


def param(story: list[Block]) -> ParameterSet:
    """A story as a test, with its place as id."""
    slow = str(story[0].page) == SLOW
    return pytest.param(
        story,
        id=story[0].place,
        marks=[pytest.mark.slow, pytest.mark.timeout(COMMAND_SECONDS_MAX + 60)] if slow else [],
    )


@pytest.mark.parametrize("story", [param(story) for story in STORIES])
def test_blocks_run_as_written(story: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page do what they say, in the order in which a reader meets them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCKKIT_STATE_DIR", str(tmp_path / "state"))
    teller = Story(tmp_path)

    try:
        for block in story:
            teller.tell(block)
    finally:
        teller.close()


def test_readme_and_tutorials_have_code() -> None:
    """The pages that must have code have some: an empty list of stories would pass unseen."""
    pages = {str(story[0].page) for story in STORIES}

    assert {"README.md", "docs/tutorials/first-lock.md", "docs/tutorials/write-a-backend.md"} <= pages


def prose(text: str) -> list[tuple[int, str]]:
    """The numbered lines of a page that are running text: no code, tables, headings or comments."""
    lines = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            inside = not inside
        elif not inside and not line.lstrip().startswith(("|", "#", "<!--", "!!!", ":::")):
            lines.append((number, re.sub(r"`[^`]*`|\([^)]*\)", "x", line)))
    return lines


def test_sources_have_one_sentence_per_line() -> None:
    """A sentence starts on a line of its own, so that a diff shows which one changed."""
    lines = [(page, number, line) for page in PAGES for number, line in prose((ROOT / page).read_text())]

    assert [f"{page}:{number}" for page, number, line in lines if re.search(r"[a-z)][.?!] [A-Z]", line)] == []


def test_relative_links_outside_the_site_lead_somewhere() -> None:
    """A link of the README and its neighbours names a file that is there (mkdocs checks those of docs/)."""
    pages = [page for page in PAGES if page.parent == page.parent.parent]
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")
    links = [page.parent / path for page in pages for path in link.findall((ROOT / page).read_text())]

    assert [path for path in links if not (ROOT / path).exists()] == []
