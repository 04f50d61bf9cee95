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
import traceback
from contextlib import nullcontext
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

from alembic import command, op
from alembic.config import Config

import lockkit.integrations.alembic
from tests.conventions.sources import ROOT
from tests.programs import run_at_once

PATIENCE = 60.0


def config() -> Config:
    """The example's."""
    return Config(str(ROOT / "examples" / "alembic_app" / "alembic.ini"))


def without_lock(barrier: Barrier) -> None:
    """Migrate as Alembic's own env.py does. Each process creates its table after all have read the revision."""
    create_table = op.create_table

    def create_together(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - Alembic's
        barrier.wait(PATIENCE)
        return create_table(*arguments, **options)

    op.create_table = create_together
    lockkit.integrations.alembic.migration_lock = lambda *_, **__: nullcontext()  # type: ignore[assignment]


def run(kind: str, barrier: Barrier) -> None:
    """One process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            barrier.wait(PATIENCE)
            if kind == "unlocked":
                without_lock(barrier)
            command.upgrade(config(), "head")
        except Exception:  # noqa: BLE001 - its text is what the test wants
            traceback.print_exc()
            status = 1
        else:
            status = 0
    sys.__stdout__.write(f"status {status}: {out.getvalue().strip()}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def main() -> None:
    """Start them and wait."""
    number, kind, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["DATABASE_URL"] = url
    run_at_once(number, partial(run, kind))


if __name__ == "__main__":
    main()
