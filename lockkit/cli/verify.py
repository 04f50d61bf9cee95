"""``lockkit verify``: checks that a backend, on its real servers, keeps the promises of every backend."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lockkit.cli.output import print_json
from lockkit.cli.status import Status
from lockkit.errors import ConfigurationError
from lockkit.validation import plain

if TYPE_CHECKING:
    from lockkit.testing.verification import CaseResult, Outcome, Verification

_OUTCOMES: Final[tuple[tuple[Outcome, str], ...]] = (
    ("passed", "green"),
    ("failed", "bold red"),
    ("not promised", "dim"),
    ("skipped", "yellow"),
)


def verify(url: str | None, profile: str | None, *, face: str | None, only: str | None, as_json: bool) -> Status:
    """Run the conformance suite and print what it found."""
    try:
        from lockkit.testing.verification import verify as run  # noqa: PLC0415 - needs pytest
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lockkit"):
            raise
        message = f"lockkit verify needs the module {error.name!r}: pip install 'lockkit[testing]'"
        raise ConfigurationError(message) from error

    # pytest captures both outputs while cases run; progress goes to a copy of stderr.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as own, _progress(Console(file=own)) as progress:
        task = progress.add_task("connecting", total=None)

        def told(case: CaseResult, total: int) -> None:
            progress.update(task, total=total, advance=1, description=f"{case.group}, {case.face}")

        verification = run(url, profile=profile, face=face, only=only, told=told)
    if as_json:
        print_json(verification.as_dict())
    else:
        _print(verification)
    return Status.OK if verification.passed else Status.FAILED


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(verification: Verification) -> None:
    console = Console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(plain(text), style=style), soft_wrap=True)

    say(verification.backend)
    console.print(_table(verification))
    for case in verification.cases:
        if case.outcome == "failed":
            console.print()
            say(f"{case.group}: {case.name} ({case.face})", style="bold red")
            say(f"  must hold: {case.promise}")
            say(f"  seen: {case.reason}")
            say(f"  the backend: {case.backend_part}")
    for outcome, words in (("not promised", "not promised"), ("skipped", "could not run")):
        reasons = Counter(case.reason for case in verification.cases if case.outcome == outcome)
        for reason, count in sorted(reasons.items()):
            say(f"{words}: {reason} ({count} {'case' if count == 1 else 'cases'})")
    say(_summary(verification))


def _table(verification: Verification) -> Table:
    table = Table("what")
    for outcome, style in _OUTCOMES:
        table.add_column(outcome, justify="right", style=style)
    groups: dict[str, Counter[Outcome]] = {}
    for case in verification.cases:
        groups.setdefault(case.group, Counter())[case.outcome] += 1
    for group, counts in groups.items():
        table.add_row(group, *(str(counts[outcome] or "") for outcome, _ in _OUTCOMES))
    return table


def _summary(verification: Verification) -> str:
    verdict = "conforms" if verification.passed else "does not conform"
    place = (
        f"The suite ran in {verification.place}{' and removed it' if verification.removed else ''}."
        if verification.place is not None
        else "The suite used prefixed lock names in the backend's own namespace."
    )
    return (
        f"{verdict}: {verification.count('passed')} passed, {verification.count('failed')} failed, "
        f"{verification.count('not promised')} not promised, {verification.count('skipped')} skipped, "
        f"in {verification.seconds:.0f} s. {place}"
    )
