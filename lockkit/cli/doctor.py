"""``lockkit doctor``: what endangers locks at the servers behind a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockkit import doctor
from lockkit.cli.output import plain, print_json
from lockkit.cli.status import Status

if TYPE_CHECKING:
    from lockkit.doctor import Diagnosis, Finding, Severity

__all__ = ["examine"]

_STYLES: Final = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def examine(url: str | None, profile: str | None, *, ttl: float | None, fail_on: Severity, as_json: bool) -> Status:
    """
    Print what was found at a backend's servers.

    Args:
        url: Backend, or None.
        profile: Profile, or None.
        ttl: Lease time to judge by, seconds; None: the backend's.
        fail_on: Least severity of which one finding makes the status `Status.FAILED`.
        as_json: Print JSON.

    Raises:
        LockError: No server can be asked.
    """
    diagnosis = doctor.examine(url, profile=profile, ttl=ttl)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        _print(diagnosis)
    return Status.FAILED if diagnosis.reaching(fail_on) else Status.OK


def _print(diagnosis: Diagnosis) -> None:
    console = Console()
    console.print(Text(plain(f"{diagnosis.backend}, ttl {diagnosis.ttl:g} s")))
    for name, value in diagnosis.facts.items():
        console.print(Text(plain(f"  {name}: {value}"), style="dim"))
    for finding in diagnosis.findings:
        console.print()
        console.print(_table(finding))
    console.print()
    console.print(Text(_summary(diagnosis)))


def _table(finding: Finding) -> Table:
    """One row per fact, so that long ones wrap beside their names."""
    severity = finding.check.severity.value
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        Text(severity, style=_STYLES[severity]), Text(plain(f"{finding.check.id} at {', '.join(finding.where)}"))
    )
    rows = (
        ("seen", finding.seen),
        ("risk", finding.check.risk),
        ("mend", finding.mend),
        ("docs", finding.check.page),
    )
    for name, text in rows:
        table.add_row(Text(f"  {name}", style="dim"), Text(plain(text)))
    return table


def _summary(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return "nothing found"
    counts: dict[str, int] = {}
    for finding in diagnosis.findings:
        severity = finding.check.severity.value
        counts[severity] = counts.get(severity, 0) + 1
    plurals = {"error": "errors", "warning": "warnings", "info": "notes"}
    singulars = {"error": "error", "warning": "warning", "info": "note"}
    return ", ".join(
        f"{count} {singulars[severity] if count == 1 else plurals[severity]}" for severity, count in counts.items()
    )
