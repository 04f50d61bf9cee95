"""Writes docs/comparison/conformance.md from the committed report of the conformance suite."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.comparison.markdown import cell, code, table
from tests.comparison.runs import CONFORMANCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["PAGE", "text"]

PAGE = CONFORMANCE.parent.parent / "conformance.md"

OUTCOMES = ("passed", "not promised", "skipped", "failed")

HEAD = (
    "# Conformance\n\n"
    "<!-- Written by `nox -s comparison` from runs/conformance.json: verify again to change it. -->\n\n"
    "One suite tests all backends, on the sync and the async API; only cases that a backend's "
    "[capabilities](capabilities.md) rule out do not apply.\n"
    "`lockkit verify URL` runs it on your servers, and [Write a backend](../tutorials/write-a-backend.md) "
    "shows how to run it on your own backend.\n"
)


def text() -> str:
    """The whole page."""
    found = json.loads(CONFORMANCE.read_text())
    backends: Sequence[Mapping[str, Any]] = found["backends"]
    lines = [HEAD, f"Version {found['version']}, {found['date']}.", "", *_outcomes(backends)]
    for kind, reason in found["missing"].items():
        lines += ["", f"Not verified: {kind}, {code(cell(reason))}."]
    lines += ["", *_groups(backends), "", *_reasons(backends), *_failures(backends)]
    return "\n".join(lines) + "\n"


def _outcomes(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Case by case"
    yield ""
    rows = []
    for backend in backends:
        counts = sum((Counter(group) for group in backend["groups"].values()), Counter[str]())
        verdict = "conforms" if backend["conforms"] else "does not conform"
        numbers = [str(counts[outcome]) for outcome in OUTCOMES]
        rows.append([backend["backend"], verdict, *numbers, backend["server"] or "-"])
    yield from table(["backend", "verdict", *OUTCOMES, "server"], rows)


def _groups(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Results by topic"
    yield ""
    yield "Passed of applicable cases."
    yield ""
    groups = sorted({group for backend in backends for group in backend["groups"]})
    rows = []
    for backend in backends:
        counts = [Counter(backend["groups"].get(group, {})) for group in groups]
        shares = [f"{count['passed']}/{count.total() - count['not promised']}" for count in counts]
        rows.append([backend["backend"], *shares])
    yield from table(["backend", *(group.lower() for group in groups)], rows)


def _reasons(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## What is not promised"
    yield ""
    yield "Why cases do not apply, and how many."
    yield ""
    rows = [
        [backend["backend"], cell(reason), str(count)]
        for backend in backends
        for reason, count in backend["reasons"].items()
    ]
    yield from table(["backend", "because", "cases"], rows)


def _failures(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        [backend["backend"], code(case["name"]), case["face"], code(cell(case["reason"]))]
        for backend in backends
        for case in backend["failed"]
    ]
    if rows:
        yield ""
        yield "## What failed"
        yield ""
        yield from table(["backend", "case", "API", "seen"], rows)
