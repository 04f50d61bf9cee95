"""Processes of Celery, as its command line starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conventions.sources import ROOT

START_SECONDS = 60.0
"""Until a worker answers: it imports Celery and forks."""


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
