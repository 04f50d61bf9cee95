"""
A hook of mkdocs: names of tests become footnotes, so that a page shows what it says and not who proves it.

The sources keep the names, in the column "shown by" of a table or in brackets at the end of an item of a list, and
tests/docs and tests/comparison check that they exist.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMN = re.compile(r"shown\b.*\bby")
TEST = re.compile(r"`(test_\w+)`")
ITEM = re.compile(r"^(- .*) \(`(test_\w+)`(?:; lockkit: `(test_\w+)`)?\)$")
BETWEEN = re.compile(r"\](?:, | and )\[\^")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the source of each page."""
    return with_footnotes(markdown)


def with_footnotes(markdown: str) -> str:
    """Replace the names of tests in columns "shown by", and at the end of items, by footnotes, and append these."""
    found: dict[str, None] = {}
    lines = []
    columns: list[int] | None = None
    for line in markdown.splitlines():
        cells = line.split("|")
        if item := ITEM.match(line):
            names = [name for name in item.groups()[1:] if name]
            found |= dict.fromkeys(names)
            cells = [" ".join([item[1], *(f"[^{name}]" for name in names)])]
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = [number for number, head in enumerate(cells) if COLUMN.fullmatch(head.strip())]
            for number in columns:
                cells[number] = " tests "
        else:
            for number in columns:
                found |= dict.fromkeys(TEST.findall(cells[number]))
                cells[number] = BETWEEN.sub("] [^", TEST.sub(r"[^\1]", cells[number]))
        lines.append("|".join(cells))
    notes = [f"[^{name}]: `{name}` in {' and '.join(f'`{place}`' for place in places(name))}." for name in found]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def places(name: str) -> list[str]:
    """The files that define a test."""
    return [path for path, text in sources().items() if f"def {name}(" in text]


@cache
def sources() -> dict[str, str]:
    """All tests, the conformance suite among them."""
    files = [path for folder in ("tests", "lockkit/testing") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}
