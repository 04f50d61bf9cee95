"""``lockkit lab``: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from lockkit.cli.app import app
from lockkit_tools.lab import scenario_names


def call(*arguments: str, width: int = 80, environment: dict[str, str] | None = None) -> Result:
    """Run the command in this process, without a terminal."""
    return CliRunner().invoke(app, ["lab", *arguments], env={"COLUMNS": str(width), **(environment or {})})


def test_list_names_every_scenario() -> None:
    """With a title each; as JSON with the backends too."""
    done, as_json = call("--list"), call("--list", "--json")

    assert [line.split()[0] for line in done.stdout.splitlines()] == list(scenario_names())
    assert [one["name"] for one in json.loads(as_json.stdout)] == list(scenario_names())
    assert "redlock" in json.loads(as_json.stdout)[0]["backends"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "there is no scenario 'nope'; there are gc-pause"),
        (["gc-pause", "--backend", "sqlite"], "the lab has no backend 'sqlite'"),
        (["two-rounds", "--backend", "redis"], "does not fit the backend 'redis'; it runs on redlock"),
        (["naive-setnx", "--backend", "by-hand"], "give a recipe: by-hand?recipe="),
        (["gc-pause", "--backend", "redlock?rounds=1"], "no option 'rounds'"),
        (["gc-pause", "--svg", "no/such/folder/x.svg"], "cannot write no/such/folder/x.svg"),
    ],
)
def test_wrong_input_is_one_line_and_the_status_of_configuration(arguments: list[str], message: str) -> None:
    """As for every command."""
    done = call(*arguments)

    assert done.exit_code == 78
    assert done.stderr.startswith("lockkit: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_output_fits_the_terminal_and_has_no_colours_in_a_pipe() -> None:
    """COLUMNS is the width."""
    for width in (60, 80):
        text = call("gc-pause", width=width).stdout
        assert max(map(len, text.splitlines())) <= width
        assert "\033" not in text
        assert "BROKEN: a newer write was lost." in text


def test_options_change_the_run() -> None:
    """Guard, seed and backend."""
    unfenced, fenced = (json.loads(call("gc-pause", "--json", on).stdout) for on in ("--unfenced", "--fenced"))
    other = json.loads(call("gc-pause", "--json", "--seed", "9", "--backend", "redlock").stdout)

    assert [run["scenes"][0]["verdict"] for run in (unfenced, fenced)] == ["broken", "contained"]
    assert (other["seed"], other["scenes"][0]["backend"]) == (9, "redlock")


def test_picture_and_page_are_written(tmp_path: Path) -> None:
    """Each into its file; the page says how to repeat it."""
    picture, page = tmp_path / "a.svg", tmp_path / "a.html"
    arguments = ["clock-jump", "--backend", "redlock", "--fenced", "--seed", "20"]

    done = call(*arguments, "--svg", str(picture), "--html", str(page))

    assert done.stdout.splitlines() == [f"wrote {picture}", f"wrote {page}"]
    ET.parse(picture)  # noqa: S314 - what was just written
    assert "lockkit lab clock-jump --backend redlock --fenced --seed 20" in page.read_text()
