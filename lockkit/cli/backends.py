"""``lockkit backends``, ``ping``, ``migrate``, ``limit``, ``doctor``, ``verify``: what a backend can do, and keeps."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import lockkit
from lockkit import doctor
from lockkit.backend import Capabilities
from lockkit.cli.app import JSON, PROFILE, URL_ARGUMENT, OnBackend, argument, command, flag, no_url, option, time
from lockkit.cli.holders import print_table
from lockkit.cli.output import answer, connected, print_json, settings_told
from lockkit.cli.status import Status
from lockkit.cli.usage import Command
from lockkit.configuration import profiles, registry
from lockkit.configuration.registry import DetachedHost
from lockkit.doctor import Diagnosis, Finding, Severity
from lockkit.errors import ConfigurationError
from lockkit.runtime import drive, monotonic
from lockkit.validation import plain

if TYPE_CHECKING:
    from lockkit.testing.verification import CaseResult, Outcome, Verification

# -- lockkit ping, migrate, limit --------------------------------------------------------------------------------------


@command("ping", "Ask a backend for an answer, and time it.")
class Ping:
    """
    Ask a backend for an answer, and show how long it took.

    Exit status: 0 if it answers; 69 if it does not; 78 if the URL, a credential or an option is wrong.
    """

    url: str | None = URL_ARGUMENT
    profile: str | None = PROFILE
    as_json: bool = JSON

    def run(self) -> None:
        with lockkit.connect(self.url, profile=self.profile) as client:
            began = monotonic()
            client.ping()
            connected_at = monotonic()
            client.ping()
            first, round_trip = connected_at - began, monotonic() - connected_at
            answer(
                self,
                {"backend": client.url, "first_seconds": round(first, 6), "round_trip_seconds": round(round_trip, 6)},
                f"{client.url} answers in {round_trip * 1000:.2f} ms "
                f"(the first answer, with connecting, took {first * 1000:.2f} ms)",
            )


@command("migrate", "Create the tables of a SQL backend.")
class Migrate:
    """
    Create the tables of a SQL backend, or add missing columns.

    Otherwise lockkit creates them at the first use, unless auto_create=0 is set or the user lacks the right. You can
    run it again, and several at the same time. Without URL, the backend is that of LOCKKIT_URL or the profile.
    """

    url: str | None = argument(None, "URL", "Backend, with the same ?mode= and ?table= as in your program.")
    profile: str | None = PROFILE
    sql_only: bool = flag("Print the statements for an empty database instead, without connecting.", "--sql")

    def run(self) -> None:
        settings = profiles.resolve(self.url, self.profile, {})
        backend, _ = registry.open_backend(settings.url, settings.options, DetachedHost(), source=settings.elsewhere)
        tables = getattr(backend, "tables", None)
        if tables is None:
            raise ConfigurationError(
                f"{backend.url} has no tables: give the URL of a database, such as postgresql://host/name",
                backend=backend.url,
            )
        from lockkit.backends.sql import schema as sql_schema  # noqa: PLC0415 - of these backends only

        database = backend.database  # type: ignore[attr-defined] # beside `tables`
        if self.sql_only:
            for table in tables:
                print(f"{table.ddl(database.dialect.name)};")
            return
        try:
            for change in drive(sql_schema.migrate(database, tables)):
                print(plain(f"{backend.url}: {change}"))
        finally:
            drive(backend.close())


def _cap(value: str | None) -> str | None:
    if value is None or value == "none" or (value.isascii() and value.isdigit()):
        return value
    raise typer.BadParameter(_not_a_cap(value))


def _not_a_cap(value: str) -> str:
    return f"it must be 0 or more permits, or none; not {value}"


class _Limit(Command):
    """``limit``, where a negative number is a wrong N, and no option."""

    def misused(self, args: list[str], program: str) -> str | None:
        del program
        return next((_not_a_cap(word) for word in takewhile("--".__ne__, args) if re.fullmatch(r"-\d+", word)), None)


@command("limit", "Show, set or remove the cap of a semaphore.", _Limit)
class Limit(OnBackend):
    """
    Show, set or remove the cap of a semaphore, whatever limits its clients have.

    Clients apply a new cap within 5 seconds. Permits that are held stay held.

    Exit status: 0; 69 if the backend is unavailable; 75 if others keep changing caps; 78 if the backend cannot cap
    semaphores.
    """

    name: str = argument(..., "NAME", "Name of the semaphore.", callback=no_url)
    cap: str | None = argument(
        None,
        "N|none",
        "Permits of all clients together; 0 pauses new ones, none removes the cap. Without it: show the cap.",
        callback=_cap,
    )
    as_json: bool = JSON

    def run(self) -> None:
        with connected(self) as client:
            semaphore = client.semaphore(self.name, limit=1)
            if self.cap is not None:
                semaphore.set_cap(None if self.cap == "none" else int(self.cap))
            cap = semaphore.cap()
            said = f"is capped at {cap}{': new permits are paused' if cap == 0 else ''}"
            if cap is None:
                said = "has no cap: each client counts to its own limit"
            values = {"name": self.name, "backend": client.url, "cap": cap}
            answer(self, values, f"semaphore {self.name!r} at {client.url} {said}")


# -- lockkit backends --------------------------------------------------------------------------------------------------


@command("backends", "Show the capabilities of each backend.")
class Backends:
    """Show the capabilities of each backend, and what to install where a driver is missing."""

    as_json: bool = JSON

    def run(self) -> None:
        rows = _rows()
        if self.as_json:
            print_json([row.as_dict() for row in rows])
            return
        table = Table(*_COLUMNS)
        for row in rows:
            if row.capabilities is not None:
                table.add_row(*row.cells(row.capabilities))
        print_table(table, follow_columns=True, optional=("notes", "lists locks", "shortest ttl", "survives", "queue"))
        console = Console()
        for row in rows:
            where = ", ".join(row.schemes) + (f" (mode={row.mode})" if row.mode is not None else "")
            what = f"not available: {row.problem}"
            if row.capabilities is not None:
                what = f"{row.capabilities.caveat} Tokens: {row.capabilities.token_source}."
            console.print()
            console.print(Text(plain(f"{where}: {what}")))


_COLUMNS: Final = ("URL", "excludes", "a dead holder's lock is free", "shortest ttl", "queue", "waiters", "lists locks",
                   "survives", "notes")  # fmt: skip

_CRASH_RELEASE: Final = {
    "ttl": "after the ttl",
    "session": "when its session ends",
    "connection": "when its connection ends",
    "process": "at once",
}


@dataclass(slots=True)
class _Row:
    """One backend."""

    schemes: list[str]  # its URL schemes
    mode: str | None  # which of their modes it is, where they have several
    capabilities: Capabilities | None  # none if it cannot be loaded
    problem: str | None = None  # why not, and what to install

    def as_dict(self) -> dict[str, Any]:
        capabilities = None if self.capabilities is None else dataclasses.asdict(self.capabilities)
        return {"schemes": self.schemes, "mode": self.mode, "available": self.problem is None, "problem": self.problem,
                "capabilities": capabilities}  # fmt: skip

    def cells(self, capabilities: Capabilities) -> tuple[str, ...]:
        mode = [] if self.mode is None else [f"mode={self.mode}"]
        survives = {"a lost node": capabilities.survives_node_loss, "lost data": capabilities.survives_data_loss}
        return (
            "\n".join([*(f"{scheme}:" for scheme in self.schemes), *mode]),
            f"one {capabilities.scope}" if capabilities.scope != "network" else "all clients",
            _CRASH_RELEASE[capabilities.crash_release],
            f"{capabilities.min_ttl:g} s",
            "fair" if capabilities.fair else "unfair",
            {"push": "woken", "poll": "polling"}[capabilities.wakeup],
            "yes" if capabilities.listing else "no",
            "\n".join(what for what, survived in survives.items() if survived) or "neither",
            "yes" if capabilities.notes else "no",
        )


def _rows() -> list[_Row]:
    """All backends, each in one row with all its schemes."""
    rows: dict[object, _Row] = {}
    for scheme in registry.schemes():
        for mode in registry.modes(scheme):
            try:
                backend_class = registry.find(scheme, mode)
                backend_class.driver_options()  # of SQL, loading the class needs no driver
            except ConfigurationError as error:
                builtin = registry.BUILTIN.get(scheme)
                key: object = scheme if builtin is None else (builtin.target, mode)
                row = rows.setdefault(key, _Row([], mode, None, str(error)))
            else:
                row = rows.setdefault(backend_class, _Row([], mode, backend_class.capabilities))
            row.schemes.append(scheme)
    return list(rows.values())


# -- lockkit doctor ----------------------------------------------------------------------------------------------------

FailOn = StrEnum("FailOn", ["ERROR", "WARNING"])

_INDENT: Final = 9
_WIDTH_MIN: Final = 30
"""Columns of text, at least: a narrower terminal wraps the lines itself."""

_STYLES: Final = {"error": "bold red", "warning": "yellow", "info": "cyan"}


@command("doctor", "Examine the servers behind a URL.")
class Doctor:
    """
    Examine the servers behind a URL, and report what endangers locks there.

    Checks versions, persistence, replication, rights, clocks, round trips and more, and changes nothing. Each finding
    has a stable name, its severity, what was seen, the risk, and the fix.

    Exit status: 0; 1 if a finding is as severe as --fail-on; 69 if no server answers; 78 if the URL, a credential or an
    option is wrong.
    """

    url: str | None = URL_ARGUMENT
    profile: str | None = PROFILE
    ttl: float | None = time(None, "Check the servers for locks with this ttl. Default: the backend's, else 30.")
    fail_on: FailOn = option(FailOn.ERROR, "Lowest severity that gives exit status 1.")
    as_json: bool = JSON

    def run(self) -> Status:
        diagnosis = doctor.examine_settings(settings_told(self), ttl=self.ttl)
        if self.as_json:
            print_json(diagnosis.as_dict())
        else:
            _print_diagnosis(diagnosis)
        return Status.FAILED if diagnosis.reaching(Severity(self.fail_on.value)) else Status.OK


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    console = Console()
    # In a pipe or file a line stays one, for grep.
    width = console.width if console.is_terminal else None
    _line(console, f"{plain(diagnosis.backend)}, ttl {diagnosis.ttl:g} s")
    for name, value in diagnosis.facts.items():
        _line(console, f"  {plain(name)}: {plain(value)}", style="dim")
    for finding in diagnosis.findings:
        _line(console, "")
        _print_finding(console, finding, width)
    counts = Counter(finding.check.severity.value for finding in diagnosis.findings)
    words = {"info": "note"}
    parts = (f"{count} {words.get(name, name)}{'' if count == 1 else 's'}" for name, count in counts.items())
    _line(console, "")
    _line(console, ", ".join(parts) or "nothing found")


def _print_finding(console: Console, finding: Finding, width: int | None) -> None:
    severity = finding.check.severity.value
    head = Text(severity, style=_STYLES[severity])
    head.append(plain(f"{' ' * (9 - len(severity))}{finding.check.id} at {', '.join(finding.where)}"), style="default")
    console.print(head, soft_wrap=True)
    rows = (
        ("seen", _wrapped(finding.seen, width)),
        ("risk", _wrapped(finding.check.risk, width)),
        # As one line also on a narrow terminal, to be copied.
        ("fix", plain(finding.fix)),
        ("docs", finding.check.url),
    )
    for name, text in rows:
        _line(console, f"  {name:<{_INDENT - 2}}{text}")


def _wrapped(text: str, width: int | None) -> str:
    """Break a sentence into lines that begin below one another."""
    if width is None:
        return plain(text)
    lines = textwrap.wrap(plain(text), max(width - _INDENT, _WIDTH_MIN), break_long_words=False)
    return f"\n{' ' * _INDENT}".join(lines)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


# -- lockkit verify ----------------------------------------------------------------------------------------------------

Face = StrEnum("Face", ["SYNC", "ASYNC"])

_OUTCOMES: Final[dict[Outcome, str]] = {
    "passed": "green",
    "failed": "bold red",
    "not promised": "dim",
    "skipped": "yellow",
}


@command("verify", "Run the conformance suite on a backend.")
class Verify:
    """
    Run the conformance suite on a backend: check that on these servers it keeps the promises of every backend.

    It takes some minutes. The suite uses its own key prefix, table or directory and removes it at the end. It kills and
    stops only processes that it started itself, never a server. It needs the extra testing.

    Exit status: 0 if the backend conforms; 1 if a case failed; 69 if no server answers; 78 if the URL, a credential or
    an option is wrong.
    """

    url: str | None = URL_ARGUMENT
    profile: str | None = PROFILE
    face: Face | None = option(None, "Test only the sync or the async API. Default: both.", show_default=False)
    only: str | None = option(
        None, "Run only cases with this in their name; or an expression as for pytest -k.", metavar="TEXT"
    )
    history: Path | None = option(
        None, "Write what contending callers did to this file, for checkers of histories: EDN, or JSON for *.json."
    )
    as_json: bool = JSON

    def run(self) -> Status:
        try:
            from lockkit.testing.verification import verify  # noqa: PLC0415 - needs pytest
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("lockkit"):
                raise
            what = f"lockkit verify needs the module {error.name!r}: pip install 'lockkit[testing]'"
            raise ConfigurationError(what) from error
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # pytest captures both outputs while cases run; progress goes to a copy of stderr.
        with os.fdopen(os.dup(sys.stderr.fileno()), "w") as own:
            console = Console(file=own)
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task("connecting", total=None)

                def told(case: CaseResult, total: int) -> None:
                    progress.update(task, total=total, advance=1, description=f"{case.group}, {case.face}")

                face = None if self.face is None else self.face.value
                found = verify(
                    self.url, profile=self.profile, face=face, only=self.only, history=self.history, told=told
                )
        if self.as_json:
            print_json(found.as_dict())
        else:
            _print_verification(found)
        return Status.OK if found.passed else Status.FAILED


def _print_verification(found: Verification) -> None:
    console = Console()
    table = Table("what")
    for outcome, style in _OUTCOMES.items():
        table.add_column(outcome, justify="right", style=style)
    groups: dict[str, Counter[Outcome]] = {}
    for case in found.cases:
        groups.setdefault(case.group, Counter())[case.outcome] += 1
    for group, counts in groups.items():
        table.add_row(group, *(str(counts[outcome] or "") for outcome in _OUTCOMES))
    _line(console, plain(found.backend))
    console.print(table)
    for case in found.cases:
        if case.outcome == "failed":
            _line(console, "")
            _line(console, plain(f"{case.group}: {case.name} ({case.face})"), style="bold red")
            _line(console, plain(f"  must hold: {case.promise}"))
            _line(console, plain(f"  seen: {case.reason}"))
            _line(console, plain(f"  the backend: {case.backend_part}"))
    for outcome, words in (("not promised", "not promised"), ("skipped", "could not run")):
        reasons = Counter(case.reason for case in found.cases if case.outcome == outcome)
        for reason, count in sorted(reasons.items()):
            _line(console, plain(f"{words}: {reason} ({count} {'case' if count == 1 else 'cases'})"))
    place = "The suite used prefixed lock names in the backend's own namespace."
    if found.place is not None:
        place = f"The suite ran in {found.place}{' and removed it' if found.removed else ''}."
    counted = ", ".join(f"{found.count(outcome)} {outcome}" for outcome in _OUTCOMES)
    verdict = "conforms" if found.passed else "does not conform"
    _line(console, plain(f"{verdict}: {counted}, in {found.seconds:.0f} s. {place}"))
