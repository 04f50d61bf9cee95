"""Runs scenarios, and gives what they came to as plain data."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockkit.errors import ConfigurationError
from lockkit_tools.lab.record import Mark, Record
from lockkit_tools.lab.scenario import TTL, Scenario, Scene
from lockkit_tools.lab.scenarios import SCENARIOS
from lockkit_tools.lab.services import parts_of
from lockkit_tools.lab.stage import play
from lockkit_tools.lab.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class Result:
    """A scene, what happened, and the verdict."""

    scene: Scene
    record: Record
    verdict: Verdict

    @property
    def parts(self) -> str:
        """Say which code in it is lockkit's own, and what is a model."""
        return parts_of(self.scene.backends[0].kind)


@dataclass(frozen=True, slots=True)
class Run:
    """All scenes of a scenario."""

    scenario: Scenario
    seed: int
    results: tuple[Result, ...]


def scenario_names() -> tuple[str, ...]:
    """Name the scenarios."""
    return tuple(SCENARIOS)


def load(name: str) -> Scenario:
    """Give a scenario."""
    if name not in SCENARIOS:
        raise ConfigurationError(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def run(scenario: Scenario, *, backend: str | None = None, fenced: bool | None = None, seed: int = 1) -> Run:
    """Run a scenario."""
    if backend is not None:
        scenario = scenario.on(backend)
    results = []
    for scene in scenario.scenes:
        played = scene if fenced is None else replace(scene, fenced=fenced)
        record = play(played, seed)
        results.append(Result(played, record, judge(played, record)))
    return Run(scenario, seed, tuple(results))


def story(result: Result) -> list[Mark]:
    """Give the lines of the story, with tokens numbered in their order: 1, 2, 3."""
    ranks = token_ranks(result.record)

    def named(found: re.Match[str]) -> str:
        return f"token {ranks[int(found[1])]}"

    marks = []
    for mark in result.record.marks:
        text = re.sub(r"\{token:(\d+)\}", named, mark.text)
        marks.append(replace(mark, text=text[0].upper() + text[1:]))
    return marks


def token_ranks(record: Record) -> dict[int, int]:
    """Number the tokens of a scene in their order, because the real ones are long."""
    tokens = {grant.token for grant in record.grants if grant.token is not None}
    return {token: rank for rank, token in enumerate(sorted(tokens), 1)}


def as_data(run: Run) -> dict[str, Any]:
    """Give everything as plain data, for JSON. Times are seconds since the start of the scene."""
    return {
        "scenario": run.scenario.name,
        "title": run.scenario.title,
        "seed": run.seed,
        "scenes": [_scene_data(result) for result in run.results],
    }


def _scene_data(result: Result) -> dict[str, Any]:
    scene, record, verdict = result.scene, result.record, result.verdict
    return {
        "title": scene.title,
        "about": scene.about,
        "backend": str(scene.backends[0]),
        "parts": result.parts,
        "ttl": TTL,
        "fenced": scene.fenced,
        "verdict": verdict.word,
        "headline": verdict.headline,
        "promises": [asdict(promise) for promise in verdict.promises],
        "advice": list(verdict.advice),
        "end": _rounded(record.end),
        "lanes": [{"name": lane.name, "kind": lane.kind} for lane in record.lanes],
        "spans": [
            {
                "lane": span.lane, "kind": span.kind, "start": _rounded(span.start), "end": _rounded(span.end),
                "who": span.who, "token": span.token,
            }
            for span in record.spans
        ],
        "events": [
            {"at": _rounded(mark.at), "lane": mark.lane, "kind": mark.tone, "text": mark.text}
            for mark in story(result)
        ],
        "writes": [
            {
                "at": _rounded(write.at), "client": write.client, "token": write.token, "accepted": write.accepted,
                "replaced_newer": write.overwrote, "late": write.late,
            }
            for write in record.writes
        ],
        "grants": [
            {"client": grant.client, "token": grant.token, "start": _rounded(grant.start), "end": _rounded(grant.end)}
            for grant in record.grants
        ],
    }  # fmt: skip


def _rounded(seconds: float) -> float | None:
    """Give microseconds; None for never."""
    return None if seconds == float("inf") else round(float(seconds), 6)
