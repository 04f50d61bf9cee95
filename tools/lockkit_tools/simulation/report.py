"""What a `lockkit_tools.simulation.night.Night` came to, as text and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockkit_tools.simulation.branches import Coverage, cover
from lockkit_tools.simulation.night import Kind, Night


def repeat_command(kind: str, seed: int) -> str:
    """Give the command that runs one schedule again, and shows what happened."""
    return f"nox -s simulate-night -- --kind={kind} --seed={seed}"


def as_json(night: Night, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Give all that is known, for programs."""
    coverage = None if night.arcs is None else cover(night.arcs)
    about = {kind.name: kind.about for kind in kinds}
    return {
        "python": platform.python_version(),
        "wanted": night.wanted,
        "schedules": night.count,
        "first_seed": night.first,
        "workers": night.workers,
        "seconds": round(night.seconds, 1),
        "cpu_seconds": round(night.cpu_seconds, 1),
        "load": night.load,
        "violated": night.violated,
        "kinds": {
            name: {
                "about": about[name],
                "schedules": kind.count,
                "violated": kind.violated,
                "mean_ms": round(1000 * kind.seconds / kind.timed, 2) if kind.timed else None,
                "branches_measured": kind.measured,
            }
            for name, kind in night.kinds.items()
        },
        "faults": {
            name: {"times": times, "schedules": night.suffered[name]} for name, times in night.faults.most_common()
        },
        "coverage": None if coverage is None else _coverage_as_json(coverage),
        "slowest": [
            {"kind": slow.kind, "seed": slow.seed, "ms": round(1000 * slow.seconds, 1)} for slow in night.slowest
        ],
        "violations": [
            {**violation._asdict(), "repeat": repeat_command(violation.kind, violation.seed)}
            for violation in night.violations
        ],
    }


def _coverage_as_json(coverage: Coverage) -> dict[str, Any]:
    return {
        "taken": coverage.taken,
        "branches": coverage.total,
        "files": {file: {"taken": taken, "branches": total} for file, (taken, total) in coverage.files.items()},
        "uncovered": [one._asdict() for one in coverage.uncovered],
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Write what `as_json` gives for people."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    count, seconds = report["schedules"], report["seconds"]
    load = "" if report["load"] is None else f", load average {report['load'][0]:.1f} → {report['load'][1]:.1f}"
    cpu = f" ({report['cpu_seconds']:,.0f} s of CPU)" if report["cpu_seconds"] else ""
    workers = f"{report['workers']} processes on Python {report['python']}"
    yield (
        f"{count:,} schedules in {seconds:,.0f} s{cpu} by {workers}{load}: "
        f"{count / max(seconds, 0.001):,.0f} a second, seeds from {report['first_seed']} on"
    )
    if count < report["wanted"]:
        yield f"Ended early: {report['wanted']:,} were to be run."
    yield ""
    yield from _table(
        ("kind", "schedules", "violated", "mean ms", "what they do"),
        [
            (name, f"{kind['schedules']:,}", f"{kind['violated']:,}", _number(kind["mean_ms"]), kind["about"])
            for name, kind in report["kinds"].items()
        ],
    )
    yield ""
    yield from _table(
        ("fault", "times", "schedules", "share"),
        [
            (name, f"{fault['times']:,}", f"{fault['schedules']:,}", f"{fault['schedules'] / count:.1%}")
            for name, fault in report["faults"].items()
        ],
    )
    yield ""
    yield from _table(
        ("slowest", "ms", "seed"),
        [(slow["kind"], _number(slow["ms"]), str(slow["seed"])) for slow in report["slowest"]],
    )
    yield ""
    yield from _coverage_lines(report)
    yield ""
    yield from _violation_lines(report)


def _coverage_lines(report: Mapping[str, Any]) -> Iterator[str]:
    coverage = report["coverage"]
    if coverage is None:
        yield "Branches were not measured (install coverage, and see --measured)."
        return
    measured = sum(kind["branches_measured"] for kind in report["kinds"].values())
    taken, total = coverage["taken"], coverage["branches"]
    yield f"{taken:,} of {total:,} branches ({taken / max(total, 1):.1%}) were taken by {measured:,} of the schedules:"
    yield from _table(
        ("file", "taken", "branches"),
        [(file, str(about["taken"]), str(about["branches"])) for file, about in coverage["files"].items()],
    )
    yield ""
    yield f"What none of them covers ({len(coverage['uncovered'])}):"
    for one in coverage["uncovered"]:
        yield f"  {one['file']}:{one['line']} {one['function']}: {one['text']}"


def _violation_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["violated"]:
        yield "Every schedule kept every promise."
        return
    shown = len(report["violations"])
    some = "" if shown == report["violated"] else f"; {shown} of them"
    yield f"{report['violated']:,} schedules broke a promise{some}:"
    for violation in report["violations"]:
        yield f"  {violation['kind']}, seed {violation['seed']}: {violation['problem']}"
        yield f"    {violation['repeat']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: the first and those of words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if _is_number(rows, column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _is_number(rows: Sequence[tuple[str, ...]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column] == "-" for row in rows)
