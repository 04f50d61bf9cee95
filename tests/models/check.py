"""
Checks the models of the algorithms (`models/*.pml`) with Spin: every schedule within their bounds, and every mutant.

The header of a model says what there is to check::

    @promise NAME TEXT                  what must always hold; `progress` is the absence of a deadlock
    @run NAME FLAGS                     bounds, checked exhaustively
    @mutant DEFINE RUN PROMISE TEXT     a mistake, which must break that promise
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "models"

DEPTH_MAX = 100_000
"""Longest schedule, steps. One that is longer fails the check: the search would not be exhaustive."""

MEGABYTES_MAX = 1500
"""For the states of one search; more fails the check."""

PROGRESS = "progress"

_VIOLATED = re.compile(r"pan:\d+: (?:assertion violated (\w+)|(invalid end state))")
_STEP = re.compile(r"\s*(\d+):\s+proc\s+(\d+) \((\w+):\d+\) \S*?([\w.]+):(\d+) \(state \d+\)\s+\[(.*)\]")
_VALUE = re.compile(r"\t\t(?:\w+\((\d+)\):)?(\w+)(?:\[(\d+)\])? = (\w+)")
_FAILED = re.compile(r"text of failed assertion: assert\((\w+)\)")
_STUCK = re.compile(r"proc\s+(\d+) \(\w+:\d+\) \S+ \(state \d+\)$", re.MULTILINE)


class SpinFailed(Exception):
    """A model could not be searched, or not as a whole."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: the macro that makes it, in which run it is looked for, and the promise that it breaks."""

    define: str
    run: str
    promise: str
    text: str


class Values(dict[str, Any]):
    """What variables of a model have as values; any other name, of an `mtype`, is its own value."""

    def __missing__(self, name: str) -> str:
        return name

    def after(self, said: str) -> Values:
        """These, with those that Spin has reported since."""
        new = Values({name: dict(value) if isinstance(value, dict) else value for name, value in self.items()})
        for process, name, index, text in _VALUE.findall(said):
            value = int(text) if text.isdigit() else text
            if process or index:
                new.setdefault(name, {})[int(process or index)] = value
            else:
                new[name] = value
        return new


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found: a broken promise ("" if none), how much it saw, and the schedule that breaks it."""

    broken: str
    states: int
    depth: int
    seconds: float
    written: str = ""  # the schedule, as Spin writes it
    trail: tuple[Step, ...] = ()
    start: Values = field(default_factory=Values)  # before the first step
    stuck: frozenset[int] = frozenset()  # processes that have not ended


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule: which process took it, the file and line of each statement, and the text of the first."""

    process: str
    number: int  # of the process
    places: tuple[tuple[str, int], ...]
    action: str
    values: Values  # after it, locals of processes as arrays


