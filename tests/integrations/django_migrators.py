"""
Runs the migrations of the example site in several processes at the same time; see `test_django.py`.

``python django_migrators.py NUMBER COMMAND``. With ``migrate`` each applies its first migration after all have read
which ones are applied.
"""

from __future__ import annotations

import sys
from functools import partial
from multiprocessing.synchronize import Barrier

import django
from django.core.management import call_command
from django.db.migrations.executor import MigrationExecutor

from tests.programs import meet, run_at_once


def run(command: str, barrier: Barrier) -> str:
    """One process."""
    if command == "migrate":
        meet(barrier, MigrationExecutor, "apply_migration")
    call_command(command, verbosity=0)
    return ""


if __name__ == "__main__":
    django.setup()
    run_at_once(int(sys.argv[1]), partial(run, sys.argv[2]))
