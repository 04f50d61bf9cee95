"""``lockkit doctor``: reports what endangers locks at the servers behind a URL."""

from __future__ import annotations

from collections import Counter
from typing import Final

from rich.console import Console
from rich.text import Text

from lockkit import doctor
from lockkit.cli.output import print_json, settings_told
from lockkit.cli.status import Status
from lockkit.doctor import Diagnosis, Finding, Severity
from lockkit.units import Seconds
from lockkit.validation import plain

_STYLES: Final = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def examine(url: str | None, profile: str | None, *, ttl: Seconds | None, fail_on: Severity, as_json: bool) -> Status:
    """Print the findings at a backend's servers."""
    diagnosis = doctor.examine_settings(settings_told(url, profile), ttl=ttl)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        _print(diagnosis)
    return Status.FAILED if diagnosis.reaching(fail_on) else Status.OK


def _print(diagnosis: Diagnosis) -> None:
    console = Console()
    _line(console, f"{plain(diagnosis.backend)}, ttl {diagnosis.ttl:g} s")
    for name, value in diagnosis.facts.items():
        _line(console, f"  {plain(name)}: {plain(value)}", style="dim")
    for finding in diagnosis.findings:
        _line(console, "")
        _print_finding(console, finding)
    _line(console, "")
    _line(console, _summary(diagnosis))


def _print_finding(console: Console, finding: Finding) -> None:
    severity = finding.check.severity.value
    head = Text(severity, style=_STYLES[severity])
    head.append(plain(f"{' ' * (9 - len(severity))}{finding.check.id} at {', '.join(finding.where)}"), style="default")
    console.print(head, soft_wrap=True)
    # In a pipe or file a line stays one, for grep; a command also on a narrow terminal, to be copied.
    for name, text in (("seen", finding.seen), ("risk", finding.check.risk)):
        console.print(Text(f"  {name:<7}{plain(text)}"), soft_wrap=not console.is_terminal)
    _line(console, f"  fix    {plain(finding.fix)}")
    _line(console, f"  docs   {finding.check.url}")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _summary(diagnosis: Diagnosis) -> str:
    counts = Counter(finding.check.severity.value for finding in diagnosis.findings)
    words = {"info": "note"}
    parts = (f"{count} {words.get(name, name)}{'' if count == 1 else 's'}" for name, count in counts.items())
    return ", ".join(parts) or "nothing found"
