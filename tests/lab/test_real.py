"""What is measured on real processes and a real Redis comes to the same verdict as what is simulated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockkit.errors import ConfigurationError
from lockkit.lab import Run, load, run, story, terminal
from lockkit.lab import real as real_play
from lockkit.lab.real import TTL, beside, measure
from lockkit.testing.servers import ServerMissing, require

SCENES = (("gc-pause", True), ("client-death", False), ("restart-without-data", False))


def played(scene: tuple[str, bool]) -> Run:
    """Play one, simulated and for real."""
    name, fenced = scene
    return beside(run(load(name, ttl=TTL), backend="redis", fenced=fenced))


@pytest.mark.timeout(300)
def test_measured_verdicts_are_the_simulated_ones() -> None:
    """A pause by SIGSTOP, a death by SIGKILL, a restart of the server; all three at the same time."""
    require("redis", local=True)

    with ThreadPoolExecutor(len(SCENES)) as pool:
        runs = list(pool.map(played, SCENES))

    for done, expected in zip(runs, ("contained", "kept", "broken"), strict=True):
        simulated, measured = done.results
        assert (simulated.measured, measured.measured) == (False, True)
        assert (simulated.verdict.word, measured.verdict.word) == (expected, expected)
        states = [{one.name: one.state for one in result.verdict.promises} for result in done.results]
        # After a restart, a busy machine decides whether A learns of its loss before B has the lock or after.
        assert states[0] == states[1] or expected == "broken"
        assert "measured: lockkit in real processes" in terminal.draw(done)
    pause = runs[0].results[1]
    assert "A's write with token 1 is REFUSED: storage has seen token 2." in [mark.text for mark in story(pause)]
    assert {span.kind for span in pause.record.spans} >= {"holds", "believes", "paused", "kept", "waits"}


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        ("gc-pause", "redlock", "plays scenes on redis only"),
        ("late-message", "redis", "cannot play 'write' with delay"),
        ("partition", "redis", "cannot play 'cut'"),
        ("clock-jump", "redis", "cannot play 'clock'"),
        ("election", "redis", "cannot play 'lead'"),
    ],
)
def test_what_cannot_be_done_to_real_processes_is_refused(name: str, backend: str, message: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigurationError, match=message):
        beside(run(load(name), backend=backend))


def test_machine_without_redis_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene is right; the machine lacks the server."""

    def missing() -> None:
        message = "redis-server is not installed\nand more"
        raise ServerMissing(message)

    monkeypatch.setattr(real_play, "RedisServer", missing)

    with pytest.raises(ConfigurationError, match=r"--real needs a redis-server on this machine: .* not installed$"):
        measure(load("gc-pause").scenes[0])
