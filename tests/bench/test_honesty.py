"""What the benchmark says of subjects that misbehave, measured for real in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lockkit.testing.fork_servers import close_all
from lockkit_tools.bench import catalog
from lockkit_tools.bench.report import Report, Row
from lockkit_tools.bench.run import Outcome, Run
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Face, Subject
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers._process import process_table
from tests.bench.fakes import subject
from tests.tries import until

BLOCKING: tuple[Face, ...] = ("blocking",)

SHORT = Settings(
    rounds=1,
    seconds=0.2,
    processes=3,
    handoffs=4,
    waiters=5,
    settle=0.2,
    idle_seconds=0.2,
    leases=10,
    lease_ttl=0.2,
    imports=2,
    contenders=(1, 2),
    far_pairs=2,
    far_handoffs=2,
    crash_ttl=1.0,
    patience=60,
)


def measure(subjects: Sequence[Subject], *workloads: str, settings: Settings = SHORT) -> Outcome:
    """Run, without a progress bar."""
    return Run(subjects, [WORKLOADS[name] for name in workloads], settings, seed=1).go(lambda *_: None)


def measure_leaky(*others: Subject, directory: Path) -> Outcome:
    """Pair and contention, again if a contender came too late for a turn: who is alone cannot break exclusion."""
    while True:
        outcome = measure([subject("Leaky", directory), *others], "pair", "contention")
        if not rows(outcome, "contention")["Leaky"].figures["starved"]:
            return outcome


def rows(outcome: Outcome, workload: str) -> dict[str, Row]:
    """Rows of one workload by the label of their subject."""
    (section,) = (s for s in Report(outcome, {}).sections if s.workload.name == workload)
    return {row.subject.label: row for row in section.rows}


def test_subject_that_breaks_exclusion_is_reported_as_broken(tmp_path: Path) -> None:
    """Its speed counts nowhere: not in its other rows, and not as a measure for others."""
    outcome = measure_leaky(subject("Good", tmp_path), directory=tmp_path)

    contention, pair = rows(outcome, "contention"), rows(outcome, "pair")
    assert contention["Leaky"].status == "broken"
    assert contention["Leaky"].figures["overlaps"] > 0
    assert "inside together" in contention["Leaky"].reason
    assert pair["Leaky"].status == "broken"
    assert pair["Leaky"].ratios == {"min_us": {}, "median_us": {}}
    assert pair["Good"].status == contention["Good"].status == "ok"
    assert pair["Good"].ratios == {"min_us": {}, "median_us": {}}
    assert contention["Good"].figures["overlaps"] == 0


@pytest.mark.parametrize(("adapter", "face"), [("Leaky", "blocking"), ("LeakyAsync", "asyncio")])
def test_threads_and_tasks_that_are_not_excluded_are_seen_too(tmp_path: Path, adapter: str, face: Face) -> None:
    """A lock within one process is contended for by threads or tasks of one interpreter."""

    def broken() -> bool:
        """Measure; none breaks it where all but one come too late for a turn."""
        outcome = measure([subject(adapter, tmp_path, face=face, scope="process")], "contention")
        return rows(outcome, "contention")[adapter].status == "broken"

    until(broken)


@pytest.mark.parametrize("workload", ["handoff", "idle"])
def test_waiter_that_is_let_in_while_the_lock_is_held_is_reported(tmp_path: Path, workload: str) -> None:
    """A hand-off before the release is no hand-off."""
    outcome = measure([subject("Leaky", tmp_path)], workload)

    row = rows(outcome, workload)["Leaky"]
    assert row.status == "broken"
    assert "let in while the lock was held" in row.reason


def test_tokens_that_do_not_increase_are_reported(tmp_path: Path) -> None:
    """They exclude, but protect nothing."""
    outcome = measure([subject("Backwards", tmp_path)], "contention")

    row = rows(outcome, "contention")["Backwards"]
    assert row.status == "broken"
    assert "tokens out of order" in row.reason
    assert row.figures["overlaps"] == 0


RAISES, DIES = (
    ("Raising", "RuntimeError: no lock lockkit today"),
    ("Dying", "its process ended with status 3: out of luck"),
)


@pytest.mark.parametrize(
    ("workload", "adapter", "reason"),
    [
        ("pair", *DIES),
        ("contention", *RAISES),
        ("handoff", *RAISES),
        ("handoff", *DIES),
        ("idle", *RAISES),
        ("crash", *RAISES),
        ("crash", *DIES),
    ],
)
def test_subject_that_fails_does_not_end_the_run(tmp_path: Path, workload: str, adapter: str, reason: str) -> None:
    """It is reported with what it said, and the others are measured."""
    subjects = [
        subject("Good", tmp_path, renews=True),
        subject(adapter, tmp_path, renews=True),
        subject("Good", tmp_path, renews=True, number=2),
    ]

    outcome = measure(subjects, workload, settings=replace(SHORT, seconds=0.05))

    good, failing, other = outcome.cells
    assert good.status == other.status == "ok"
    assert failing.status == "failed"
    assert reason in failing.failed


def test_subject_that_hangs_is_ended(tmp_path: Path) -> None:
    """After the time that it should take and some patience; and it is not asked again."""
    settings = replace(SHORT, patience=8, rounds=2)

    outcome = measure([subject("Hanging", tmp_path), subject("Good", tmp_path)], "pair", settings=settings)

    hanging, good = outcome.cells
    assert hanging.failed == "no answer within 8.2 s"
    assert len(good.rounds) == 2


def test_lost_leases_are_reported(tmp_path: Path) -> None:
    """Cheap renewal that loses the locks is not cheap."""
    outcome = measure([subject("Losing", tmp_path, renews=True)], "held")

    row = rows(outcome, "held")["Losing"]
    assert row.figures["lost"] == 5
    assert row.notes == ["5 of 10 leases were lost"]


@pytest.mark.parametrize("url", ["memory://", "file:"])
def test_every_workload_measures_lockkit(url: str, tmp_path: Path) -> None:
    """Both faces on the embedded backends, with every figure that is promised for them."""
    subjects = catalog.subjects([url], faces=("blocking", "asyncio"), scratch={"file:": tmp_path}, peers=False)
    names = ["pair", "contention", "handoff", "idle", "held", "overhead"]

    outcome = measure(subjects, *names)

    assert [(cell.workload.name, cell.failed or cell.broken) for cell in outcome.cells] == [
        (name, "") for name in names for _ in subjects
    ]
    for cell in outcome.cells:
        expected = {figure.key for figure in cell.workload.figures} - {"commands_per_second", "connections"}
        assert cell.rounds[0].figures.keys() >= expected


def test_sweep_contends_once_for_each_number(tmp_path: Path) -> None:
    """One alone has nobody to share with; a subject that lets two in is broken by the number that shows it."""

    def broken() -> bool:
        """Measure; none breaks it where one of the two comes too late for a turn."""
        good, leaky = measure([subject("Good", tmp_path), subject("Leaky", tmp_path)], "sweep").cells
        assert good.rounds[0].figures.keys() == {"pairs_1", "pairs_2", "share_2", "overlaps"}
        return leaky.status == "broken"

    until(broken)


def test_connecting_counts_for_nobody(tmp_path: Path) -> None:
    """Whether a library connects when its client is made, or with its first lock, which takes longer than a turn."""
    outcome = measure([subject("Connecting", tmp_path)], "contention", settings=replace(SHORT, seconds=2))

    (cell,) = outcome.cells
    assert cell.rounds[0].figures["pairs_per_second"] > 0


def test_throughput_is_of_locks_that_nobody_else_wants(tmp_path: Path) -> None:
    """No process uses another's."""
    outcome = measure([subject("Noting", tmp_path)], "throughput")

    (cell,) = outcome.cells
    assert cell.rounds[0].figures["pairs_1"] > 0
    assert cell.rounds[0].figures["pairs_2"] > 0
    users = [path.stem for path in tmp_path.glob("*.*")]
    assert len(users) == len(set(users)) == sum(SHORT.contenders)


