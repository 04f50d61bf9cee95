"""
The runs that the pages of docs/comparison are made of: where they are kept, and what is kept of them.

``nox -s comparison -- FILE`` takes a run of ``lockkit bench --json`` over, without what follows from the rest and
without what belongs to one machine. The tests themselves write the one of the conformance suite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

from lockkit_tools.bench.report import Report
from tests.conventions.sources import ROOT

RUNS = ROOT / "docs" / "comparison" / "runs"
BENCH = RUNS / "bench.json"
PRIMITIVES = RUNS / "primitives.json"
SCALE = RUNS / "scale.json"
IDLE = RUNS / "idle.json"
CONFORMANCE = RUNS / "conformance.json"

SCRATCH = re.compile(r"(?:/[\w.+-]+)+?/lockkit-bench-\w+")
"""A directory of throw-away servers and lock files."""

ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|localhost):\d+")
"""A server on a port that was free."""

FIGURES = 5
"""So many figures of a number say more than repeats."""


@cache
def bench(path: Path = BENCH) -> Report:
    """A committed run of the benchmark."""
    return Report.from_json(json.loads(path.read_text()))


@cache
def measured() -> Report:
    """All parts of the committed run: workloads that a later part has are taken from there."""
    parts = [bench(path) for path in (PRIMITIVES, SCALE, IDLE)]
    report, later = copy(bench()), {section.workload.name: section for part in parts for section in part.sections}
    report.sections = [later.pop(section.workload.name, section) for section in report.sections]
    report.sections += later.values()
    return report


def kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: all that `Report.from_json` reads."""
    data: dict[str, Any] = json.loads(neutral(json.dumps(raw)))
    data["workloads"] = [
        {
            "name": section["name"],
            "results": [
                {key: result[key] for key in ("subject", "status", "reason", "notes")} for result in section["results"]
            ],
            "rounds": [
                {key: value for key, value in entry.items() if value and key != "details"}
                | {"round": entry["round"], "figures": {key: short(value) for key, value in entry["figures"].items()}}
                for entry in section["rounds"]
            ],
        }
        for section in data["workloads"]
    ]
    return data


def neutral(text: str) -> str:
    """The same without directories and ports, which are others in every run."""
    return ADDRESS.sub("localhost", SCRATCH.sub("/scratch", text))


def short(value: float) -> float:
    """As many figures as count."""
    return value if isinstance(value, int) else float(f"{value:.{FIGURES}g}")


def dump(data: Mapping[str, Any]) -> str:
    """JSON whose changes can be read: a line for each entry of a list, however deep the list is."""
    return _lines(data, 0) + "\n"


def _lines(value: Any, depth: int) -> str:  # noqa: ANN401 - JSON
    flat = json.dumps(value, ensure_ascii=False)
    if depth > 3 or not isinstance(value, dict | list) or len(flat) < 100:
        return flat
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_lines(part, depth + 1)}" for key, part in value.items()]
        return "{" + inner + f",{inner}".join(parts) + outer + "}"
    return "[" + inner + f",{inner}".join(_lines(part, depth + 1) for part in value) + outer + "]"
