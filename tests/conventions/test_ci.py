"""`.ci/run` tells how the tests ended: by its last lines, and by its exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conventions.sources import ROOT

PYTHON = """#!/bin/sh
mkdir -p .venv/bin
printf '#!/bin/sh\\n' > .venv/bin/lockkit
cp fake-nox .venv/bin/nox
chmod +x .venv/bin/*
"""
NOX = """#!/bin/sh
case "$*" in
"-s tests") cat said; exit "$TESTS" ;;
*) echo "other sessions: $*"; exit "$OTHERS" ;;
esac
"""
SAID = """nox > Running session tests-/opt/python/bin/python3.13
======================= 900 passed in 100.00s (0:01:40) ========================
nox > Running session tests-3.11
....F
=========================== short test summary info ============================
FAILED tests/test_a.py::test_b - assert 1 == 2
=================== 1 failed, 8536 passed in 1680.11s (0:28:00) ================
nox > Ran multiple sessions:
"""
CLOSING = [
    "nox > Running session tests-/opt/python/bin/python3.13",
    "======================= 900 passed in 100.00s (0:01:40) ========================",
    "nox > Running session tests-3.11",
    "=================== 1 failed, 8536 passed in 1680.11s (0:28:00) ================",
]


def run(folder: Path, said: str, *, tests: int = 0, others: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it with a Python whose nox prints the given text and returns the given status."""
    (folder / "bin").mkdir()
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "said").write_text(said)
    (folder / "fake-nox").write_text(NOX)
    (folder / "bin" / "python3").write_text(PYTHON)
    (folder / "bin" / "python3").chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "TESTS": f"{tests}", "OTHERS": f"{others}"}
    command = ["bash", str(folder / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("tests", "others"), [(0, 0), (1, 0), (0, 1)])
def test_closing_lines_are_the_last_ones_whatever_failed(tmp_path: Path, tests: int, others: int) -> None:
    """A failure anywhere makes the exit status, and hides no result."""
    done = run(tmp_path, SAID, tests=tests, others=others)

    assert done.stdout.splitlines()[-len(CLOSING) :] == CLOSING
    assert "other sessions: -s lint types docs" in done.stdout
    assert (done.returncode != 0) == bool(tests or others)
    assert done.stderr.splitlines() == [
        *["failed: tests"] * bool(tests),
        *["failed: lint, types or docs"] * bool(others),
    ]


def test_run_without_tests_fails(tmp_path: Path) -> None:
    """Nox says that all is well where it ran no session."""
    done = run(tmp_path, "nox > Sessions not selected\n")

    assert done.returncode != 0
    assert "no test ran" in done.stderr
