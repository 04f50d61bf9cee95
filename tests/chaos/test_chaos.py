"""The chaos session's own code: short runs, and whether it catches what it is there for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.testing.history import encode
from lockkit.testing.target import Target
from lockkit_tools.history import MODELS, check, read
from lockkit_tools.history.stays import operations
from lockkit_tools.servers import RedisServer
from tests.chaos.journal import Verdict, judge
from tests.chaos.run import Outcome, Run
from tests.testing.broken import LetsIn

BEFORE = ["call a.1 x 90", "enter a.1 x 5 100", "held a.1 200"]


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
    called = [f"call {one} {name} 10" for one, name in {(*line.split()[1:3],) for line in lines if "enter" in line}]
    for order in ([*BEFORE, *lines], [*lines, *BEFORE]):
        verdict = judge([*called, "call d.1 x 1", *order, "said d.1 timeout 999"])

        assert (len(verdict.overlaps), len(verdict.disorder)) == (overlaps, disorder)
        assert verdict.said == {"timeout": 1}
        assert linearizable(verdict) is (overlaps + disorder == 0)


def linearizable(verdict: Verdict) -> bool:
    """Ask the checker of histories, which knows nothing of stays."""
    histories = read("".join(encode(operation, "history.edn") for operation in operations(verdict.calls)))
    words = {check(history, MODELS["fenced-mutex"]).word for history in histories.values()}
    assert "unknown" not in words
    return words == {"valid"}


def test_journal_and_checker_of_histories_agree() -> None:
    """Two ways to judge a run that share no code: on journals in which clients are killed, lose leases and overlap."""
    verdicts = Counter[bool]()
    for seed in range(400):
        verdict = judge(random_journal(random.Random(seed)))
        sound = not verdict.overlaps and not verdict.disorder

        assert linearizable(verdict) is sound, f"seed {seed}"
        verdicts[sound] += 1

    assert min(verdicts.values()) > 50


def random_journal(choose: random.Random) -> Iterator[str]:
    """Twelve calls for one or two locks; those of one lock mostly hold it in turn, with increasing tokens."""
    free, token = {"x": 100, "y": 100}, 1
    for number in range(12):
        stay, name = f"c.{number}", choose.choice("xxy")
        early = choose.random() < 0.04
        first = max(1, free[name] + (choose.randint(-9, 0) if early else choose.randint(1, 9)))
        last = first + choose.randint(0, 20)
        token += -1 if choose.random() < 0.02 else choose.randint(1, 3)
        yield f"call {stay} {name} {max(0, first - choose.randint(1, 60))}"
        end = choose.choice(["left", "left", "left", "killed", "lost", "timeout", "unavailable"])
        if end in {"timeout", "unavailable"}:
            yield f"said {stay} {end} {first}"
            continue
        yield f"enter {stay} {name} {token} {first}"
        yield f"held {stay} {last}"
        if end == "left":
            yield f"left {stay} {last + choose.randint(1, 9)}"
        free[name] = max(free[name], last)


def expect_sound(outcome: Outcome) -> None:
    """Nothing was broken, and something happened."""
    assert not outcome.failed, (outcome.row(), outcome.verdict.overlaps[:5], outcome.verdict.disorder[:5])
    assert outcome.verdict.stays
    assert linearizable(outcome.verdict)


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
    assert not linearizable(outcome.verdict)
