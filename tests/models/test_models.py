"""Every schedule of a model keeps its promises, and each of its mutants breaks the one that it is there for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.models.__main__ import RESULTS, describe
from tests.models.check import PROGRESS, Model, Mutant, Search, SpinFailed, models
from tests.models.drawing import DRAWINGS, Trace, draw, path_of

MODELS = models()
RECORDED = json.loads(RESULTS.read_text())


def _mutants() -> list[object]:
    return [pytest.param(model, one, id=f"{model.name}-{one.define}") for model in MODELS for one in model.mutants]


def _runs() -> list[object]:
    return [pytest.param(model, run, id=f"{model.name}-{run}") for model in MODELS for run in model.runs]


@pytest.mark.parametrize(("model", "run"), _runs())
def test_every_schedule_keeps_every_promise(model: Model, run: str) -> None:
    """The search is exhaustive, and as large as the page on models says."""
    found = model.search(run)

    assert found.broken == "", [step.action for step in found.trail]
    assert found.states == RECORDED[model.name]["runs"][run]["states"], "nox -s models -- --record"


def harmful(model: Model, mutant: Mutant) -> Search:
    """Take the schedule that `nox -s models` has recorded; if there is none, or it does no harm any more, search."""
    schedules = {one["define"]: one.get("schedule", "") for one in RECORDED[model.name]["mutants"]}
    return model.follow(mutant, schedules.get(mutant.define, "")) or model.search(mutant.run, mutant)


@pytest.mark.parametrize(("model", "mutant"), _mutants())
def test_mutant_breaks_its_promise(model: Model, mutant: Mutant) -> None:
    """There is a schedule in which it does, the one that is drawn; `nox -s models` searches for the shortest."""
    found = harmful(model, mutant)

    assert found.broken == mutant.promise
    assert found.trail
    assert all(step.process and step.action for step in found.trail)
    assert path_of(model, mutant).read_text() == draw(model, mutant, found), f"nox -s models -- {model.name} --draw"


def test_schedule_that_does_no_harm_is_none() -> None:
    """Of the model without the mistake; and of steps that no process can take."""
    model, mutant = MODELS[0], MODELS[0].mutants[0]
    written = harmful(model, mutant).written

    assert model.follow(mutant, written) is not None
    assert model.follow(replace(mutant, define="NOTHING"), written) is None
    assert model.follow(mutant, " ".join([*written.split()[:3], *written.split()[-3:]])) is None


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_header_says_what_there_is(model: Model) -> None:
    """Each promise is checked, each mutant made in the text, and each promise broken by one of them."""
    checked = set(re.findall(r"\bpromise\((\w+), ", model.text))
    defines = {mutant.define.partition("=")[0] for mutant in model.mutants}

    assert set(model.promises) - {PROGRESS} == checked
    assert {mutant.promise for mutant in model.mutants} == set(model.promises)
    assert all(
        re.search(rf"#.*\b{define}\b", model.text + (model.path.parent / "common.h").read_text()) for define in defines
    )
    assert {mutant.run for mutant in model.mutants} <= set(model.runs)


def test_page_shows_the_models_as_they_are() -> None:
    """What was recorded is what the headers say."""
    recorded = json.loads(RESULTS.read_text())
    for model in recorded.values():
        model.pop("replay", None)
        for run in model["runs"].values():
            del run["states"], run["depth"], run["seconds"]
        for mutant in model["mutants"]:
            mutant.pop("schedule", None)

    assert recorded == {model.name: describe(model) for model in MODELS}


def test_search_that_is_not_exhaustive_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules that are longer than the search is deep are no success."""
    monkeypatch.setattr("tests.models.check.DEPTH_MAX", 20)

    with pytest.raises(SpinFailed, match="not every schedule"):
        MODELS[0].search(next(iter(MODELS[0].runs)))


@pytest.mark.parametrize("name", ["redis", "redlock", "sessions"])
def test_drawing_shows_those_who_hold_the_lock_when_the_promise_breaks(name: str) -> None:
    """They are the clients whose time is left in the last step that Spin took; the lock is kept for one at most."""
    model = next(model for model in MODELS if model.name == name)
    mutant = next(mutant for mutant in model.mutants if mutant.promise == "exclusion")
    found = harmful(model, mutant)
    believe = {client for client, left in found.trail[-1].values["left"].items() if left > 0}

    trace = Trace(model, mutant, found)

    (overlap,) = trace.record.overlaps
    assert {overlap.older, overlap.newer} == {trace.names[client] for client in believe}
    at_end = {
        span.lane: span.kind
        for span in trace.record.spans
        if span.end == trace.record.end and span.kind in {"holds", "believes"}
    }
    assert set(at_end) == {overlap.older, overlap.newer}
    assert "believes" in at_end.values()
    assert trace.record.marks[-1].tone == "bad"


def test_every_drawing_is_of_a_mutant() -> None:
    """None is left over."""
    drawn = {path_of(model, mutant) for model in MODELS for mutant in model.mutants}

    assert {*(DRAWINGS / "models").iterdir()} == drawn


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_page_of_the_algorithm_shows_a_drawing(model: Model) -> None:
    """With a text for those who do not see it."""
    shown = [
        name
        for page in DRAWINGS.parent.rglob("*.md")
        for text, name in re.findall(r"!\[([^\]]+)\]\([./]*drawings/models/([\w-]+\.svg)\)", page.read_text())
        if len(text) > 10
    ]

    assert {path_of(model, mutant).name for mutant in model.mutants} & {*shown}
