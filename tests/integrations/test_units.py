"""The units of examples/systemd and the manifests of examples/kubernetes: they parse, and their numbers agree."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lockkit import validation
from lockkit.cli.app import app
from tests.conventions.sources import ROOT
from tests.docs.markdown import blocks

SYSTEMD = ROOT / "examples" / "systemd"
KUBERNETES = ROOT / "examples" / "kubernetes"
SERVICES = sorted(SYSTEMD.glob("*.service"))
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
RELEASE_SECONDS = 5.0
"""How long the release at the end of a command may take."""


def service(path: Path) -> dict[str, str]:
    """Read the section of a unit that says what runs."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return dict(parser["Service"])


def pod(path: Path) -> dict[str, Any]:
    """Read the pod that a manifest describes."""
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    spec = manifest["spec"]
    if manifest["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: dict[str, Any] = spec["template"]["spec"]
    return template


def parsed(command: list[str]) -> dict[str, Any]:
    """Parse the command line of lockkit, as lockkit does, without running it."""
    program, name, *arguments = command
    assert program.rpartition("/")[2] == "lockkit"
    group: Any = typer.main.get_command(app)
    subcommand = group.get_command(typer.Context(group), name)
    context = subcommand.make_context(name, arguments)
    return {"": name, **context.params}


def assert_stops_in_time(options: dict[str, Any], stop_seconds: float) -> None:
    """The service manager leaves lockkit the time to end its command and to release."""
    assert stop_seconds > options["kill_after"] + RELEASE_SECONDS
    assert options["command"][0].startswith("/")
    if options[""] == "elect":
        assert options["grace"] < options["ttl"] / 2
        assert options["grace"] < options["kill_after"] < stop_seconds


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_unit_runs_a_command_line_of_lockkit(path: Path) -> None:
    """And is stopped as its lock needs."""
    settings = service(path)
    options = parsed(shlex.split(settings["ExecStart"].replace("%H", "host")))

    assert settings["KillMode"] == "mixed"
    assert_stops_in_time(options, validation.parse_duration(settings["TimeoutStopSec"]))
    if options[""] == "elect":
        assert settings["SuccessExitStatus"] == "143"
        assert settings["RestartPreventExitStatus"] == "2 78"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_units_are_valid(tmp_path: Path) -> None:
    """As systemd sees them, with programs that are on this machine."""
    for path in SYSTEMD.iterdir():
        text = path.read_text().replace("/usr/bin/lockkit", sys.executable)
        (tmp_path / path.name).write_text(re.sub(r"/usr/local/bin/\S+", "/bin/true", text))
    units = sorted(str(path) for path in tmp_path.iterdir() if path.suffix != ".md")

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert len(units) == 3
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_runs_a_command_line_of_lockkit(path: Path) -> None:
    """And its pod has the time to release."""
    spec = pod(path)
    (container,) = spec["containers"]
    assert all(isinstance(word, str) for word in container["command"] + container["args"])
    options = parsed(container["command"] + container["args"])

    assert_stops_in_time(options, spec["terminationGracePeriodSeconds"])
    assert "LOCKKIT_URL" in {variable["name"] for variable in container["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["command"])))
    assert used <= {variable["name"] for variable in container["env"]}


def test_slots_are_in_the_zone_of_the_schedule() -> None:
    """Otherwise a day's job can fall into another day's slot: it runs twice, or not at all."""
    unit, manifest = SYSTEMD / "nightly-report.service", KUBERNETES / "nightly-report.yaml"
    (container,) = pod(manifest)["containers"]

    timer = re.search(r"^OnCalendar=.* (\S+)$", unit.with_suffix(".timer").read_text(), re.MULTILINE)
    assert timer is not None
    assert parsed(shlex.split(service(unit)["ExecStart"]))["tz"] == timer[1]
    spec = yaml.safe_load(manifest.read_text())["spec"]
    assert parsed(container["command"] + container["args"])["tz"] == spec["timeZone"]


@pytest.mark.parametrize(("page", "example"), [("systemd", "planner.service"), ("kubernetes", "planner.yaml")])
def test_page_begins_with_lines_of_the_example(page: str, example: str) -> None:
    """Word for word."""
    path = ROOT / "docs" / "integrations" / f"{page}.md"
    lines = blocks(path, path.read_text())[0].text.splitlines()

    there = [line.strip() for line in (ROOT / "examples" / page / example).read_text().splitlines()]
    assert [line for line in lines if line not in there] == []
