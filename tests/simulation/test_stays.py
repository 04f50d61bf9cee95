"""The history of a simulation as others read it: linearizable, unless server or client is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit_tools.history import MODELS, check, read, write
from lockkit_tools.simulation import LockServer, Simulation, draw
from lockkit_tools.simulation.history import History
from lockkit_tools.simulation.stays import stays
from tests.simulation import night
from tests.simulation.support import apart, known_first
from tests.simulation.test_mutants import EndsEarly, ReleasesAnybodys, TokenIsACounter

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def words(path: Path, history: History) -> set[str]:
    """Write and check it, lock by lock."""
    write(path, stays(history))
    return {check(calls, MODELS["fenced-mutex"]).word for calls in read(path.read_text()).values()}


def test_schedules_are_linearizable(tmp_path: Path) -> None:
    """With all faults: paused and killed clients, lost data, locks broken by force. None is without calls."""
    for seed in apart(range(60)):
        assert words(tmp_path / "h.edn", Simulation(draw(seed)).run().history) == {"valid"}, f"seed {seed}"


@pytest.mark.parametrize(("server", "known"), [(EndsEarly, 22), (ReleasesAnybodys, 2), (TokenIsACounter, 95)])
def test_broken_server_is_not(tmp_path: Path, server: type[LockServer], known: int) -> None:
    """A second holder, or a token that goes back, as another checker sees it."""
    for seed in apart(known_first(known, range(600))):
        if "invalid" in words(tmp_path / "h.edn", Simulation(draw(seed), server=server).run().history):
            return

    pytest.fail("not found within 600 seeds")


def test_night_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the schedule that it repeats."""
    path = tmp_path / "h.json"

    assert night.main(["--kind=lock", "--seed=3", f"--history={path}"]) == 0
    assert "every promise was kept" in capsys.readouterr().out
    assert read(path.read_text())
    for options in (["--seed=3"], ["--kind=once", "--seed=3"], ["--kind=lock"]):
        with pytest.raises(SystemExit, match="2"):
            night.main([*options, f"--history={path}"])
