"""
Commands of ``lockkit`` as processes that need not import anything: forked from one that has imported all of them.

A command takes a quarter of a second to import itself, and a tenth of that to do what a test is about. What is forked
is a process like any other: with its own environment, directory, streams, signals, status and end of the interpreter.
What only a start from nothing shows (that each module finds what it imports) is seen by the tests that begin with a
shell or a terminal, and by those of the documentation, which runs every command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import lockkit.cli
from lockkit.configuration.registry import BUILTIN
from lockkit.testing.fork_servers import environment, fork_server

_ORDERS = 3
"""The descriptor on which a process gets its arguments, environment and directory."""

_MODULES = [
    *(f"lockkit.cli.{path.stem}" for path in sorted(Path(*lockkit.cli.__path__).glob("[!_]*.py"))),
    *("lockkit.sync.client", "lockkit.backends.file.backend", "lockkit.backends.memory.backend"),
    # Which typer imports when it runs a command, in the versions that have them.
    *("typer.core", "typer._adapters", "typer._click.decorators", "pydantic.plugin._loader", "rich.table"),
]

_BACKENDS = {scheme: builtin.target.partition(":")[0] for scheme, builtin in BUILTIN.items()}
"""What is imported before the first command that is given a URL with this scheme."""

_AT_START = ("PYTHON", "LC_", "LANG", "FORCE_COLOR", "NO_COLOR", "TYPER_", "_TYPER")
"""How the variables begin that an interpreter and its libraries read once, when they start."""


class ForkedCommand(subprocess.Popen[str]):
    """
    ``lockkit`` with some arguments, forked and not executed; used as any `subprocess.Popen` with text pipes.

    Args:
        args: For ``lockkit``.
        env: The environment: see `can_fork`.
        cwd: The directory.
        stdin: As for `subprocess.Popen`; so are `stdout` and `stderr`.
        stdout: See `stdin`.
        stderr: See `stdin`.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int | IO[str],
        stdout: int | IO[str],
        stderr: int | IO[str],
    ) -> None:
        self.args = args
        self.returncode = None
        self._server = fork_server("tests.cli.forked:main", _MODULES, _environment())
        self._server.load([module for scheme, module in _BACKENDS.items() if f"{scheme}://" in repr([args, env])])
        orders, to_order = os.pipe()
        with ExitStack() as theirs:
            theirs.callback(os.close, orders)
            its_input, self.stdin = _end(theirs, stdin, "w")
            its_output, self.stdout = _end(theirs, stdout, "r")
            its_errors, self.stderr = (its_output, None) if stderr == subprocess.STDOUT else _end(theirs, stderr, "r")
            self.pid = self._server.fork({0: its_input, 1: its_output, 2: its_errors, _ORDERS: orders})
        with os.fdopen(to_order, "w") as file:
            json.dump({"args": args, "env": dict(env), "cwd": str(cwd)}, file)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.reap(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            # Asked again and again: the process that forks does nothing else while it waits for an end.
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return status

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[IO[str], str] = {}

        def read_all(pipe: IO[str]) -> None:
            with pipe:
                read[pipe] = pipe.read()

        readers = [threading.Thread(target=read_all, args=(pipe,)) for pipe in (self.stdout, self.stderr) if pipe]
        for reader in readers:
            reader.daemon = True
            reader.start()
        if self.stdin is not None:
            with self.stdin:
                self.stdin.write(input or "")
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        out, err = (read.get(pipe, "") if pipe else "" for pipe in (self.stdout, self.stderr))
        return out, err


def _end(theirs: ExitStack, wanted: int | IO[str], mode: str) -> tuple[int, IO[str] | None]:
    """Give the descriptor that a process gets as a stream, and our end of it if there is one."""
    if wanted == subprocess.PIPE:
        reading, writing = os.pipe()
        its, ours = (reading, writing) if mode == "w" else (writing, reading)
        theirs.callback(os.close, its)
        return its, os.fdopen(ours, mode)
    if wanted == subprocess.DEVNULL:
        its = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, its)
        return its, None
    return wanted if isinstance(wanted, int) else wanted.fileno(), None


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether an interpreter with this environment would start as the one from which is forked."""
    return _read_at_start(env) == _read_at_start(_environment())


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START) and name != "PYTHONPATH"}


def _environment() -> dict[str, str]:
    return {**environment(), "PYTHONWARNINGS": "error"}


def main() -> None:
    """In the process: be ``python -m lockkit.cli``, with the arguments, environment and directory that were sent."""
    with os.fdopen(_ORDERS) as file:
        orders: dict[str, Any] = json.load(file)
    os.environ.clear()
    os.environ.update(orders["env"])
    os.chdir(orders["cwd"])
    tempfile.tempdir = None
    sys.path[:0] = [orders["cwd"], *orders["env"].get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [f"{lockkit.cli.__path__[0]}/__main__.py", *orders["args"]]
    # The old ones know from the start whether their files can be sought in, and these are other files.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - of a number
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.orig_argv = [sys.executable, "-m", "lockkit.cli", *orders["args"]]
    lockkit.cli.main()
