"""Runs of pytest that are ended by a signal leave no server and no directory behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockkit_tools.servers import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("signum", "processes"), [(signal.SIGTERM, "1"), (signal.SIGHUP, "0"), (signal.SIGHUP, "1")])
def test_run_that_is_ended_leaves_nothing(tmp_path: Path, signum: signal.Signals, processes: str) -> None:
    """SIGTERM to pytest, as from a container's manager; SIGHUP to all its processes, as from a terminal that closes."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKKIT_TEST", "PYTEST_"))}
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes,
         f"--basetemp={tmp_path / 'pytest'}", "tests/testing/hanging_suite.py"],
        cwd=ROOT, env={**variables, "TMPDIR": str(tmp_path)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: None if any(tmp_path.glob("lockkit-redis-*/server.log")) else "no server yet")

        if signum == signal.SIGHUP:
            os.killpg(running.pid, signum)
        else:
            running.send_signal(signum)
        running.wait(60)

        wait_until(lambda: " ".join(left) if (left := _left(tmp_path)) else None)
    finally:
        _kill(running.pid)
        running.wait()


def _left(directory: Path) -> list[str]:
    """What is there beside pytest's own folder, and the reservations of ports, which are all servers' together."""
    return [path.name for path in directory.iterdir() if path.name != "pytest" and "ports" not in path.name]


def _kill(group: int) -> None:
    """Kill what is left of a run."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
