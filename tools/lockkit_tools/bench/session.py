"""What ``lockkit bench`` does with its options: servers, subjects, the run, and the report in the forms asked for."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from lockkit_tools.bench.observers import watch
from lockkit_tools.bench.reachable import require_answers
from lockkit_tools.bench.report import Report
from lockkit_tools.bench.run import Outcome, Run
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Face, Subject
from lockkit_tools.bench.table import render
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers.temporary import TemporaryDirectory

EXIT_BROKEN = 1
"""lockkit itself broke exclusion, or failed."""

EXIT_INTERRUPTED = 130

EMBEDDED = ("memory://", "file:")


class Session:
    """
    What is measured, on whatever servers.

    Args:
        seed: Of the order of the subjects; None: any.
        quick: A first look: fewer subjects, and no servers of several nodes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        workloads: Sequence[str],
        faces: Sequence[Face],
        peers: bool,
        quick: bool,
        seed: int | None,
    ) -> None:
        self._settings, self._workloads = settings, [WORKLOADS[name] for name in workloads]
        self._faces, self._peers, self._quick = faces, peers, quick
        self._seed = secrets.randbelow(2**31) if seed is None else seed

    def run(self, urls: Sequence[str], servers: str, *, as_json: bool, html: Path | None) -> int:
        """Measure on some URLs, none: the embedded ones; and on servers to be started. Report; give the exit status."""
        with ExitStack() as stack:
            wanted, missing = list(urls or EMBEDDED), dict[str, str]()
            if servers != "none":
                # To start servers takes a minute: what is wrong with the URLs that were given is told before.
                require_answers(_servers(self._plan(urls, {})))
                started, missing = self._start_servers(stack, docker=servers == "docker")
                wanted = [*urls, *started]
            scratch = {
                url: stack.enter_context(TemporaryDirectory("bench", directory))
                for url in wanted
                if (directory := catalog.lock_directory(url)) is not None
            }
            measuring = self._plan(wanted, scratch)
            require_answers(_servers(measuring))
            load_before, began = os.getloadavg()[0], datetime.now(UTC)
            outcome = _measure(measuring)
            about = _about(outcome, missing, began)
            _erase(outcome, urls)
            about["machine"]["load_before"] = load_before
        report = Report(outcome, about)
        try:
            if as_json:
                print(json.dumps(report.to_json(), indent=2))
            else:
                _print(report)
        finally:
            # Also if stdout is gone, with the terminal or with a reader that has enough.
            if html is not None:
                _write_page(report, html)
        return _status(outcome)

    def _plan(self, urls: Sequence[str], scratch: Mapping[str, Path]) -> Run:
        """List what is to be measured on some URLs."""
        subjects = catalog.subjects(urls, faces=self._faces, scratch=scratch, peers=self._peers, quick=self._quick)
        kinds = {workload.kind for workload in self._workloads}
        # A library that has none of what is measured is not listed; lockkit is, with the reason.
        subjects = [one for one in subjects if one.role == "lockkit" or not kinds.isdisjoint(one.kinds)]
        if WORKLOADS["import"] in self._workloads:
            subjects += catalog.imports()
        return Run(subjects, self._workloads, self._settings, seed=self._seed)

    def _start_servers(self, stack: ExitStack, *, docker: bool) -> tuple[list[str], dict[str, str]]:
        """Give the URLs of servers that run until the end, and what could not be started."""
        # Here and not above: it loads every kind of server.
        from lockkit_tools.bench.throwaway_servers import ThrowawayServers  # noqa: PLC0415

        console = Console(stderr=True)
        with console.status("starting servers") as status:
            servers = ThrowawayServers(docker=docker, several=not self._quick, tell=status.update)
            started = stack.enter_context(servers)
        return started.urls, started.missing


def _write_page(report: Report, path: Path) -> None:
    # Here and not above: who wants no page need not load what draws it.
    from lockkit_tools.bench.page.page import page  # noqa: PLC0415

    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise lockkit.ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error


def _servers(run: Run) -> list[str]:
    """Give the URLs of lockkit on which something is to be measured, and which lead to servers."""
    measured = [cell.subject for cell in run.outcome.cells if not cell.skipped]
    return [subject.url for subject in measured if subject.role == "lockkit" and subject.scope == "network"]


def _measure(measuring: Run) -> Outcome:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=measuring.turns)
        return measuring.go(
            lambda cell, over: bars.update(
                bar, completed=over, description=f"{cell.workload.name}: {cell.subject.label}"
            )
        )


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
