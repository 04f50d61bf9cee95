"""
Runs the migrations of the example site in several processes at the same time; see `test_django.py`.

``python django_migrators.py NUMBER COMMAND``. With ``migrate`` each applies its first migration after all have read
which ones are applied.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import django
from django.core.management import call_command
from django.db.migrations.executor import MigrationExecutor

from tests.programs import run_at_once

PATIENCE = 60.0


def together(barrier: Barrier) -> None:
    """Apply the first migration when all are about to."""
    apply = MigrationExecutor.apply_migration

    def apply_together(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - Django's
        MigrationExecutor.apply_migration = apply
        barrier.wait(PATIENCE)
        return apply(*arguments, **options)

    MigrationExecutor.apply_migration = apply_together


def run(command: str, barrier: Barrier) -> None:
    """One process."""
    try:
        if command == "migrate":
            together(barrier)
        else:
            barrier.wait(PATIENCE)
        call_command(command, verbosity=0)
    except Exception:  # noqa: BLE001 - its text is what the test wants
        traceback.print_exc()
        status = b"status 1\n"
    else:
        status = b"status 0\n"
    os.write(1, status)


def main() -> None:
    """Start them and wait."""
    django.setup()
    number, command = int(sys.argv[1]), sys.argv[2]
    run_at_once(number, partial(run, command))


if __name__ == "__main__":
    main()
