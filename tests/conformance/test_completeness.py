"""No backend and no face is forgotten."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockkit
from lockkit.configuration import registry
from lockkit.testing.conformance import Need, cases
from lockkit.testing.plugin import CASE_MARK
from tests.conformance import test_suite
from tests.conformance.faulty import FAULTS
from tests.conformance.selection import (
    ENDING,
    ENGINE_OWNED,
    ENGINE_TARGETS,
    FAULT_CASES,
    LONG_TTL,
    TOPOLOGY_FAULTS,
    TOPOLOGY_FREE,
    VARIANTS,
)
from tests.conformance.targets import TARGETS

# With the cases that only lockkit's own backends have to pass.
CASES = cases(test_suite.TestConformance)
ROOT = Path(__file__).parents[2]
NIGHTLY = ("postgresql", "redis-cluster", "s3")
"""Targets that leave out different cases by day."""


def needs_of(case: str) -> tuple[Need, ...]:
    """The promises that a case needs."""
    (mark,) = [mark for mark in getattr(test_suite.TestConformance, case).pytestmark if mark.name == CASE_MARK]
    needed: tuple[Need, ...] = mark.kwargs["needs"]
    return needed


def collect(*options: str) -> set[tuple[str, str, str]]:
    """Case, target and face of every test that a run of the suite collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "tests/conformance/test_suite.py"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True).stdout
    found = re.findall(r"::(\w+)\[([\w+-]+)-(\w+)\]$", listing, re.MULTILINE)
    return {(case, target, face) for case, target, face in found}


@pytest.fixture(scope="module")
def nightly() -> set[tuple[str, str, str]]:
    """What ``nox -s conformance`` collects on some targets; which there are, the daily run shows."""
    return collect("--nightly", *(f"--target={target}" for target in NIGHTLY))


@pytest.fixture(scope="module")
def daily() -> set[tuple[str, str, str]]:
    """What ``nox -s tests`` collects."""
    return collect()


@pytest.mark.parametrize(
    ("scheme", "mode"), [(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)]
)
def test_every_backend_has_a_target(scheme: str, mode: str | None) -> None:
    """A scheme in the registry, or one of its modes, that no target covers fails here."""
    covering = [entry.id for entry in TARGETS if scheme in entry.schemes and entry.mode == mode]

    assert covering, f"add a line for {scheme}: (mode={mode}) to tests/conformance/targets.py"


def test_every_server_can_be_ill_treated() -> None:
    """The fault suite runs on each target that has a server."""
    assert set(FAULTS) == {entry.id for entry in TARGETS} - {"memory", "file", "sqlite"}


@pytest.mark.parametrize("target", NIGHTLY)
def test_every_case_is_collected_for_both_faces(target: str, nightly: set[tuple[str, str, str]]) -> None:
    """Nothing is lost between the suite and what pytest runs at night."""
    expected = {(case, target, face) for case, faces in CASES.items() for face in faces}

    assert {test for test in nightly if test[1] == target} == expected


@pytest.mark.parametrize("target", [entry.id for entry in TARGETS])
def test_daily_run_leaves_out_what_is_named_and_nothing_else(target: str, daily: set[tuple[str, str, str]]) -> None:
    """A case that no list names runs on every target, in both APIs."""
    left_out = set() if target in ENGINE_TARGETS else set(ENGINE_OWNED)
    left_out |= TOPOLOGY_FREE if target in VARIANTS else set()
    left_out |= ENDING if target in LONG_TTL else set()
    expected = {(case, target, face) for case, faces in CASES.items() if case not in left_out for face in faces}

    assert {test for test in daily if test[1] == target} == expected


def test_case_that_is_left_out_somewhere_runs_where_its_code_is(daily: set[tuple[str, str, str]]) -> None:
    """A case of the engine on several kinds of backends; one without topology on the target that shares the code."""
    for case in ENGINE_OWNED | TOPOLOGY_FREE | ENDING:
        targets = {target for name, target, _ in daily if name == case}

        assert case in CASES, f"there is no case {case}: take it from tests/conformance/selection.py"
        assert targets >= (ENGINE_TARGETS if case in ENGINE_OWNED else set(VARIANTS.values())), case


def test_lists_of_the_daily_run_are_sound() -> None:
    """They name what exists, a variant has the schemes' code of its original, and no case is in two lists."""
    entries = {entry.id: entry for entry in TARGETS}
    backends = {target: {registry.find(scheme) for scheme in entry.schemes} for target, entry in entries.items()}

    assert len(entries) == len(TARGETS)
    assert TOPOLOGY_FAULTS <= FAULT_CASES
    assert not FAULT_CASES & set(CASES)
    assert set(entries) >= ENGINE_TARGETS
    assert not ENGINE_TARGETS & set(VARIANTS)
    assert not ENGINE_OWNED & TOPOLOGY_FREE
    for variant, original in VARIANTS.items():
        assert backends[variant] == backends[original]
        assert entries[variant].mode == entries[original].mode
        assert original not in VARIANTS


def test_each_case_of_the_engine_applies_where_it_runs() -> None:
    """A case that all of its targets skip would run nowhere: memory:// promises what each of them needs."""
    with lockkit.connect("memory://") as client:
        promised = client.capabilities
    needed = {case: needs_of(case) for case in ENGINE_OWNED}

    assert [case for case, needs in needed.items() if not all(need.met(promised) for need in needs)] == []


def test_no_case_hides_another() -> None:
    """The groups of the suite are one class: a name that two groups use would drop one of them."""
    groups = test_suite.TestConformance.__mro__
    names = [name for group in groups for name in vars(group) if name.startswith("test_")]

    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)