def test_imports_are_compared_with_a_bare_interpreter() -> None:
    """Lockkit loads nothing of others; what a library loads of others is counted, and not the library itself."""
    subjects = [subject for subject in catalog.imports() if subject.label in {"import lockkit", "import filelock"}]
    subjects[1] = replace(subjects[1], label="import pytest", target="import pytest")

    outcome = measure(subjects, "import", settings=replace(SHORT, imports=1))

    ours, theirs = (cell.rounds[0] for cell in outcome.cells)
    assert ours.figures["third_party"] == 0
    assert "pluggy" in theirs.details["third_party"]
    assert "pytest" not in theirs.details["third_party"]
    assert theirs.figures["modules"] > 0
    assert ours.figures["modules"] > 0


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Whatever the subjects did, their processes are gone and reaped; what those came from ends with the command."""
    settings = replace(SHORT, patience=1)

    with nothing_left():
        measure([subject("Hanging", tmp_path), subject("Raising", tmp_path)], "handoff", settings=settings)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that what is measured leaves no worker, and that what those were forked from ends as with the command."""
    close_all()
    before = children()
    yield
    assert {worker for fork_server in children() - before for worker in children(fork_server)} == set()
    close_all()
    assert children() <= before


def children(parent: int | None = None) -> set[int]:
    """The children of a process, by default this one, those too that have ended and were not reaped."""
    return {entry.pid for entry in process_table() if entry.parent == (parent or os.getpid())}
