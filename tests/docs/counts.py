"""
A hook of mkdocs: counts of tests, taken when the site is built, so that no page has a number that gets stale.

``{tests: PATH PATH}`` in a page becomes the number of test functions and conformance cases in these files and folders,
``{conformance}`` what the last run of the conformance suite found, in words, and ``{conformance: counts}``,
``{conformance: reasons}`` and ``{conformance: failures}`` the same as tables; ``{models: runs}``,
``{models: mutants}`` and ``{models: replays}`` the tables of ``models/results.json``, which
``nox -s models -- --record`` writes; ``{soak: words}``, ``{soak: faults}`` and ``{soak: clients}`` what the last soak
found, as ``nox -s soak -- --record`` wrote it. CI runs the tests, which write what they found, before it builds the
site.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN = ROOT / "docs" / "comparison" / "runs" / "conformance.json"
RESULTS = re.compile(r"\{conformance(?:: (\w+))?\}")
MODELS = ROOT / "models" / "results.json"
SOAK = ROOT / "docs" / "comparison" / "runs" / "soak.json"
RECORDED = re.compile(r"\{(models|soak): (\w+)\}")
OUTCOMES = ("passed", "not promised", "skipped", "failed")
TESTS = re.compile(r"\{tests: ([^}]+)\}")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the source of each page."""
    return with_counts(markdown)


def with_counts(markdown: str) -> str:
    """Replace what stands for a number."""
    markdown = TESTS.sub(lambda found: f"{sum(map(count, found[1].split())):,}", markdown)
    files = {"models": MODELS, "soak": SOAK}
    markdown = RECORDED.sub(
        lambda found: RECORDED_PARTS[found[1], found[2]](json.loads(files[found[1]].read_text())), markdown
    )
    return RESULTS.sub(lambda found: PARTS[found[1] or "words"](json.loads(RUN.read_text())), markdown)


@cache
def count(path: str) -> int:
    """Number of test functions in a file or folder; a parametrised one counts once."""
    place = ROOT / path
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
    )


def words(found: Mapping[str, Any]) -> str:
    """The run in words."""
    passed, failed = (
        sum(row["counts"].get(outcome, 0) for row in found["backends"]) for outcome in ("passed", "failed")
    )
    return f"on {found['date']} {passed:,} passed and {failed:,} failed, on {len(found['backends'])} backends"


def counts(found: Mapping[str, Any]) -> str:
    """How many cases ended how, for each backend."""
    rows = [
        [row["backend"], *(str(row["counts"].get(outcome, 0)) for outcome in OUTCOMES)] for row in found["backends"]
    ]
    return table(["backend", *OUTCOMES], rows)


def reasons(found: Mapping[str, Any]) -> str:
    """Why cases do not apply, and how many."""
    rows = [[row["backend"], why, str(n)] for row in found["backends"] for why, n in row["reasons"].items()]
    return table(["backend", "because", "cases"], rows)


def failures(found: Mapping[str, Any]) -> str:
    """Each failure, or that there is none."""
    rows = [[row["backend"], f"`{case}`"] for row in found["backends"] for case in row["failed"]]
    return table(["backend", "case"], rows) if rows else "No case failed."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(
        f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in (head, ["---"] * len(head), *rows)
    )


def model_runs(found: Mapping[str, Any]) -> str:
    """What was searched: each run of each model."""
    return table(
        ["model", "of", "run", "bounds", "states", "longest schedule", "seconds"],
        [
            [
                f"`{name}`",
                model["title"],
                run,
                f"`{' '.join(searched['flags']).replace('-D', '')}`",
                f"{searched['states']:,}",
                f"{searched['depth']}",
                f"{searched['seconds']:.1f}",
            ]
            for name, model in found.items()
            for run, searched in model["runs"].items()
        ],
    )


def model_mutants(found: Mapping[str, Any]) -> str:
    """Each mistake, with the drawing of what it does, and the promise that it breaks."""
    return table(
        ["model", "mistake", "broken", "which says"],
        [
            [
                f"`{name}`",
                f"[{mutant['text']}](../drawings/{mutant['drawing']})",
                f"`{mutant['promise']}`",
                model["promises"][mutant["promise"]],
            ]
            for name, model in found.items()
            for mutant in model["mutants"]
        ],
    )


def model_replays(found: Mapping[str, Any]) -> str:
    """What the code did, replayed against each model."""
    return table(
        ["model", "schedules", "events", "seconds", "mistakes in the code that the model refuses"],
        [
            [
                f"`{name}`", f"{one['schedules']:,}", f"{one['events']:,}", f"{one['seconds']:.0f}",
                "; ".join(one["refused"]),
            ]
            for name, one in ((name, model.get("replay")) for name, model in found.items())
            if one is not None
        ],
    )  # fmt: skip


def soak_words(found: Mapping[str, Any]) -> str:
    """How long it ran, and what was odd."""
    odd = "".join(f"\n- {line}" for line in found["odd"])
    turns = sum(row["turns"] for row in found["rows"])
    took = f"{turns} turns in {found['hours']:.1f} hours on {found['cores']} cores"
    ran = f"The last soak ended on {found['date']}, after {took}."
    return f"{ran}\nWhat must not be, was:\n{odd}" if odd else f"{ran}\nNothing was found that must not be."


def soak_table(columns: Mapping[str, str], found: Mapping[str, Any]) -> str:
    """Some of its columns, by what they are called here."""
    return table(
        ["target", *columns.values()],
        [[f"`{row['target']}`", *(_number(row.get(column)) for column in columns)] for row in found["rows"]],
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"


DONE = ("turns", "grants", "kills", "freezes", "partitions", "cuts", "clock steps")
MUST_BE_ZERO = ("overlaps", "disorder", "stuck", "errors", "lost wake-ups", "left behind")
USED = {f"more {what}": what for what in ("MB", "descriptors", "threads")}
TIMES = ("hand-offs", "median ms", "p99 ms")
RECORDED_PARTS: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], str]] = {
    ("models", "runs"): model_runs,
    ("models", "mutants"): model_mutants,
    ("models", "replays"): model_replays,
    ("soak", "words"): soak_words,
    ("soak", "faults"): partial(soak_table, {name: name for name in (*DONE, *MUST_BE_ZERO)}),
    ("soak", "clients"): partial(soak_table, {**{name: name for name in TIMES}, **USED}),
}
PARTS = {"words": words, "counts": counts, "reasons": reasons, "failures": failures}
