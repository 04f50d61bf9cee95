"""The pages on tests and sources are complete, and their counts are counted."""

from __future__ import annotations

import re

import pytest

from tests.docs.counts import TESTS, count, with_counts
from tests.docs.story import ROOT

EXPLANATION = ROOT / "docs" / "explanation"
PAGE = (EXPLANATION / "how-this-is-tested.md").read_text()
COUNTED = sorted({path for found in TESTS.findall(PAGE) for path in found.split()})


@pytest.mark.parametrize("path", COUNTED)
def test_what_is_counted_has_tests(path: str) -> None:
    """A folder that was renamed would count as nothing."""
    assert count(path) > 0


def test_a_file_is_counted() -> None:
    """Its test functions, each once."""
    assert count("tests/docs/test_how_tested.py") == 4


def test_page_has_no_number_of_its_own() -> None:
    """Nothing is left to replace, and nobody typed a count that gets stale."""
    page = with_counts(PAGE)

    assert "{" not in page
    assert re.findall(r"\d+ (?:tests|passed|cases)", PAGE) == []
    assert re.search(r"\d passed and 0 failed, on \d+ backends", page)


def test_every_guarantee_is_on_the_page() -> None:
    """A promise that nobody tests is none."""
    guarantees = (EXPLANATION / "guarantees.md").read_text().partition("## What lockkit does not")[0]
    promises = re.findall(r"^\*\*(.*?)\.?\*\*$", guarantees, re.MULTILINE)
    rows = re.findall(r"^\| (.*?) \| .* \| \{tests", PAGE, re.MULTILINE)

    assert promises
    assert [re.sub(r"\.$", "", promise) for promise in promises] == rows
