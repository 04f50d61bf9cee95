"""Names of tests in tables are footnotes on the site."""

from __future__ import annotations

import re

import pytest

from tests.docs.footnotes import with_footnotes
from tests.docs.story import ROOT

TABLE = """\
| claim | shown by |
|---|---|
| it fits | `test_footnotes_replace_names`, `test_each_note_names_its_file` |
| it fits twice | all; `test_footnotes_replace_names` |

`test_footnotes_replace_names` in a sentence stays.
"""


def test_footnotes_replace_names() -> None:
    """In the column of tests alone; each test has one note, however often it is named."""
    head, _, first, second, _, sentence, _, *notes = with_footnotes(TABLE).splitlines()

    assert head == "| claim | tests |"
    assert first == "| it fits | [^test_footnotes_replace_names] [^test_each_note_names_its_file] |"
    assert second == "| it fits twice | all; [^test_footnotes_replace_names] |"
    assert sentence == "`test_footnotes_replace_names` in a sentence stays."
    assert len(notes) == 2


def test_names_at_the_end_of_an_item_are_footnotes() -> None:
    """With that of the counterpart, where there is one."""
    both, one, neither = with_footnotes(
        "- It fits. (`test_a`; lockkit: `test_b`)\n- It fits. (`test_a`)\n- `test_a` (in brackets) fits.\n"
    ).splitlines()[:3]

    assert both == "- It fits. [^test_a] [^test_b]"
    assert one == "- It fits. [^test_a]"
    assert neither == "- `test_a` (in brackets) fits."


def test_each_note_names_its_file() -> None:
    """A reader finds the test."""
    assert "[^test_each_note_names_its_file]: `test_each_note_names_its_file` in `tests/docs/test_footnotes.py`." in (
        with_footnotes(TABLE)
    )


@pytest.mark.parametrize("page", ["comparison/choosing.md", "comparison/index.md", "explanation/what-failover-does.md"])
def test_no_table_of_these_pages_names_a_test(page: str) -> None:
    """Names of tests would take a third of the width."""
    text = with_footnotes((ROOT / "docs" / page).read_text())

    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if re.search(r"`test_\w+`", row)] == []
    assert set(re.findall(r"\[\^(test_\w+)\]", text)) == set(re.findall(r"^\[\^(test_\w+)\]: `", text, re.MULTILINE))
