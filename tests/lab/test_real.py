"""What is measured on real processes and real servers comes to the same verdict as what is simulated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from lockkit.errors import ConfigurationError
from lockkit.lab import Run, load, run, scenario_names, story, terminal
from lockkit.lab import real as real_play
from lockkit.lab.real import TTL, beside, measure
from lockkit.lab.real_services import steps_of, why_not
from lockkit.testing.servers import ServerMissing, require

if TYPE_CHECKING:
    from lockkit.lab import Scene

FENCED = {"gc-pause", "late-message", "failover"}
"""Scenarios whose scenes are played with a guard; the others without, or as they say."""

SCENES_AT_ONCE = 8
"""They wait most of the time. More at once takes less time, and makes each depend more on how busy the machine is."""


def scenes() -> dict[object, tuple[str, int]]:
    """Name each scene that can be played for real by its scenario and number; of equal ones, the first."""
    found: dict[object, tuple[str, int]] = {}
    for name in scenario_names():
        for number, scene in enumerate(load(name, ttl=TTL).scenes):
            if not why_not(scene):
                steps = tuple(replace(step, line=0) for step in steps_of(scene))
                found.setdefault((scene.backends[0].kind, steps, scene.fenced, scene.latency), (name, number))
    return found


def played(which: tuple[str, int]) -> Run:
    """Play one, simulated and for real."""
    name, number = which
    scenario = load(name, ttl=TTL)
    scenario = replace(scenario, scenes=(scenario.scenes[number],))
    return beside(run(scenario, fenced=True if name in FENCED else None))


@pytest.mark.timeout(400)
def test_measured_verdicts_are_the_simulated_ones() -> None:
    """Of each scene of each scenario that can be played for real."""
    require("redis", "etcd", local=True)
    todo = list(scenes().values())

    with ThreadPoolExecutor(SCENES_AT_ONCE) as pool:
        runs = dict(zip(todo, pool.map(played, todo), strict=True))

    assert {name for name, _ in todo} == {*scenario_names()} - {"clock-jump"}
    differ = {}
    for which, done in runs.items():
        simulated, measured = done.results
        assert (simulated.measured, measured.measured[:9]) == ("", "measured:")
        assert measured.measured in " ".join(terminal.draw(done).split())
        words = (simulated.verdict.word, measured.verdict.word)
        # Where the machine stands still for long, a client misses its cue, and breaks nothing: once more, alone.
        if words[0] != words[1] != "broken":
            simulated, measured = played(which).results
            words = (simulated.verdict.word, measured.verdict.word)
        if words[0] != words[1]:
            differ[which] = (words, [(round(mark.at, 2), mark.text) for mark in story(measured)])
    assert not differ
    assert sorted({runs[which].results[1].verdict.word for which in todo}) == ["broken", "contained", "kept"]
    pause = runs["gc-pause", 0].results[1]
    assert "A's write with token 1 is REFUSED: storage has seen token 2." in [mark.text for mark in story(pause)]
    assert {span.kind for span in pause.record.spans} >= {"holds", "believes", "paused", "kept", "waits"}
    assert "cut" in {span.kind for span in runs["partition", 0].results[1].record.spans}
    assert "stopping" in {span.kind for span in runs["election", 0].results[1].record.spans}
    failover = [mark.text for mark in story(runs["failover", 0].results[1])]
    assert "Replica is promoted to master." in failover


def scene_of(name: str, backend: str) -> Scene:
    """Give the first scene of a scenario that runs on a backend, there."""
    return load(name).on(backend).scenes[0]


@pytest.mark.parametrize("backend", ["redis", "redlock"])
def test_clock_of_a_server_is_not_set(backend: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigurationError, match=r"--real cannot play .* on .*: a server's clock is that of its"):
        beside(run(load("clock-jump"), backend=backend))


def test_what_cannot_be_done_to_a_kind_of_server_is_refused() -> None:
    """The message names the step."""
    scene = scene_of("failover", "redis+sentinel")
    paused = replace(scene, steps=(replace(scene.steps[0], action="stop"),))

    assert why_not(scene) == ""
    assert why_not(paused) == "'stop' cannot be done to a real redis+sentinel"
    with pytest.raises(ConfigurationError, match="'stop' cannot be done to a real redis"):
        measure(paused, run(load("failover"), backend="redis+sentinel").results[0].record)


def test_scene_that_cannot_be_played_stays_beside_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason where the code is named."""
    monkeypatch.setattr(real_play, "measure", lambda _scene, simulated: simulated)

    done = beside(run(load("redlock-debate", ttl=TTL)))

    alone = [result for result in done.results if result.unmeasured]
    assert [result.scene.title[:2] for result in alone] == ["5."]
    assert "simulated only: a server's clock is that of its" in " ".join(terminal.draw(done).split())
    pairs = [(one, other) for one, other in pairwise(done.results) if other.measured]
    assert len(pairs) == 6
    assert all(one.record is other.record for one, other in pairs)


def test_machine_without_the_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene is right; the machine lacks the server."""

    def missing(scene: Scene) -> None:
        del scene
        message = "redis-server is not installed\nand more"
        raise ServerMissing(message)

    monkeypatch.setattr(real_play, "open_real_service", missing)

    with pytest.raises(ConfigurationError, match=r"--real needs the servers of the scene .* not installed$"):
        beside(run(load("gc-pause")))
