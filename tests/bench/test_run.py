from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from lockkit_tools.bench.command import QUICK_WORKLOADS, WORKLOAD_NAMES
from lockkit_tools.bench.report import Report
from lockkit_tools.bench.run import Outcome, Run
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerFailed
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload
from tests.bench.fakes import subject

HERE = Path("/nowhere")
BASELINE = subject("Baseline", HERE, role="baseline")
OURS = subject("Ours", HERE, role="lockkit")
PEER = subject("Peer", HERE)


class Told(Workload):
    """Gives what the test says; starts no process."""

    name = "told"
    title = "Told"
    explains = "Nothing."
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("us", "µs", "min"),
        Figure("median", "median"),
        Figure("count", "count", "sum", 0),
        Figure("top", "top", "max"),
    )
    headline = "us"
    ratios = ("us",)

    def __init__(self, tell: Callable[[Subject], float]) -> None:
        self.tell = tell
        self.turns: list[str] = []

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        del settings
        self.turns.append(subject.label)
        value = self.tell(subject)
        return Measured({"us": value, "median": value, "count": value, "top": value})


class ToldLong(Told):
    """As `Told`, but long."""

    name = "told-long"
    long = True


def run(
    *workloads: Workload, rounds: int = 3, seed: int = 1, subjects: tuple[Subject, ...] = (BASELINE, OURS, PEER)
) -> Outcome:
    """Run, without a progress bar."""
    settings = Settings(rounds=rounds, rounds_max_long=2)
    return Run(subjects, workloads, settings, seed=seed).go(lambda *_: None)


