"""What ``lockkit bench`` does with its options: servers, subjects, the run, and the report in the forms asked for."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import lockkit
from lockkit.runtime import drive
from lockkit.url import parse
from lockkit_tools.bench import catalog
from lockkit_tools.bench.adapters.base import load
from lockkit_tools.bench.machine import machine
from lockkit_tools.bench.reachable import require_answers
from lockkit_tools.bench.report import Report
from lockkit_tools.bench.run import Cell, Outcome, Run
from lockkit_tools.bench.server import watch
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Face, Subject
from lockkit_tools.bench.table import render
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers.temporary import TemporaryDirectory

EXIT_BROKEN = 1
"""lockkit itself broke exclusion, or failed."""

EXIT_INTERRUPTED = 130

EMBEDDED = ("memory://", "file:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """
    What the command line said.

    Attributes:
        urls: Backends; none: the embedded ones, and those of `servers`.
        servers: ``local`` or ``docker``: start throw-away servers too; ``none``.
        several: Those of several nodes too.
        quick: Of those, the ones for a first look.
        seed: Of the order; None: any.
        as_json: Print JSON instead of the table.
        html: Write a page to this file too, or None.
    """

    urls: Sequence[str]
    servers: str
    several: bool
    workloads: Sequence[str]
    faces: Sequence[Face]
    peers: bool
    quick: bool
    settings: Settings
    seed: int | None
    as_json: bool
    html: Path | None


def run(wanted: Wanted) -> int:
    """Measure and report; give the exit status."""
    seed = secrets.randbelow(2**31) if wanted.seed is None else wanted.seed
    with ExitStack() as stack:
        if wanted.servers != "none":
            # To start servers takes a minute: what is wrong with the URLs that were given is told before.
            require_answers(_servers(_plan(wanted, wanted.urls, {}, seed).outcome))
        urls, missing = _backends(wanted, stack)
        scratch = {
            url: stack.enter_context(TemporaryDirectory("bench", directory))
            for url in urls
            if (directory := catalog.lock_directory(url)) is not None
        }
        measuring = _plan(wanted, urls, scratch, seed)
        require_answers(_servers(measuring.outcome))
        load_before = os.getloadavg()[0]
        started = datetime.now(UTC)
        outcome = _measure(measuring)
        about = _about(outcome, missing, started)
        _erase(outcome, wanted.urls)
        about["machine"]["load_before"] = load_before
    report = Report(outcome, about)
    try:
        if wanted.as_json:
            print(json.dumps(report.to_json(), indent=2))
        else:
            _print(report)
    finally:
        # Also if stdout is gone, with the terminal or with a reader that has enough.
        if wanted.html is not None:
            _write_page(report, wanted.html)
    return _status(outcome)


def _plan(wanted: Wanted, urls: Sequence[str], scratch: Mapping[str, Path], seed: int) -> Run:
    """List what is to be measured on some URLs."""
    subjects = catalog.subjects(urls, faces=wanted.faces, scratch=scratch, peers=wanted.peers, quick=wanted.quick)
    kinds = {WORKLOADS[name].kind for name in wanted.workloads}
    # A library that has none of what is measured is not listed; lockkit is, with the reason.
    subjects = [one for one in subjects if one.role == "lockkit" or not kinds.isdisjoint(one.kinds)]
    if "import" in wanted.workloads:
        subjects += catalog.imports()
    return Run(subjects, [WORKLOADS[name] for name in wanted.workloads], wanted.settings, seed=seed)


def _write_page(report: Report, path: Path) -> None:
    # Here and not above: who wants no page need not load what draws it.
    from lockkit_tools.bench.page.page import page  # noqa: PLC0415

    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise lockkit.ConfigurationError(message) from error


def _servers(outcome: Outcome) -> list[str]:
    """Give the URLs of lockkit on which something is to be measured, and which lead to servers."""
    measured = [cell.subject for cell in outcome.cells if not cell.skipped]
    return [subject.url for subject in measured if subject.role == "lockkit" and subject.scope == "network"]


def _backends(wanted: Wanted, stack: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Give the URLs to measure on, and what could not be started."""
    if wanted.servers == "none":
        return list(wanted.urls or EMBEDDED), {}
    # Here and not above: it loads every kind of server.
    from lockkit_tools.bench.throwaway_servers import ThrowawayServers  # noqa: PLC0415

    console = Console(stderr=True)
    status = stack.enter_context(console.status("")) if console.is_terminal else None

    def tell(line: str) -> None:
        if status is not None:
            status.update(line)

    servers = ThrowawayServers(docker=wanted.servers == "docker", several=wanted.several, tell=tell)
    started = stack.enter_context(servers)
    if status is not None:
        status.stop()
    return [*wanted.urls, *started.urls], started.missing


def _measure(measuring: Run) -> Outcome:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    turns = measuring.turns_by_workload
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(name, total=total, start=False) for name, total in turns.items()}
        total = bars.add_task("", total=sum(turns.values()))

        def show(cell: Cell, over: int) -> None:
            bars.update(total, completed=over, description=f"all; now {cell.subject.label}")
            task = tasks[cell.workload.name]
            bars.start_task(task)
            bars.update(task, completed=measuring.over[cell.workload.name])

        return measuring.go(show)


def _status(outcome: Outcome) -> int:
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    ours = [cell for cell in outcome.cells if cell.subject.role == "lockkit"]
    return EXIT_BROKEN if any(cell.status in {"broken", "failed"} for cell in ours) else 0


def _about(outcome: Outcome, missing: Mapping[str, str], started: datetime) -> dict[str, Any]:
    """Describe the run; after it, when a SQLite file is there and etcd has flushed something."""
    subjects = dict.fromkeys(cell.subject for cell in outcome.cells)
    placed = [subject for subject in subjects if subject.url]  # an import has no place
    versions = {subject.label: subject.version for subject in placed if subject.version}
    servers = {subject.group: subject for subject in placed if subject.role == "lockkit"}
    return {
        "command": command(outcome.seed),
        "started": started.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {**versions, "lockkit": lockkit.__version__},
        "servers": {group: _server(subject) for group, subject in servers.items()},
        "not_started": dict(missing),
    }


def _erase(outcome: Outcome, urls: Sequence[str]) -> None:
    """Remove the tables and nodes that baselines and other libraries have made on the servers that were given."""
    used = (cell.subject for cell in outcome.cells if cell.turns and cell.subject.url in urls)
    for subject in {(one.target, one.url): one for one in used if one.role != "lockkit"}.values():
        adapter = load(subject.target)(subject.url, outcome.settings.ttl)
        if adapter.leaves_something:
            try:
                drive(adapter.open())
                try:
                    drive(adapter.erase())
                finally:
                    drive(adapter.close())
            except Exception as error:  # noqa: BLE001 - any driver's: it is told, and the report still printed
                print(f"{subject.label} left what it made at {subject.group}: {error}", file=sys.stderr)


def _server(subject: Subject) -> Mapping[str, str]:
    try:
        with watch(subject.url) as observer:
            return observer.about()
    except (OSError, RuntimeError) as error:
        # Each subject will fail on it, and is reported.
        return {"error": str(error)}


def command(seed: int) -> str:
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
    if not console.is_terminal and "COLUMNS" not in os.environ:
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
