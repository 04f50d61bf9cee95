"""The chaos session's own code: short runs, and whether it catches what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit.testing.target import Target
from lockkit_tools.servers import RedisServer
from tests.chaos.journal import judge
from tests.chaos.run import Outcome, Run
from tests.testing.broken import LetsIn

BEFORE = ["enter a.1 x 5 100", "held a.1 200"]


@pytest.mark.parametrize(
    ("lines", "overlaps", "disorder"),
    [
        (["enter b.1 x 6 201", "held b.1 300"], 0, 0),
        (["enter b.1 x 6 200"], 1, 0),
        (["enter b.1 y 6 150"], 0, 0),
        (["enter b.1 x 6 50", "held b.1 99"], 0, 1),
        (["enter b.1 x 6 50", "held b.1 999"], 1, 1),
        (["enter b.1 x 5 300"], 0, 1),
        (["enter b.1 x 6 110", "held b.1 120", "enter c.1 x 7 150"], 2, 0),
    ],
)
def test_journal_is_judged_by_what_holders_believed(lines: list[str], overlaps: int, disorder: int) -> None:
    """Two of one name that share an instant; tokens that do not increase. Lines of several processes come mixed."""
    for order in ([*BEFORE, *lines], [*lines, *BEFORE]):
        verdict = judge([*order, "said d.1 timeout"])

        assert (len(verdict.overlaps), len(verdict.disorder)) == (overlaps, disorder)
        assert verdict.said == {"timeout": 1}


def expect_sound(outcome: Outcome) -> None:
    """Nothing was broken, and something happened."""
    assert not outcome.failed, (outcome.row(), outcome.verdict.overlaps[:5], outcome.verdict.disorder[:5])
    assert outcome.verdict.stays


@pytest.mark.slow
def test_file_survives_a_short_run(tmp_path: Path) -> None:
    """Clients killed and frozen."""
    outcome = Run(Target(f"file://{tmp_path}/locks"), None, tmp_path, seed=1, processes=4).play(
        5, until=("kill", "freeze")
    )

    expect_sound(outcome)
    assert outcome.done["kill"]
    assert outcome.done["freeze"]


@pytest.mark.slow
def test_redis_survives_a_short_run(tmp_path: Path) -> None:
    """Server and clients."""
    with RedisServer(appendonly=True, appendfsync="always") as server:
        outcome = Run(Target(server.url), server, tmp_path, seed=2, processes=4).play(8, until=("restart",))

    expect_sound(outcome)
    assert outcome.done["restart"]


@pytest.mark.slow
def test_broken_backend_is_caught(tmp_path: Path) -> None:
    """One that lets a second holder in now and then."""
    target = Target(f"file://{tmp_path}/locks", backend=f"{LetsIn.__module__}:{LetsIn.__name__}")

    outcome = Run(target, None, tmp_path, seed=3, processes=4).play(3)
    if not outcome.failed:  # it got few turns on a busy machine
        (tmp_path / "again").mkdir()
        outcome = Run(target, None, tmp_path / "again", seed=3, processes=4).play(30)

    assert outcome.failed
    assert outcome.verdict.overlaps
