"""``nox -s simulate-night``: its plan, what it counts, what it covers, and what it says."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lockkit.testing.timing import PATIENCE
from lockkit_tools.simulation import simulate
from lockkit_tools.simulation.branches import BranchMeter, cover
from lockkit_tools.simulation.night import Faults, Kind, KindResult, Night, _Batch, _run_batch, play_one, run
from lockkit_tools.simulation.report import as_json, as_text
from tests.simulation import night
from tests.simulation.support import Stage, apart

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def _odd(seed: int) -> str:
    return "two holders" if seed % 2 else ""


def _breaks(seed: int) -> str:
    if seed == 13:
        raise RuntimeError("stuck")
    return ""


def _stage(seed: int) -> str:
    stage = Stage(seed)
    alice = stage.process("alice")
    alice.pause()
    alice.pause()
    stage.node.stop(lose_data=True)
    stage.network.cut(alice, stage.node, answers=False)
    stage.end()
    return ""


KINDS = (
    Kind("odd", 0.5, _odd, "breaks at odd seeds"),
    Kind("breaks", 0.25, _breaks, "raises once"),
    Kind("stage", 0.25, _stage, "a few faults"),
)


def test_violations_and_shares() -> None:
    """Each kind runs its share from the first seed on; what it raises is a violation, with the command to repeat it."""
    result = run(__name__, 80, first=10, workers=1, measured=0)
    report = as_json(result, KINDS)
    text = as_text(report)

    assert {name: kind.count for name, kind in result.kinds.items()} == {"odd": 40, "breaks": 20, "stage": 20}
    assert (result.kinds["odd"].violated, result.violated) == (20, 21)
    assert [one.seed for one in result.violations if one.kind == "odd"] == list(range(11, 50, 2))
    assert ("breaks", 13, "RuntimeError: stuck") in result.violations
    assert len(result.slowest) == 10
    assert report["coverage"] is None
    assert "21 schedules broke a promise" in text
    assert "odd, seed 11: two holders\n    nox -s simulate-night -- --kind=odd --seed=11" in text
    assert json.loads(json.dumps(report))["schedules"] == 80


def test_faults_are_counted_once_where_they_happen() -> None:
    """Not the pause of what is paused, nor the end of the world."""
    result = run(__name__, 10, workers=1, measured=0, only=["stage"])

    expected = {"client paused": 10, "server stopped, data lost": 10, "network cut for requests": 10}
    assert result.faults == Counter(expected)
    assert result.suffered == Counter(expected)


def test_only_kinds_that_there_are() -> None:
    """A wrong name runs nothing."""
    with pytest.raises(ValueError, match="no such kind: nope"):
        run(__name__, 10, only=["nope"])


def test_counting_changes_nothing() -> None:
    """The history is the same, and afterwards everything is as it was."""
    for seed in apart(range(10)):
        alone = simulate(seed).history
        with Faults() as faults:
            assert simulate(seed).history == alone
        before = faults.take()
        simulate(seed)
        assert not faults.take()
        assert bool(before) or simulate(seed).schedule.calm


def test_batches_leave_nothing_in_memory() -> None:
    """Ten million schedules run in two processes."""

    def objects_after(seeds: range) -> int:
        _run_batch(_Batch(night.MODULE, "lock", seeds, measured=False))
        return len(gc.get_objects())

    before = objects_after(range(5))

    after = objects_after(range(5, 35))

    assert after < before + 2000


def test_faults_are_those_of_the_schedule() -> None:
    """All kinds of them occur among some schedules."""
    seen: Counter[str] = Counter()
    with Faults() as faults:
        for seed in apart(range(120)):
            simulate(seed)
            seen.update(faults.take().keys())

    assert {
        "client paused", "client killed", "call cancelled", "network cut", "network cut for requests",
        "network cut for answers", "request without an answer", "server paused", "server stopped",
        "server stopped, data lost", "time of day set", "event loop ended", "client closed", "close cancelled",
        "lock broken by force", "no task can be started", "network with slow messages",
    } == set(seen)  # fmt: skip


def test_branches_are_those_that_were_taken() -> None:
    """More schedules cover more; what never ran is listed with its function."""
    with BranchMeter() as first:
        for seed in apart(range(2)):
            simulate(seed)
    with BranchMeter() as second:
        for seed in apart(range(2, 8)):
            simulate(seed)
    assert first.arcs is not None
    assert second.arcs is not None

    few, many = cover(first.arcs), cover(first.arcs.joined(second.arcs))

    assert 0 < few.taken < many.taken < many.total == few.total
    assert len(many.uncovered) < len(few.uncovered)
    idle = {(one.file, one.function) for one in many.uncovered if one.text == "never runs"}
    assert any(file == "lockkit/primitives/election.py" for file, _ in idle)
    assert not any(function == "Acquisition.run" for _, function in idle)
    assert all(one.function for one in many.uncovered)


def test_every_kind_is_valid_and_all_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A short night, as the command line runs it."""
    path = tmp_path / "report.json"

    status = night.main(["--count=16", "--workers=1", "--measured=0.2", f"--json={path}"])

    text = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert status == 0, text
    assert [*report["kinds"]] == [kind.name for kind in night.KINDS]
    assert all(kind["schedules"] > 0 for kind in report["kinds"].values())
    assert 0 < report["coverage"]["taken"] < report["coverage"]["branches"]
    assert "What none of them covers" in text
    assert report["cpu_seconds"] > 0
    assert " s of CPU) by 1 processes" in text
    assert text.rstrip().endswith("Every schedule kept every promise.")


def test_shares_are_of_all() -> None:
    """So that the mean time of a schedule, and with it the time of a night, is what was measured."""
    assert sum(kind.share for kind in night.KINDS) == pytest.approx(1)


def test_one_schedule_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """And shown."""
    assert night.main(["--kind=lock", "--seed=5"]) == 0
    out = capsys.readouterr().out
    assert "Schedule(seed=5" in out
    assert "lock, seed 5: every promise was kept" in out
    assert play_one(KINDS[0], 1) == "two holders"


@pytest.mark.parametrize("wrong", [["--count=0"], ["--measured=2"], ["--seed=1"], ["--kind=nope"], ["--workers=0"]])
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused before anything runs."""
    with pytest.raises(SystemExit) as ended:
        night.main(wrong)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_a_report() -> None:
    """Of what was run until then."""
    command = [sys.executable, "-m", night.MODULE, "--count=1000000", "--workers=1", "--measured=0", "--kind=lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "schedules" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=3 * PATIENCE)

    assert process.returncode == 0, err
    assert "Ended early: 1,000,000 were to be run." in out
    assert "Traceback" not in err


def test_empty_night_can_be_printed() -> None:
    """Ctrl-C may come before the first batch."""
    report = as_json(Night(10, 0, 1, {"odd": KindResult()}), KINDS)

    assert "Ended early" in as_text(report)
