"""No backend and no face is forgotten."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockkit.configuration import registry
from lockkit.testing.conformance import ConformanceSuite, cases
from tests.conformance.targets import TARGETS

CASES = cases(ConformanceSuite)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collected() -> set[tuple[str, str, str]]:
    """Case, target and face of every test that a run of the suite collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/conformance/test_suite.py"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True).stdout
    found = re.findall(r"::(\w+)\[([\w+-]+)-(\w+)\]$", listing, re.MULTILINE)
    return {(case, target, face) for case, target, face in found}


@pytest.mark.parametrize(
    ("scheme", "mode"), [(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)]
)
def test_every_backend_has_a_target(scheme: str, mode: str | None) -> None:
    """A scheme in the registry, or one of its modes, that no target covers fails here."""
    covering = [entry.id for entry in TARGETS if scheme in entry.schemes and entry.mode == mode]

    assert covering, f"add a line for {scheme}: (mode={mode}) to tests/conformance/targets.py"


def test_targets_have_names_of_their_own() -> None:
    """Two with one name would be counted as one."""
    ids = [entry.id for entry in TARGETS]

    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("target", [entry.id for entry in TARGETS])
def test_every_case_is_collected_for_both_faces(target: str, collected: set[tuple[str, str, str]]) -> None:
    """Nothing is lost between the suite and what pytest runs."""
    expected = {(case, target, face) for case, faces in CASES.items() for face in faces}

    assert {test for test in collected if test[1] == target} == expected


def test_most_cases_are_for_both_faces() -> None:
    """One body for both is the rule; the exceptions are about what only one face has."""
    counts = {face: sum(face in faces for faces in CASES.values()) for face in ("blocking", "asyncio")}
    both = sum(len(faces) == 2 for faces in CASES.values())

    assert both >= 100
    assert all(both <= count <= both + 20 for count in counts.values())


def test_no_case_hides_another() -> None:
    """The groups of the suite are one class: a name that two groups use would drop one of them."""
    names = [name for group in ConformanceSuite.__bases__ for name in vars(group) if name.startswith("test_")]

    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)
