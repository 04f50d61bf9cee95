"""The chaos session's own code: short runs, and whether it catches what it is there for."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, cast

import pytest

from lockkit.backends.file.backend import FileBackend
from lockkit.testing.history import encode
from lockkit.testing.target import Target
from lockkit_tools.history import MODELS, check, read
from lockkit_tools.history.stays import operations
from lockkit_tools.servers import RedisServer, require
from lockkit_tools.servers.base import Service
from lockkit_tools.servers.errors import StartFailed
from tests.chaos import soak
from tests.chaos.journal import Verdict, judge
from tests.chaos.run import Outcome, Run
from tests.chaos.stored import in_files
from tests.chaos.targets import TARGETS, Entry
from tests.programs import LIMIT, kill_group, start_python
from tests.testing.broken import LeavesFiles, LetsIn, SleepsOn

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


@pytest.mark.parametrize(
    ("lines", "free_ns"),
    [
        (["enter b.1 x 6 500"], [299]),
        (["said b.1 timeout 900"], [699]),  # it was never woken
        (["said b.1 unavailable 900"], []),
        (["said c.1 unavailable 300", "enter b.1 x 6 500"], []),
        (["enter b.1 y 6 500"], []),
        (["fault kill 100 191", "enter b.1 x 6 500"], [299]),
        (["fault kill 100 192", "enter b.1 x 6 500"], []),
        (["fault kill 500 600", "enter b.1 x 6 500"], [299]),
        (["fault kill 499 600", "enter b.1 x 6 500"], []),
        (["fault kill 720 800", "enter b.1 x 6 900"], [699]),
        (["fault kill 690 800", "enter b.1 x 6 900"], []),
    ],
)
def test_hand_offs_in_calm_are_measured(lines: list[str], free_ns: list[int]) -> None:
    """From the last instant at which the holder had the lock; not those that a fault may have delayed."""
    lock = "y" if "enter b.1 y 6 500" in lines else "x"
    verdict = judge([*BEFORE, "left a.1 205", f"call b.1 {lock} 120", *lines])

    found = verdict.hand_offs("x", limit=500e-9, grace=10e-9)

    assert [round(seconds * 1e9) for seconds in found] == free_ns


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


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_servers_store_is_counted(name: str, tmp_path: Path) -> None:
    """A count that does not see what a lock leaves could not see what clients leave behind either."""
    entry = TARGETS[name]
    made = entry.service()
    if isinstance(made, Service):
        require(made.kind, local=True)
    with made:
        service = made if isinstance(made, Service) else None
        with entry.target(service, tmp_path).connect() as client:
            client.lock("first", ttl=6).acquire(10).release()
            before = entry.stored(service or tmp_path)
            with client.lock("second", ttl=6, timeout=10):
                assert entry.stored(service or tmp_path) > before


PLANTED = {LetsIn: "overlaps", SleepsOn: "lost wake-ups", LeavesFiles: "left behind"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", PLANTED, ids=lambda backend: backend.__name__)
def test_soak_reports_what_is_wrong_and_keeps_its_history(
    backend: type[FileBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two holders, a waiter that nobody wakes, a file that stays: the status is 1, also of each later report."""
    planted = Entry(
        nullcontext, in_files, url="file://{}/locks", backend=f"{backend.__module__}:{backend.__name__}"
    )  # fmt: skip
    monkeypatch.setitem(cast("dict[str, Entry]", TARGETS), "planted", planted)
    monkeypatch.setattr("tests.chaos.run.LEFT_SECONDS", 5.0)

    options = ["--hours=1e-9", "--seconds=1", "--calm=10", "--seed=0", "--processes=3", "--targets", "planted"]

    status = soak.main([str(tmp_path), *options])

    assert status == 1
    assert soak.main([str(tmp_path), "--report"]) == 1
    assert re.search(rf"\n  planted, seed 0: {PLANTED[backend]}: [1-9]", capsys.readouterr().out)
    assert (tmp_path / "0000-planted" / "journal").exists()
    assert read((tmp_path / "0000-planted" / "history.edn").read_text())


@pytest.mark.slow
def test_soak_that_was_killed_goes_on_with_the_turn_that_it_did_not_end(tmp_path: Path) -> None:
    """With the same seed; the hours that it ran count."""
    options = ["--seconds=0.2", "--calm=0", "--seed=7", "--processes=2", "--targets", "file"]
    started = start_python("-m", "tests.chaos.soak", tmp_path, "--hours=9", *options)
    try:
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "0001-file" / "journal").exists():
            assert time.monotonic() < deadline
            assert started.poll() is None, started.communicate()
            time.sleep(0.05)
    finally:
        kill_group(started.pid)
        started.communicate()
    (first,) = soak.read(tmp_path)
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write('{"turn": 1, "targ')  # what a kill in the middle of a write leaves

    assert soak.main([str(tmp_path), f"--hours={(first['seconds'] + 0.01) / 3600}", *options]) == 0

    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert turns[0] == first
    assert [(turn["turn"], turn["seed"]) for turn in turns] == [(0, 7), (1, 8)]
    assert turns[0]["faults"] != turns[1]["faults"]
    assert soak.main([str(tmp_path), f"--hours={first['seconds'] / 3600}", *options]) == 0
    assert len(soak.read(tmp_path)) == 2


def test_soak_reports_a_turn_that_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not start is no clean turn, and does not end the soak."""

    def fail() -> NoReturn:
        raise StartFailed("it did not start")

    monkeypatch.setitem(cast("dict[str, Entry]", TARGETS), "planted", Entry(fail, in_files))

    assert soak.main([str(tmp_path), *["--hours=1e-9", "--targets", "planted"]]) == 1

    (turn,) = soak.read(tmp_path)
    assert turn["odd"] == ["crash: StartFailed('it did not start')"]
    assert "it did not start" in (tmp_path / "0000-planted" / "odd").read_text()


def test_soak_takes_growth_for_a_leak() -> None:
    """Of memory, descriptors or threads, in either kind of client."""
    verdict = judge(BEFORE)
    sound, more = [(30, 10, 5), (60, 25, 15)], [(30, 10, 5), (30, 26, 5)]

    assert soak.describe(Outcome(verdict, used={"relay": sound}))["odd"] == []
    assert soak.describe(Outcome(verdict, used={"relay": sound, "contenders": more}))["odd"] == ["leak: 16 descriptors"]
