"""``nox -s simulate-night``: its plan, what it counts, and what it says."""

from __future__ import annotations

import pytest

from tests.simulation import night
from tests.simulation.night import KINDS, Kind, report, run

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def _odd(seed: int) -> str:
    if seed == 13:
        raise RuntimeError("stuck")
    return "two holders" if seed % 2 else ""


def _good(_: int) -> str:
    return ""


ODD = Kind("lock", 0.75, _odd, "breaks at odd seeds")
GOOD = Kind("set", 0.25, _good, "breaks nothing")


def test_violations_and_shares() -> None:
    """Each kind runs its share from the first seed on; what it raises is a violation, with the command to repeat it."""
    result = run(80, first=10, workers=1, kinds=[ODD, GOOD])
    text = "\n".join(report(result, 100, 1.0))

    assert result.counts == {"lock": 60, "set": 20}
    assert sorted(seed for _, seed, _ in result.violations) == list(range(11, 70, 2))
    assert "lock, seed 13: RuntimeError: stuck\n    nox -s simulate-night -- --kind=lock --seed=13" in text
    assert "60 lock, 30 violated" in text
    assert "Ended early: 100 were to be run." in text


def test_every_kind_is_valid_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A short night, as the command line runs it."""
    status = night.main(["--count=16", "--workers=1"])

    text = capsys.readouterr().out
    assert status == 0, text
    assert all(f" {name}, 0 violated: " in text for name in KINDS)
    assert text.rstrip().endswith("Every schedule kept every promise.")
