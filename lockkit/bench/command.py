"""``lockkit bench``."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import lockkit
from lockkit.bench import catalog
from lockkit.bench.machine import machine
from lockkit.bench.report import Report
from lockkit.bench.run import Run
from lockkit.bench.server import watch
from lockkit.bench.settings import QUICK, Settings
from lockkit.bench.table import render
from lockkit.bench.workloads import WORKLOADS
from lockkit.cli.output import reporting
from lockkit.url import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.bench.run import Cell, Outcome
    from lockkit.bench.subject import Face, Subject

__all__ = ["bench", "register"]

EXIT_BROKEN = 1
"""lockkit itself broke exclusion, or failed."""

EXIT_INTERRUPTED = 130

FACES: tuple[Face, ...] = ("blocking", "asyncio")

EMBEDDED = ("memory://", "file:")


class FaceChoice(StrEnum):
    """Values of ``--face``."""

    BLOCKING = "blocking"
    ASYNCIO = "asyncio"
    BOTH = "both"


WorkloadChoice = StrEnum("WorkloadChoice", {name.upper(): name for name in WORKLOADS})  # type: ignore[misc]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("bench")(bench)


def bench(  # the signature is the command line
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Backends of lockkit. Default: the two that need no server."),
    ] = None,
    *,
    workload: Annotated[
        list[WorkloadChoice] | None, typer.Option(help="Only this one; may be given several times.")
    ] = None,
    face: Annotated[FaceChoice, typer.Option(help="Blocking, asyncio, or both.")] = FaceChoice.BOTH,
    peers: Annotated[bool, typer.Option(help="Measure other libraries and hand-written floors too.")] = True,
    quick: Annotated[bool, typer.Option(help="A first look: short turns, few rounds, more noise.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often every subject takes its turn.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Length of a turn in pair and contention.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Contenders.")] = None,
    waiters: Annotated[int | None, typer.Option(min=1, help="Idle waiters.")] = None,
    leases: Annotated[int | None, typer.Option(min=1, help="Held leases.")] = None,
    lease_ttl: Annotated[
        float | None, typer.Option(min=0.1, help="Their ttl, seconds, and how long they are held.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the subjects.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole report as JSON.")] = False,
) -> None:
    """
    Measure locks side by side: lockkit on your URLs, other libraries in the same place, and hand-written floors.

    Every subject runs in processes of its own; all take turns in random order, round after round, and ratios are taken
    within a round. A witness outside the backends looks for two holders at once. Ctrl-C shows what there is.

    Exit status: 0; 1 if lockkit broke exclusion or failed; 78 for a wrong URL; 130 after Ctrl-C.
    """
    given: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "processes": processes, "waiters": waiters}
    given |= {"leases": leases, "lease_ttl": lease_ttl}
    settings = replace(
        QUICK if quick else Settings(), **{name: value for name, value in given.items() if value is not None}
    )
    names = [choice.value for choice in workload] if workload else list(WORKLOADS)
    faces: tuple[Face, ...] = tuple(kind for kind in FACES if face in {FaceChoice.BOTH, kind})
    seed = secrets.randbelow(2**31) if seed is None else seed
    urls = urls or list(EMBEDDED)
    with reporting(), ExitStack() as stack:
        scratch = {
            url: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockkit-bench-", dir=directory)))
            for url in urls
            if (directory := catalog.lock_directory(url)) is not None
        }
        subjects = catalog.subjects(urls, faces=faces, scratch=scratch, peers=peers)
        if "import" in names:
            subjects += catalog.imports()
        about = _about(subjects, seed)
        outcome = _measure(Run(subjects, [WORKLOADS[name] for name in names], settings, seed=seed))
    report = Report(outcome, about)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        _print(report)
    raise typer.Exit(_status(outcome))


def _measure(run: Run) -> Outcome:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=run.turns)

        def show(cell: Cell, over: int) -> None:
            bar.update(task, completed=over, description=f"{cell.workload.name}: {cell.subject.label}")

        return run.go(show)


def _status(outcome: Outcome) -> int:
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    ours = [cell for cell in outcome.cells if cell.subject.role == "lockkit"]
    return EXIT_BROKEN if any(cell.status in {"broken", "failed"} for cell in ours) else 0


def _about(subjects: Sequence[Subject], seed: int) -> dict[str, Any]:
    versions = {subject.label: subject.version for subject in subjects if subject.version}
    return {
        "command": _command(seed),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {**versions, "lockkit": lockkit.__version__},
        "servers": {subject.group: _server(subject) for subject in subjects if subject.role == "lockkit"},
    }


def _server(subject: Subject) -> Mapping[str, str]:
    try:
        with watch(subject.url) as observer:
            return observer.about()
    except (OSError, RuntimeError) as error:
        # Each subject will fail on it, and is reported.
        return {"error": str(error)}


def _command(seed: int) -> str:
    """Give the command line that repeats this run, without passwords."""
    words = ["lockkit", *(_shown(word) for word in sys.argv[1:])]
    if not any(word.startswith("--seed") for word in words):
        words += ["--seed", str(seed)]
    return shlex.join(words)


def _shown(word: str) -> str:
    try:
        return parse(word).redacted() if ":" in word else word
    except lockkit.ConfigurationError:
        return word


def _print(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # a file or pipe: rather wide than broken
    console.print(render(report))
    about = report.about["machine"]
    console.print(
        f"{about['processor']}, {about['cores']} cores, {about['system']}, {about['python']}, "
        f"load before {about['load_before']:.1f}. Repeat: {report.about['command']}",
        style="dim",
        markup=False,
        highlight=False,
    )
