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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"

DEPTH_MAX = 100_000
"""Longest schedule, steps. One that is longer fails the check: the search would not be exhaustive."""

MEGABYTES_MAX = 1500
"""For the states of one search; more fails the check."""

PROGRESS = "progress"

_VIOLATED = re.compile(r"pan:\d+: (?:assertion violated (\w+)|(invalid end state))")
_STEP = re.compile(r"\s*(\d+):\s+proc\s+\d+ \((\w+):\d+\) \S*?([\w.]+):(\d+) \(state \d+\)\s+\[(.*)\]")


class SpinFailed(Exception):
    """A model could not be searched, or not as a whole."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: the macro that makes it, in which run it is looked for, and the promise that it breaks."""

    define: str
    run: str
    promise: str
    text: str


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found: a broken promise ("" if none), how much it saw, and its directory's trail as steps."""

    broken: str
    states: int
    depth: int
    seconds: float
    trail: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule: which process took it, the file and line of each statement, and the text of the first."""

    process: str
    places: tuple[tuple[str, int], ...]
    action: str


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
        checked = self.promises if mutant is None else {mutant.promise}
        flags = [*self.runs[run], *(f"-Dcheck_{name}={int(name in checked)}" for name in self.promises)]
        if mutant is not None:
            flags.append(f"-D{mutant.define}")
        with tempfile.TemporaryDirectory(prefix="lockkit-model-") as folder:
            call(folder, spin(), "-a", *flags, str(self.path))
            # A mutant breaks early: there, compiling takes longer than searching.
            optimise = "-O1" if mutant is None else "-O0"
            call(folder, "gcc", optimise, "-w", "-DSAFETY", f"-DMEMLIM={MEGABYTES_MAX}", "-o", "pan", "pan.c")
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
            trail = tuple(self._steps(folder, flags)) if broken else ()
            states, depth = (int(number[1]) for number in numbers if number is not None)
            return Search(broken, states, depth, float(elapsed[1]) if elapsed else 0.0, trail)

    def _steps(self, folder: str, flags: Sequence[str]) -> Iterator[Step]:
        """Read the schedule that broke a promise, one step of a process each; the lab could draw it."""
        (trail,) = Path(folder).glob("*.trail")
        said = call(folder, spin(), "-k", trail.name, "-p", *flags, str(self.path))
        sources = {path.name: path.read_text().splitlines() for path in (self.path, self.path.parent / "common.h")}
        number, process, places = "", "", list[tuple[str, int]]()
        for step in [*_STEP.finditer(said), None]:
            if places and (step is None or step[1] != number):
                file, line = places[0]
                yield Step(process, tuple(dict.fromkeys(places)), sources[file][line - 1].strip(" \t:"))
                places = []
            if step is not None:
                number, process = step[1], f"{step[2]} {step[0].split('proc')[1].split()[0]}"
                # Spin also reports where an `if` ends, which is nothing that happens.
                if sources[step[3]][int(step[4]) - 1].strip(" \t:{}") and not step[5].startswith(".("):
                    places.append((step[3], int(step[4])))


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
