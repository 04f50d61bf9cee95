"""The conformance suite fails on backends that are wrong, and for the reason that they are."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockkit.testing.conformance import ConformanceSuite, cases
from tests.testing.broken import BROKEN, SOUND, Broken

ROOT = Path(__file__).parents[2]
CASES = cases(ConformanceSuite)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """By class and test id: how a case ended, ``passed`` or what it raised."""
    folder = tmp_path_factory.mktemp("broken")
    with ThreadPoolExecutor() as pool:
        # They wait in vain nearly all of the time: several at once.
        several = ("-n", "4", "--dist=worksteal")
        # What is broken is found with little patience too; a sound one on a busy machine needs the usual.
        broken = pool.submit(run, BROKEN, folder / "broken.xml", *several, LOCKKIT_TEST_PATIENCE="2")
        return run(SOUND, folder / "sound.xml") | broken.result()


def run(entries: Sequence[Broken], report: Path, *options: str, **variables: str) -> dict[tuple[str, str], str]:
    """Run the cases of some entries."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | variables
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-W", "default", f"--junitxml={report}", *options]
    chosen = " or ".join(f"Test{entry.backend.__name__}" for entry in entries)
    subprocess.run(
        [*command, "tests/testing/broken_suite.py", "-k", chosen],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    found: dict[tuple[str, str], str] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own file
        key = case.attrib["classname"].rpartition(".")[2].removeprefix("Test"), case.attrib["name"]
        problem = next((child for child in case if child.tag in {"failure", "error", "skipped"}), None)
        found[key] = "passed" if problem is None else problem.attrib["message"]
    return found


def names(entry: Broken) -> list[str]:
    """Test ids of the cases of an entry."""
    return [f"{case}[{face}]" for case in entry.caught_by for face in CASES[case]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", BROKEN, ids=lambda entry: entry.backend.__name__)
def test_broken_backend_is_caught(entry: Broken, outcomes: dict[tuple[str, str], str]) -> None:
    """Each of its cases fails, on both faces, by what it asserts or by an error of lockkit's."""
    found = {name: outcomes[entry.backend.__name__, name] for name in names(entry)}

    assert [name for name, outcome in found.items() if outcome == "passed"] == []
    reasons = ("AssertionError", "assert", "lockkit.errors.", "Failed: DID NOT RAISE", "Failed: DID NOT WARN")
    assert [outcome for outcome in found.values() if not outcome.startswith(reasons)] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", SOUND, ids=lambda entry: entry.backend.__name__)
def test_sound_backend_passes_the_same_cases(entry: Broken, outcomes: dict[tuple[str, str], str]) -> None:
    """So they fail by what is broken, not by how they are run here."""
    found = {name: outcomes[entry.backend.__name__, name] for name in names(entry)}

    assert set(found.values()) == {"passed"}, found