def test_every_subject_takes_its_turn_in_every_round_in_changing_order() -> None:
    """The order comes from the seed, and is another one in other rounds."""
    one, same, other = (Told(lambda _: 1.0) for _ in range(3))

    run(one, rounds=6, seed=1)
    run(same, rounds=6, seed=1)
    run(other, rounds=6, seed=2)

    rounds = [one.turns[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(turn) == ["Baseline", "Ours", "Peer"] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    assert one.turns == same.turns != other.turns


def test_long_workloads_get_fewer_rounds() -> None:
    """And the number of turns announced is the number that there is."""
    workload, long = Told(lambda _: 1.0), ToldLong(lambda _: 1.0)
    seen: list[int] = []

    measuring = Run((BASELINE, OURS, PEER), (workload, long), Settings(rounds=3, rounds_max_long=2), seed=1)
    measuring.go(lambda _, over: seen.append(over))

    assert (len(workload.turns), len(long.turns)) == (9, 6)
    assert seen == list(range(measuring.turns))


def test_rounds_are_combined_as_each_figure_says() -> None:
    """Minimum, median, sum or maximum."""
    values = iter([3.0, 1.0, 2.0])

    (section,) = Report(run(Told(lambda _: next(values)), subjects=(OURS,)), {}).sections

    assert section.rows[0].figures == {"us": 1.0, "median": 2.0, "count": 6.0, "top": 3.0}


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is busy in one round does not change them: here the second round takes ten times as long."""
    pace = {"Baseline": 1.0, "Ours": 2.0, "Peer": 4.0}
    turns = {"count": 0}

    def tell(subject: Subject) -> float:
        turns["count"] += 1
        return pace[subject.label] * (10 if 3 < turns["count"] <= 6 else 1)

    (section,) = Report(run(Told(tell)), {}).sections

    baseline, ours, peer = section.rows
    assert baseline.baseline is None
    assert ours.baseline == BASELINE.key
    assert ours.ratios["us"][BASELINE.key].rounds == [2.0, 2.0, 2.0]
    assert peer.ratios["us"][OURS.key].median == 2.0
    assert (peer.ratios["us"][BASELINE.key].lowest, peer.ratios["us"][BASELINE.key].highest) == (4.0, 4.0)


def test_baseline_has_the_same_api_where_there_is_one() -> None:
    """An asyncio lock is measured against an asyncio baseline; without one, against the blocking one."""
    asyncio, twin = (replace(one, face="asyncio") for one in (BASELINE, OURS))

    (both,) = Report(run(Told(lambda _: 1.0), subjects=(BASELINE, asyncio, OURS, twin)), {}).sections
    (one,) = Report(run(Told(lambda _: 1.0), subjects=(BASELINE, twin)), {}).sections

    assert [row.baseline for row in both.rows] == [None, None, BASELINE.key, asyncio.key]
    assert [row.baseline for row in one.rows] == [None, BASELINE.key]


def test_failure_in_a_later_round_keeps_the_former_figures() -> None:
    """But says so, compares nothing, and does not try again."""
    turns = {"Ours": 0}

    def tell(subject: Subject) -> float:
        if subject is OURS:
            turns["Ours"] += 1
            if turns["Ours"] == 2:
                raise WorkerFailed("no more")
        return 1.0

    (section,) = Report(run(Told(tell), rounds=4), {}).sections

    baseline, ours, peer = section.rows
    assert turns["Ours"] == 2
    assert (ours.status, ours.reason) == ("failed", "no more")
    assert ours.notes == ["figures of the 1 rounds before it failed"]
    assert ours.ratios == {"us": {}}
    assert OURS.key not in peer.ratios["us"]
    assert baseline.figures["count"] == 4


def test_what_does_not_apply_or_is_not_installed_is_skipped_with_the_reason() -> None:
    """And takes no turn."""
    workload = Told(lambda _: 1.0)
    absent = replace(PEER, missing="not installed: pip install peer")
    elsewhere = replace(BASELINE, workloads=("pair",))

    outcome = run(workload, subjects=(absent, elsewhere, OURS))

    assert [cell.status for cell in outcome.cells] == ["skipped", "skipped", "ok"]
    assert outcome.cells[0].skipped == "not installed: pip install peer"
    assert "there for pair" in outcome.cells[1].skipped
    assert set(workload.turns) == {"Ours"}


def test_interrupt_keeps_what_there_is() -> None:
    """Ctrl-C in the second round."""
    turns = {"count": 0}

    def tell(_: Subject) -> float:
        turns["count"] += 1
        if turns["count"] == 5:
            raise KeyboardInterrupt
        return 1.0

    outcome = run(Told(tell))

    assert outcome.interrupted
    assert sum(len(cell.rounds) for cell in outcome.cells) == 4
    assert Report(outcome, {}).to_json()["interrupted"] is True


def test_no_turn_begins_after_the_limit() -> None:
    """What was not reached is pending, and the report says why."""
    workload = Told(lambda _: 1.0)

    outcome = Run((BASELINE, OURS), (workload,), Settings(limit=-1.0), seed=1).go(lambda *_: None)

    assert workload.turns == []
    assert [cell.status for cell in outcome.cells] == ["pending", "pending"]
    assert Report(outcome, {}).to_json()["out_of_time"] is True


def test_names_on_the_command_line_are_those_of_the_workloads() -> None:
    """They stand there twice, so that the help need not load what measures."""
    assert tuple(WORKLOADS) == WORKLOAD_NAMES
    assert set(QUICK_WORKLOADS) <= set(WORKLOAD_NAMES)


def test_report_is_read_back_from_its_json() -> None:
    """Rounds, failures and what broke exclusion: all that follows from them is worked out again."""
    outcome = Run((BASELINE, OURS, PEER), (WORKLOADS["pair"], WORKLOADS["held"]), Settings(rounds=2), seed=1).outcome
    ok, failed, broken, *_ = outcome.cells
    for cell in (ok, failed, broken):
        cell.rounds = {0: Measured({"min_us": 2.0, "median_us": 3.0}), 1: Measured({"min_us": 1.0}, note="a note")}
    failed.failed = "it ended"
    broken.rounds[1].broken = "two inside together"
    written = json.loads(json.dumps(Report(outcome, {"command": "lockkit bench", "versions": {}}).to_json()))

    assert json.loads(json.dumps(Report.from_json(written).to_json())) == written
