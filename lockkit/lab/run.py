"""Runs scenarios, and gives what they came to as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockkit.errors import ConfigurationError
from lockkit.lab.scenario import TTL_MAX, TTL_MIN, Scenario, Scene, read_scenario
from lockkit.lab.services import parts_of
from lockkit.lab.stage import play
from lockkit.lab.verdict import Verdict, judge

if TYPE_CHECKING:
    from lockkit.lab.record import Mark, Record
    from lockkit.units import Seconds

__all__ = ["Result", "Run", "as_data", "load", "run", "scenario_names", "story"]

ORDER = (
    "gc-pause", "late-message", "client-death", "partition", "restart-without-data", "clock-jump", "failover",
    "naive-setnx", "redlock-debate", "hand-off", "two-rounds", "election",
)  # fmt: skip
"""The scenarios, in the order in which a newcomer would look at them."""


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

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the one that the file expects."""
        return self.scene.expect in {None, self.verdict.word}


@dataclass(frozen=True, slots=True)
class Run:
    """All scenes of a scenario."""

    scenario: Scenario
    results: tuple[Result, ...]


def scenario_names() -> tuple[str, ...]:
    """Name the scenarios that come with lockkit."""
    return ORDER


def load(name: str, *, ttl: Seconds | None = None) -> Scenario:
    """
    Load a scenario that comes with lockkit, or a TOML file.

    Args:
        name: Its name, or the path of the file, which ends with ``.toml``.
        ttl: In place of the ttl of each scene, seconds.

    Raises:
        ConfigurationError: There is none, or something in it is wrong.
    """
    if ttl is not None and not TTL_MIN <= ttl <= TTL_MAX:
        message = f"ttl must be {TTL_MIN:g} to {TTL_MAX:g} seconds, not {ttl:g}"
        raise ConfigurationError(message)
    if name in ORDER:
        return read_scenario(source(name), name, ttl=ttl)
    if not name.endswith(".toml"):
        message = f"there is no scenario {name!r}; there are {', '.join(ORDER)}. A file's name ends with .toml"
        raise ConfigurationError(message)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        message = f"cannot read {name}: {error}"
        raise ConfigurationError(message) from error
    return read_scenario(text, Path(name).name, ttl=ttl)


def source(name: str) -> str:
    """Give the TOML of a scenario that comes with lockkit."""
    return files("lockkit.lab").joinpath("scenarios", f"{name}.toml").read_text(encoding="utf-8")


def run(scenario: Scenario, *, backend: str | None = None, fenced: bool | None = None, seed: int | None = None) -> Run:
    """
    Run a scenario.

    Args:
        scenario: Which; see `load`.
        backend: Only the scenes that can run there; None: all, each on its first.
        fenced: Storage compares tokens; None: as each scene says.
        seed: Draws latencies; None: as the scenario says.

    Raises:
        ConfigurationError: The backend does not fit, or a scene is too long.
    """
    if backend is not None:
        scenario = scenario.on(backend)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    if fenced is not None:
        scenario = replace(scenario, scenes=tuple(replace(scene, fenced=fenced) for scene in scenario.scenes))
    results = []
    for scene in scenario.scenes:
        record = play(scene, scenario.seed)
        results.append(Result(scene, record, judge(scene, record)))
    return Run(scenario, tuple(results))


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
        "seed": run.scenario.seed,
        "scenes": [_scene_data(result) for result in run.results],
    }


def _scene_data(result: Result) -> dict[str, Any]:
    scene, record, verdict = result.scene, result.record, result.verdict
    return {
        "title": scene.title,
        "about": scene.about,
        "backend": str(scene.backends[0]),
        "parts": result.parts,
        "ttl": scene.ttl,
        "fenced": scene.fenced,
        "verdict": verdict.word,
        "headline": verdict.headline,
        "expected": scene.expect,
        "promises": [
            {"name": one.name, "text": one.text, "state": one.state, "why": one.why} for one in verdict.promises
        ],
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
    return None if seconds == float("inf") else round(seconds, 6)
