"""Python programs, started as users start them: to their end, as a group of processes, or several at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from tests.conventions.sources import ROOT

LIMIT = 180.0
"""Seconds that another program may take on a busy machine."""


def start_python(
    *arguments: str | Path, cwd: Path = ROOT, without: Sequence[str] = (), **env: str
) -> subprocess.Popen[str]:
    """Start Python with variables of its own, and without those that begin so; its processes are a group."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env={**kept, "PYTHONPATH": str(ROOT), **env}, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, without: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, and kill what is left of its processes."""
    process = start_python(*arguments, cwd=cwd, without=without, **env)
    try:
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        kill_group(process.pid)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def printed(*arguments: str | Path, cwd: Path = ROOT, without: Sequence[str] = (), **env: str) -> str:
    """Run it, and give what it printed; it must end well."""
    done = run_python(*arguments, cwd=cwd, without=without, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def python_group(log: Path, *arguments: str, cwd: Path = ROOT, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with a file for its output, and kill what is left of its processes at the end."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    """Kill the processes of a group that have not ended."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_at_once(count: int, run: Callable[[Barrier], str]) -> None:
    """
    Run a function in so many processes at the same time; print how each ended, and what the function returned.

    They share a barrier, see `meet`; what is imported is imported once.
    """
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(count)
    processes = [fork.Process(target=_run_one, args=(run, barrier)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _run_one(run: Callable[[Barrier], str], barrier: Barrier) -> None:
    status, said = 0, ""
    try:
        barrier.wait(LIMIT)
        said = run(barrier)
    except Exception:  # noqa: BLE001 - its text is what the test wants
        traceback.print_exc()
        status = 1
    os.write(1, f"status {status} {said}".strip().encode() + b"\n")


def meet(barrier: Barrier, owner: Any, name: str) -> None:  # noqa: ANN401 - a module or class
    """Have the next call of this function wait until all processes are about to make it."""
    function = getattr(owner, name)

    def together(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the function's
        setattr(owner, name, function)
        barrier.wait(LIMIT)
        return function(*arguments, **options)

    setattr(owner, name, together)
