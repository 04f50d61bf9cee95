"""``nox -s simulate-night``: its plan, what it counts, and what it says."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections import Counter

import pytest

from lockkit.testing.timing import PATIENCE
from lockkit_tools.simulation import simulate
from tests.simulation import night
from tests.simulation.night import KINDS, Faults, Kind, Result, play, report, run
from tests.simulation.support import Stage, apart

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def _odd(seed: int) -> str:
    if seed == 13:
        raise RuntimeError("stuck")
    return "two holders" if seed % 2 else ""


def _stage(seed: int) -> str:
    stage = Stage(seed)
    alice = stage.process("alice")
    alice.pause()
    alice.pause()
    stage.node.stop(lose_data=True)
    stage.network.cut(alice, stage.node, answers=False)
    stage.end()
    return ""


ODD = Kind("lock", 0.75, _odd, "breaks at odd seeds")
STAGE = Kind("set", 0.25, _stage, "a few faults")


def test_violations_and_shares() -> None:
    """Each kind runs its share from the first seed on; what it raises is a violation, with the command to repeat it."""
    result = run(80, first=10, workers=1, kinds=[ODD, STAGE])
    text = "\n".join(report(result, 100, 1.0))

    assert result.counts == {"lock": 60, "set": 20}
    assert sorted(seed for _, seed, _ in result.violations) == list(range(11, 70, 2))
    assert "lock, seed 13: RuntimeError: stuck\n    nox -s simulate-night -- --kind=lock --seed=13" in text
    assert "60 lock, 30 violated" in text
    assert "Ended early: 100 were to be run." in text


def test_faults_are_counted_once_where_they_happen() -> None:
    """Not the pause of what is paused, nor the end of the world."""
    result = play(STAGE, range(10))

    expected = {"client paused": 10, "server stopped, data lost": 10, "network cut for requests": 10}
    assert result.faults == result.suffered == Counter(expected)


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
        play(KINDS["lock"], seeds)
        return len(gc.get_objects())

    before = objects_after(range(5))

    assert objects_after(range(5, 35)) < before + 2000


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


def test_every_kind_is_valid_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A short night, as the command line runs it."""
    status = night.main(["--count=16", "--workers=1"])

    text = capsys.readouterr().out
    assert status == 0, text
    assert all(f" {name}, 0 violated: " in text for name in KINDS)
    assert text.rstrip().endswith("Every schedule kept every promise.")


def test_shares_are_of_all() -> None:
    """So that the mean time of a schedule, and with it the time of a night, is what was measured."""
    assert sum(kind.share for kind in KINDS.values()) == pytest.approx(1)


def test_one_schedule_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """And shown."""
    assert night.main(["--kind=lock", "--seed=5"]) == 0
    out = capsys.readouterr().out
    assert "Schedule(seed=5" in out
    assert "lock, seed 5: every promise was kept" in out


@pytest.mark.parametrize("wrong", [["--count=0"], ["--seed=1"], ["--kind=nope"], ["--workers=0"]])
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused before anything runs."""
    with pytest.raises(SystemExit) as ended:
        night.main(wrong)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_a_report() -> None:
    """Of what was run until then."""
    command = [sys.executable, "-m", night.__name__, "--count=1000000", "--workers=1", "--kind=lock"]
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
    assert "Ended early: 10 were to be run." in list(report(Result(), 10, 0.1))
