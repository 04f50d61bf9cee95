"""The projects with a framework: each starts with one command, and does what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockkit_tools.servers import require
from lockkit_tools.servers.binaries import find_program
from tests.conventions.sources import ROOT
from tests.programs import LIMIT, printed

EXAMPLES = ROOT / "examples"
OURS = ("LOCKKIT_", "PYTEST_")
"""Variables of these tests, which users have not."""

PROJECTS = {
    "celery_app/shop.py": "6 messages, 3 receipts, 3 payments\nat least 3 reports of two beats, 0 of them twice\n",
    "apscheduler_app/poller.py": "another one polls: True\n",
    "dramatiq_app/payments.py": "12 messages, 4 payments, 0 at the same time\n",
    "rq_app/payments.py": "6 jobs, 3 receipts, 3 payments\n",
}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("project", PROJECTS)
def test_project_starts_with_one_command(project: str, tmp_path: Path) -> None:
    """On what is embedded; RQ on a Redis that it starts."""
    path = os.environ["PATH"]
    if project.startswith("rq_app"):
        require("redis", local=True)
        path = f"{find_program('redis-server', 'valkey-server').parent}{os.pathsep}{path}"

    assert printed(EXAMPLES / project, cwd=tmp_path, without=OURS, PATH=path).endswith(PROJECTS[project])


@pytest.mark.timeout(LIMIT + 30)
def test_tests_run_in_several_processes(tmp_path: Path) -> None:
    """With and without pytest-xdist."""
    project = str(EXAMPLES / "xdist_app")
    command = ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "lockkit.testing.kit.plugin"]

    assert "8 passed" in printed(*command, "-p", "no:cacheprovider", "-n", "2", project, cwd=tmp_path, without=OURS)


def test_readme_names_each_project() -> None:
    """A project that nobody lists is not found by anybody."""
    readme = (EXAMPLES / "README.md").read_text()

    assert [project for project in [*PROJECTS, "xdist_app/conftest.py"] if f"]({project})" not in readme] == []
