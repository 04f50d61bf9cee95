"""
Runs Alembic in several processes at the same time, on the example's migrations; see `test_alembic.py`.

``python migrators.py NUMBER KIND URL``; KIND is ``locked`` or ``unlocked``. Prints how each process ended, and whether
it took the lock.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from contextlib import nullcontext
from functools import partial
from multiprocessing.synchronize import Barrier

from alembic import command, op
from alembic.config import Config

import lockkit.integrations.alembic
from tests.conventions.sources import ROOT
from tests.programs import meet, run_at_once


def config() -> Config:
    """The example's."""
    return Config(str(ROOT / "examples" / "alembic_app" / "alembic.ini"))


def run(kind: str, barrier: Barrier) -> str:
    """One process."""
    if kind == "unlocked":  # as in Alembic's own env.py; each creates its table after all have read the revision
        meet(barrier, op, "create_table")
        lockkit.integrations.alembic.migration_lock = lambda *_, **__: nullcontext()  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        command.upgrade(config(), "head")
    return out.getvalue().strip()


if __name__ == "__main__":
    os.environ["DATABASE_URL"] = sys.argv[3]
    run_at_once(int(sys.argv[1]), partial(run, sys.argv[2]))
