"""``lockkit doctor``: reports what endangers locks at the servers behind a URL."""

from __future__ import annotations

import textwrap
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

_INDENT = 9
_WIDTH_MIN = 30
"""Columns of text, at least: a narrower terminal wraps the lines itself."""

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
    # In a pipe or file a line stays one, for grep.
    width = console.width if console.is_terminal else None
    _line(console, f"{plain(diagnosis.backend)}, ttl {diagnosis.ttl:g} s")
    for name, value in diagnosis.facts.items():
        _line(console, f"  {plain(name)}: {plain(value)}", style="dim")
    for finding in diagnosis.findings:
        _line(console, "")
        _print_finding(console, finding, width)
    _line(console, "")
    _line(console, _summary(diagnosis))


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


def _summary(diagnosis: Diagnosis) -> str:
    counts = Counter(finding.check.severity.value for finding in diagnosis.findings)
    words = {"info": "note"}
    parts = (f"{count} {words.get(name, name)}{'' if count == 1 else 's'}" for name, count in counts.items())
    return ", ".join(parts) or "nothing found"
