"""`lockkit_once` in runs of pytest with and without workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conventions.sources import ROOT

SECONDS_MAX = 100.0

TESTS = """
import os
import pytest

MADE = os.environ["MADE"]

def make():
    with open(MADE, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return {"maker": os.getpid()}

@pytest.fixture(scope="session")
def database(lockkit_once):
    return lockkit_once("database", make)

@pytest.mark.parametrize("number", range(8))
def test_uses_what_one_worker_made(database, number):
    with open(MADE) as file:
        assert file.read() == f"{database['maker']}\\n"
    with open(MADE + ".users", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""

FAILS_FIRST = """
import os
import pytest

def make():
    with open(os.environ["MADE"], "a") as file:
        file.write("tried\\n")
    with open(os.environ["MADE"]) as file:
        if len(file.readlines()) == 1:
            raise RuntimeError("no disk")
    return "made"

def test_error_is_that_of_the_test_that_made_it(lockkit_once):
    with pytest.raises(RuntimeError):
        lockkit_once("database", make)
    assert lockkit_once("database", make) == "made"
    assert lockkit_once("database", make) == "made"
    assert lockkit_once("other", lambda: 1) == 1
    with open(os.environ["MADE"]) as file:
        assert len(file.readlines()) == 2
"""


MAKES = """
import os

def make():
    with open(os.environ["MADE"], "a") as file:
        return file.write("made\\n")

def test_makes(lockkit_once):
    assert lockkit_once("database", make) == 5
"""


def run(folder: Path, tests: str, *arguments: str, **variables: str) -> str:
    """Run pytest in a project of its own, as its developers do; give what was made."""
    (folder / "test_project.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["lockkit.testing.kit"]\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": str(ROOT),
        "PYTEST_DEBUG_TEMPROOT": str(folder),
        "MADE": str(folder / "made"),
        **variables,
    }
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "made").read_text()


@pytest.mark.timeout(SECONDS_MAX + 20)
def test_first_worker_makes_and_the_others_get_it(tmp_path: Path) -> None:
    """Two processes, one maker."""
    made = run(tmp_path, TESTS, "-n", "2", "--dist=each")

    assert len(made.splitlines()) == 1
    users = (tmp_path / "made.users").read_text().splitlines()
    assert len(set(users)) == 2
    assert len(users) == 16
    assert made.strip() in users


def test_without_workers_it_makes_once_too(tmp_path: Path) -> None:
    """The same conftest runs in both ways; an error is not remembered."""
    assert run(tmp_path, FAILS_FIRST, "-p", "no:xdist").splitlines() == ["tried"] * 2


def test_run_finds_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """Also if it begins in the environment of a worker, as a run within a test of that worker does."""
    for times in (1, 2):
        made = run(tmp_path, MAKES, "-p", "no:xdist", PYTEST_XDIST_WORKER="gw0")
        assert made.splitlines() == ["made"] * times
