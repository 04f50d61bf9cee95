"""The documentation's drawings are those that the lab makes today, and its page says what the scenarios come to."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from lockkit.cli.app import app
from lockkit_tools.lab import scenario_names
from tests.lab.drawings import COMMAND, DRAWINGS, FOLDER, make

DOCS = FOLDER.parent
PAGE = (DOCS / "explanation" / "lab.md").read_text()
ROWS = re.findall(r"^\| `(lockkit lab [^`]+)` \|[^|]*\| ([a-z, ]+) \| ([a-z, ]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_is_up_to_date(name: str) -> None:
    """What the reader sees is what the code does."""
    assert (FOLDER / name).read_text() == make(DRAWINGS[name]), f"docs/drawings/{name} is stale: run {COMMAND}"


def test_every_drawing_is_made_and_shown() -> None:
    """None is left over, and each is in a page, with a text for those who do not see it."""
    shown = [
        found
        for page in DOCS.rglob("*.md")
        for found in re.findall(r"!\[([^\]]+)\]\([./]*drawings/([\w-]+\.svg)\)", page.read_text())
    ]

    assert {path.name for path in FOLDER.glob("*.svg")} == set(DRAWINGS)
    assert {name for _, name in shown} == set(DRAWINGS)
    assert all(len(text) > 10 for text, _ in shown)


def test_page_has_every_scenario() -> None:
    """Each with its command."""
    assert {shlex.split(command)[2] for command, _, _ in ROWS} == set(scenario_names())


@pytest.mark.parametrize(("command", "unfenced", "fenced"), ROWS)
def test_verdicts_of_the_page_are_those_of_the_command(command: str, unfenced: str, fenced: str) -> None:
    """The command of the row is run, without a guard and with one."""
    for option, verdicts in (("--unfenced", unfenced), ("--fenced", fenced)):
        done = CliRunner().invoke(app, [*shlex.split(command)[1:], option, "--json"])
        assert [scene["verdict"] for scene in json.loads(done.stdout)["scenes"]] == verdicts.split(", ")
