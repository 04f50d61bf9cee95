"""
A hook of mkdocs: counts of tests, taken when the site is built, so that no page has a number that gets stale.

``{tests: PATH PATH}`` in a page becomes the number of test functions and conformance cases in these files and folders,
and ``{conformance}`` what the committed run of the conformance suite found.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

__all__ = ["count", "on_page_markdown", "with_counts"]

ROOT = Path(__file__).parents[2]
RUN = ROOT / "docs" / "comparison" / "runs" / "conformance.json"
TESTS = re.compile(r"\{tests: ([^}]+)\}")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the source of each page."""
    return with_counts(markdown)


def with_counts(markdown: str) -> str:
    """
    Replace what stands for a number.

    Args:
        markdown: Source of a page.
    """
    markdown = TESTS.sub(lambda found: f"{sum(map(count, found[1].split())):,}", markdown)
    return markdown.replace("{conformance}", run()) if "{conformance}" in markdown else markdown


@cache
def count(path: str) -> int:
    """
    Number of test functions in a file or folder; a parametrised one counts once.

    Args:
        path: Below the root of the repository.
    """
    place = ROOT / path
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
    )


def run() -> str:
    """The committed run of the conformance suite in words."""
    found = json.loads(RUN.read_text())
    outcomes = [counts for backend in found["backends"] for counts in backend["groups"].values()]
    passed, failed = (sum(counts.get(outcome, 0) for counts in outcomes) for outcome in ("passed", "failed"))
    return f"on {found['date']} {passed:,} passed and {failed:,} failed, on {len(found['backends'])} backends"
