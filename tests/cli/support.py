"""Starts ``lockkit`` as users do: as a process, in a directory and with a state of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import lockkit
from lockkit.backend import Holder
from lockkit_tools.servers._process import find_process, process_table
from tests.cli.forked import ForkedCommand, can_fork
from tests.tries import until

ROOT = Path(__file__).parents[2]

PATIENCE = 60.0
"""Seconds after which something that should have happened never will."""

STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
"""Of a process, unless a test says otherwise."""

ENTRY_POINTS = """
[lockkit.backends]
faulty = tests.cli.faulty:FaultyBackend
sieve = tests.cli.faulty:SieveBackend
driverless = tests.cli.no_such_driver:Backend
"""


class Cli:
    """
    The command line in an environment of its own.

    Attributes:
        home: An empty directory: the working directory, and above the state of the embedded backend.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._started: list[subprocess.Popen[str]] = []
        distribution = home / "path" / "lockkit_faulty-1.dist-info"
        distribution.mkdir(parents=True)
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: lockkit-faulty\nVersion: 1\n")
        (distribution / "entry_points.txt").write_text(ENTRY_POINTS)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKKIT_")}
        self.env |= {
            "LOCKKIT_STATE_DIR": str(home / "state"),
            "LOCKKIT_URL": "file:",  # the same directory, but chosen: see `lockkit.cli.output.settings_told`
            "PYTHONPATH": f"{home / 'path'}:{ROOT}",
            "PYTHONWARNINGS": "error",
            "TMPDIR": str(home),
            "COLUMNS": "120",
        }

    def start(self, *args: str | Path, **keywords: Any) -> subprocess.Popen[str]:
        """Starts ``lockkit`` with these arguments; its outputs are pipes unless `keywords` (of Popen) say otherwise."""
        if not can_fork(self.env) or args[:1] == ("verify",):
            return self.start_program(sys.executable, "-m", "lockkit.cli", *args, **keywords)
        streams: dict[str, Any] = {**STREAMS, **keywords}
        process = ForkedCommand([str(arg) for arg in args], env=self.env, cwd=self.home, **streams)
        self._started.append(process)
        return process

    def start_program(self, *args: str | Path, **keywords: Any) -> subprocess.Popen[str]:
        """Starts any program in the same environment."""
        options: dict[str, Any] = STREAMS | {"cwd": self.home, "env": self.env, "text": True} | keywords
        process: subprocess.Popen[str] = subprocess.Popen([str(arg) for arg in args], **options)
        self._started.append(process)
        return process

    def run(self, *args: str | Path, **keywords: Any) -> subprocess.CompletedProcess[str]:
        """Runs ``lockkit`` to its end."""
        process = self.start(*args, **keywords)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def holders(self, name: str, url: str | None = None) -> Sequence[Holder]:
        """Who holds a lock; of those that the commands use by default, unless it is at a URL."""
        with lockkit.connect(url or f"file:{self.home}/state/locks") as client:
            return client.holders(name)

    def close(self) -> None:
        """Ends what a failed test left running."""
        for process in self._started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def run_here(*args: str, columns: int = 200) -> Result:
    """Run ``lockkit`` in this process, which is quicker; it has no terminal, and wide lines."""
    from lockkit.cli.app import app  # noqa: PLC0415 - programs that only need `Cli` do not

    return CliRunner().invoke(app, list(args), prog_name="lockkit", env={"COLUMNS": str(columns)})


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return state(pid) not in {"Z", "X", ""}


def state(pid: int) -> str:
    """The state of a process: R, S, T, Z; empty if there is none."""
    entry = find_process(pid)
    return entry.state[:1] if entry else ""


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [entry.pid for entry in process_table() if entry.parent == pid]


def pids(path: Path, count: int) -> list[int]:
    """Waits until that many processes have written their ids to a file, one a line."""
    until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [int(line) for line in path.read_text().split()]
