"""Processes of Celery, as its command line starts them."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from tests.programs import python_group

START_SECONDS = 60.0
"""Until a worker answers: it imports Celery and forks."""


def celery(url: str, log: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a command of Celery."""
    app = ("-m", "celery", "-A", "tests.integrations.celery_app")
    return python_group(log, *app, *arguments, LOCKKIT_TEST_REDIS=url)
