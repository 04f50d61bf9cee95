"""Processes that need not import anything: a test's own, forked from a `ForkServer`, and those that programs spawn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lockkit.configuration.registry import BUILTIN
from lockkit.testing.fork_servers import environment, fork_server

PATIENCE = 100.0
"""Seconds that another process may take on a busy machine."""

_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}


class Forked:
    """
    A process that is used like a `subprocess.Popen` with text pipes for its input and output.

    Args:
        main: ``module:function`` of what it runs; it begins with `arguments`.
        given: What that function gets from `arguments`.
        modules: What all processes of this `main` have imported.
    """

    def __init__(self, main: str, given: Sequence[str], modules: Sequence[str] = ()) -> None:
        self.returncode: int | None = None
        self._server = fork_server(main, modules, environment())
        with ExitStack() as theirs:
            its_input, ours_to_write = os.pipe()
            theirs.callback(os.close, its_input)
            ours_to_read, its_output = os.pipe()
            theirs.callback(os.close, its_output)
            self.stdin = os.fdopen(ours_to_write, "w")
            self.stdout = os.fdopen(ours_to_read)
            self.pid = self._server.fork({0: its_input, 1: its_output, 2: 2})
        self.stdin.write(json.dumps(given) + "\n")
        self.stdin.flush()

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless its end was waited for."""
        if self.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; give its exit status."""
        if self.returncode is None:
            self.returncode = self._server.reap(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Let it come to its end, which says little (what a pipe holds); give what it said."""
        self.stdin.close()
        self.wait(timeout)
        with self.stdout:
            return self.stdout.read(), None

    def line(self) -> str:
        """Read the next line that it says."""
        line = self.stdout.readline().strip()
        assert line, f"the process ended with {self.wait(PATIENCE)}"
        return line

    def go(self) -> None:
        """Let it go on, where it waits for a line."""
        self.stdin.write("go\n")
        self.stdin.flush()

    def close(self) -> None:
        """End it."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()


def all_done(processes: Sequence[Forked]) -> list[str]:
    """Let processes that have said a line go on together, and give what each says at the end."""
    try:
        for process in processes:
            process.line()
        for process in processes:
            process.go()
        return [process.communicate(timeout=PATIENCE)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.close()


def say(text: object) -> None:
    """In the process: say a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def arguments() -> list[str]:
    """In the process: what it was given."""
    given: list[str] = json.loads(sys.stdin.readline())
    return given


def forking(*modules: str, path: str | None) -> dict[str, str]:
    """Give the variables with which what a program spawns is forked: see `tests.spawned.sitecustomize`."""
    if not sys.platform.startswith("linux"):
        return {} if path is None else {"PYTHONPATH": path}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).with_name("spawned")), path])),
        "LOCKKIT_TEST_PRELOAD": " ".join(modules),
    }


def modules_of(url: str) -> list[str]:
    """Name what is imported to connect there."""
    scheme = url.partition(":")[0]
    return ["lockkit.sync.client", BUILTIN[scheme].target.partition(":")[0], *filter(None, [_DRIVERS.get(scheme)])]
