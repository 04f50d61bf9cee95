"""Which branches of the engine and the primitives a run takes: with coverage.py, if it is installed."""

from __future__ import annotations

import ast
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parents[1]
MEASURED = ("engine", "primitives")
"""Folders of lockkit: what decides. Backends of servers do not run in the simulation."""


@dataclass(frozen=True, slots=True)
class Arcs:
    """
    Steps from one line to the next that were taken.

    Attributes:
        taken: By file; negative numbers are the beginning and the end of a function.
    """

    taken: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def joined(self, other: Arcs) -> Arcs:
        """Give what either has."""
        nothing: frozenset[tuple[int, int]] = frozenset()
        files = {*self.taken, *other.taken}
        return Arcs({path: self.taken.get(path, nothing) | other.taken.get(path, nothing) for path in files})


class Uncovered(NamedTuple):
    """
    Something that no schedule has run.

    Attributes:
        file: Below the package.
        line: Where.
        function: In which function, as ``Class.name``.
        text: What: the branch, or that the function never runs.
    """

    file: str
    line: int
    function: str
    text: str


class Coverage(NamedTuple):
    """
    What was covered.

    Attributes:
        files: By file below the package: branches that were taken, and all.
        uncovered: What was not.
    """

    files: Mapping[str, tuple[int, int]]
    uncovered: tuple[Uncovered, ...]

    @property
    def taken(self) -> int:
        """How many branches were taken."""
        return sum(taken for taken, _ in self.files.values())

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(total for _, total in self.files.values())


def can_measure() -> bool:
    """Tell whether coverage.py is installed."""
    return find_spec("coverage") is not None


def _files() -> list[str]:
    return sorted(str(path) for folder in MEASURED for path in (ROOT / folder).glob("*.py"))


def _meter() -> Any:  # noqa: ANN401 - coverage.py is optional
    import coverage  # noqa: PLC0415

    return coverage.Coverage(branch=True, data_file=None, include=_files(), config_file=False, messages=False)


class BranchMeter:
    """Measures the branches that a ``with`` block takes; nothing without coverage.py."""

    def __init__(self) -> None:
        """Measure nothing yet."""
        self._coverage = _meter() if can_measure() else None

    def __enter__(self) -> Self:
        """Begin."""
        if self._coverage is not None:
            self._coverage.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        if self._coverage is not None:
            self._coverage.stop()

    @property
    def arcs(self) -> Arcs | None:
        """What was taken; None if it was not measured."""
        if self._coverage is None:
            return None
        data = self._coverage.get_data()
        return Arcs({path: frozenset(data.arcs(path) or ()) for path in data.measured_files()})


def cover(arcs: Arcs) -> Coverage:
    """Compare the branches that were taken with those that there are."""
    meter = _meter()
    data = meter.get_data()
    data.add_arcs({path: taken for path, taken in arcs.taken.items() if taken})
    data.touch_files([path for path in _files() if path not in arcs.taken])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        meter.json_report(outfile=str(out))
        found: dict[str, Any] = json.loads(out.read_text())["files"]
    files, uncovered = {}, []
    for path, about in sorted(found.items()):
        name = str(Path(path).resolve().relative_to(ROOT.parent))
        source = Path(path).read_text()
        functions = _functions(source)
        # What is outside of functions has run before anything was measured.
        counts = [
            sum(bool(_function_at(start, functions)) for start, _ in about[f"{which}_branches"])
            for which in ("executed", "missing")
        ]
        files[name] = (counts[0], sum(counts))
        uncovered += _uncovered(name, source.splitlines(), functions, about)
    return Coverage(files, tuple(uncovered))


def _uncovered(name: str, lines: list[str], functions: list[_Function], about: dict[str, Any]) -> list[Uncovered]:
    """List functions that never run, and branches never taken and lines never run in those that do."""
    missing = set(about["missing_lines"])
    idle = {function: first for first, body, _, function in functions if body in missing}
    found = [Uncovered(name, first, function, "never runs") for function, first in idle.items()]
    reached = set()
    for start, end in about["missing_branches"]:
        function = _function_at(start, functions)
        if not function or function in idle or start in missing:
            continue
        reached.add(end)
        where = "the end of the function" if end < 0 else f"line {end}: {lines[end - 1].strip()}"
        found.append(Uncovered(name, start, function, f"{lines[start - 1].strip()}  never goes to {where}"))
    for line in sorted(missing - reached):
        function = _function_at(line, functions)
        # The first of several lines; what a missing branch leads to is listed as that.
        if function and function not in idle and line - 1 not in missing:
            found.append(Uncovered(name, line, function, f"{lines[line - 1].strip()}  never runs"))
    return sorted(found, key=lambda one: one.line)


_Function = tuple[int, int, int, str]


def _functions(source: str) -> list[_Function]:
    """Give of each function its first line, the first of its body after the docstring, the last, and its name."""
    found: list[_Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                body = child.body[1:] if ast.get_docstring(child) is not None and len(child.body) > 1 else child.body
                found.append((child.lineno, body[0].lineno, child.end_lineno or child.lineno, name))
                visit(child, f"{name}.")
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(ast.parse(source), "")
    return found


def _function_at(line: int, functions: list[_Function]) -> str:
    """Name the innermost function whose body has a line; empty if there is none."""
    around = [(first, name) for first, body, last, name in functions if body <= line <= last]
    return max(around)[1] if around else ""
