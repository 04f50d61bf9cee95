"""Processes of Celery, as its command line starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lockkit.testing.timing import PATIENCE
from tests.conventions.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

START_SECONDS = 60.0
"""Until a worker answers: it imports Celery and forks."""


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:  # noqa: ANN401 - whatever it gives
    """Poll until something is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)
    return found


@contextmanager
def celery(url: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of Celery as a process group, and kill what is left of that at the end."""
    environment = {**os.environ, "LOCKKIT_TEST_REDIS": url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "celery", "-A", "tests.integrations.celery_app", *arguments]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
