"""
The drawings of the documentation, made by the lab.

Written anew by ``python -m tests.lab.drawings``, from the root of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lockkit_tools.lab import load, run
from lockkit_tools.lab.svg import draw

COMMAND = "python -m tests.lab.drawings"
FOLDER = Path(__file__).parents[2] / "docs" / "drawings"


class Drawn(NamedTuple):
    """What a drawing shows."""

    scenario: str
    backend: str
    fenced: bool = False


DRAWINGS = {
    "lost-lease.svg": Drawn("gc-pause", "redis"),
    "fencing-token.svg": Drawn("gc-pause", "redis", fenced=True),
    "deadline-before-expiry.svg": Drawn("partition", "redis"),
    "hand-off.svg": Drawn("hand-off", "redis"),
    "redlock-two-rounds.svg": Drawn("two-rounds", "redlock"),
    "delayed-restart.svg": Drawn("restart-without-data", "redlock"),
    "restart-votes-at-once.svg": Drawn("restart-without-data", "redlock?durable=on"),
    "clock-jump.svg": Drawn("clock-jump", "redlock"),
    "failover.svg": Drawn("failover", "redis+sentinel"),
    "failover-replicas.svg": Drawn("failover", "redis+sentinel?replicas=1"),
    "election-grace.svg": Drawn("election", "redis"),
}


def make(drawn: Drawn) -> str:
    """Draw one."""
    return draw(run(load(drawn.scenario), backend=drawn.backend, fenced=drawn.fenced))


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in DRAWINGS.items():
        (FOLDER / name).write_text(make(drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