@dataclass(frozen=True)
class Model:
    """A model, by its file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def title(self) -> str:
        """The first sentence of the header."""
        return re.search(r"/\*\n \* (.*?)\.(?:\n| )", self.text, re.DOTALL)[1].replace("\n * ", " ")  # type: ignore[index]

    @property
    def promises(self) -> dict[str, str]:
        return dict(re.findall(r"^ \* @promise (\w+) +(.+)$", self.text, re.MULTILINE))

    @property
    def runs(self) -> dict[str, Sequence[str]]:
        found = re.findall(r"^ \* @run (\w+) +(.+)$", self.text, re.MULTILINE)
        return {name: flags.split() for name, flags in found}

    @property
    def mutants(self) -> list[Mutant]:
        found = re.findall(r"^ \* @mutant (\S+) +(\w+) +(\w+) +(.+)$", self.text, re.MULTILINE)
        return [Mutant(*fields) for fields in found]

    def search(self, run: str, mutant: Mutant | None = None) -> Search:
        """Search all schedules of a run, up to the first that breaks a promise; of a mutant, its promise."""
        checked, flags = self._checked(run, mutant)
        with tempfile.TemporaryDirectory(prefix="lockkit-model-") as folder:
            call(folder, spin(), "-a", *flags, str(self.path))
            # A mutant breaks early, and breadth first by its shortest schedule. Optimizing takes longer than it saves.
            how = () if mutant is None else ("-DBFS",)
            call(folder, "gcc", *how, "-O0", "-w", "-DSAFETY", f"-DMEMLIM={MEGABYTES_MAX}", "-o", "pan", "pan.c")
            said = call(folder, "./pan", f"-m{DEPTH_MAX}", "-w20", *([] if PROGRESS in checked else ["-E"]))
            found = _VIOLATED.search(said)
            broken = "" if found is None else found[1] or PROGRESS
            numbers = [re.search(pattern, said) for pattern in (r"(\d+) states, stored", r"depth reached (\d+)")]
            elapsed = re.search(r"elapsed time ([\d.]+)", said)
            if any(number is None for number in (*numbers, elapsed)):
                raise SpinFailed(f"{self.name}, run {run}: {said}")
            if not broken and (
                "Search not completed" in said or "search depth too small" in said or "errors: 0" not in said
            ):
                raise SpinFailed(f"{self.name}, run {run}: not every schedule was searched:\n{said}")
            states, depth = (int(number[1]) for number in numbers if number is not None)
            search = Search(broken, states, depth, float(elapsed[1]) if elapsed else 0.0)
            return self._follow(search, folder, flags) if broken else search

    def follow(self, mutant: Mutant, written: str) -> Search | None:
        """Take the steps of a known schedule of a mutant, without a search; None if it does not break the promise."""
        if not written:
            return None
        _, flags = self._checked(mutant.run, mutant)
        with tempfile.TemporaryDirectory(prefix="lockkit-model-") as folder:
            Path(folder, "known.trail").write_text(written.replace(" ", "\n") + "\n")
            found = self._follow(Search("", 0, 0, 0.0), folder, flags)
        return found if found.broken == mutant.promise else None

    def _checked(self, run: str, mutant: Mutant | None) -> tuple[Iterable[str], list[str]]:
        """Return the promises that are checked, and Spin's options."""
        checked = self.promises if mutant is None else {mutant.promise}
        made = [] if mutant is None else [f"-D{mutant.define}"]
        return checked, [*self.runs[run], *(f"-Dcheck_{name}={int(name in checked)}" for name in self.promises), *made]

    def _follow(self, search: Search, folder: str, flags: Sequence[str]) -> Search:
        """Let Spin take the steps that broke a promise; and, for the values at the start, a first step of any."""
        (trail,) = Path(folder).glob("*.trail")
        told = ("-p", "-g", "-l", *flags, str(self.path))
        start = call(folder, spin(), "-u1", "-n1", *told).rpartition("#processes")[2]
        steps, _, end = call(folder, spin(), "-k", trail.name, *told).rpartition("#processes")
        values = Values().after(start)
        # Spin says so of each step that the process cannot take.
        failed = None if "transition failed" in steps else _FAILED.search(steps)
        return replace(
            search, broken=search.broken or (failed[1] if failed else ""), written=" ".join(trail.read_text().split()),
            start=values, trail=tuple(self._steps(steps, values)), stuck=frozenset(map(int, _STUCK.findall(end))),
        )  # fmt: skip

    def _steps(self, said: str, values: Values) -> Iterator[Step]:
        """Read the schedule that broke a promise, one step of a process each."""
        sources = {path.name: path.read_text().splitlines() for path in (self.path, self.path.parent / "common.h")}
        found = [*_STEP.finditer(said)]
        starts = [one.start() for one in found[1:]] + [len(said)]
        for _, group in groupby(zip(found, starts, strict=True), lambda one: one[0][1]):
            places = []
            for step, end in group:
                values = values.after(said[step.start() : end])
                file, line = step[4], int(step[5])
                # Spin also reports where an `if` ends, which is nothing that happens.
                if sources[file][line - 1].strip(" \t:{}") and not step[6].startswith(".("):
                    places.append((file, line))
            if places:
                action = sources[places[0][0]][places[0][1] - 1].strip(" \t:")
                yield Step(step[3], int(step[2]), tuple(dict.fromkeys(places)), action, values)


def models() -> list[Model]:
    """Every model."""
    return [Model(path) for path in sorted(MODELS.glob("*.pml"))]


def spin() -> str:
    """Find Spin."""
    found = shutil.which("spin")
    if found is None:
        raise SpinFailed("Spin is not on this machine: install Debian's package spin, or https://spinroot.com")
    return found


def call(folder: str, *command: str) -> str:
    """Run a command in a folder; return what it says."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise SpinFailed(f"{' '.join(command)}: status {done.returncode}\n{said}")
    return said
