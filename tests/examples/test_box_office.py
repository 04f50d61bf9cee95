"""The project with four environments: the same program, sold out in each."""

from __future__ import annotations

import os
import subprocess
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockkit_tools.servers import PostgresServer, RedisNodes, require
from tests.conventions.sources import ROOT
from tests.programs import start_python

PROJECT = ROOT / "examples" / "box_office"
CUSTOMERS = ["Ada", "Ben", "Cem"]
PATIENCE = 120.0


def start(*arguments: str, **settings: str) -> subprocess.Popen[str]:
    """Start Python in the project, as its developers do."""
    path = f"{PROJECT}{os.pathsep}{ROOT}"
    return start_python(
        *arguments, cwd=PROJECT, without=["LOCKKIT_"], PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1", **settings
    )


def sell_one_seat_to_all(**settings: str) -> list[int]:
    """Let all customers buy the same seat, each by a process; give the statuses in order."""
    sellers = [start("-m", "box_office", "12A", customer, **settings) for customer in CUSTOMERS]
    ended = [("".join(seller.communicate(timeout=PATIENCE)), seller.returncode) for seller in sellers]
    said = [line for out, _ in ended for line in out.splitlines()]
    assert sum(", ticket " in line for line in said) == 1, said
    assert said.count("12A is sold") == len(CUSTOMERS) - 1, said
    return sorted(status for _, status in ended)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE * 2)
@pytest.mark.parametrize("environment", ["development", "staging", "production"])
def test_environment_sells_a_seat_once(environment: str, tmp_path: Path) -> None:
    """The same code and file; what differs is `LOCKKIT_ENV` and the addresses."""
    settings = {"LOCKKIT_ENV": environment, "BOX_OFFICE_DATA": str(tmp_path)}
    with ExitStack() as servers:
        if environment == "staging":
            require("postgresql", local=True)
            settings["STAGING_DATABASE_URL"] = servers.enter_context(PostgresServer()).url
        if environment == "production":
            require("redis", local=True)
            nodes = servers.enter_context(RedisNodes(5))
            settings["PRODUCTION_REDIS_NODES"] = nodes.url.removeprefix("redlock://")

        assert sell_one_seat_to_all(**settings) == [0, 1, 1]


def test_unit_tests_pass_in_memory() -> None:
    """The project's own tests, as its developers run them."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", os.devnull, "tests"]
    tests = start(*command, LOCKKIT_ENV="test")
    out, _ = tests.communicate(timeout=PATIENCE)

    assert tests.returncode == 0, out
    assert "2 passed" in out


def test_profiles_are_those_that_the_readme_lists() -> None:
    """One file says what each environment is."""
    profiles = tomllib.loads((PROJECT / "lockkit.toml").read_text())["profiles"]
    readme = (PROJECT / "README.md").read_text()

    assert list(profiles) == ["test", "development", "staging", "production"]
    assert [name for name in profiles if f"| `{name}` |" not in readme] == []
