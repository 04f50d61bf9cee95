"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockkit_tools.bench.report import Report, Row, Section
from lockkit_tools.bench.workloads.base import Figure

if TYPE_CHECKING:
    from rich.console import RenderableType


TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"


def render(report: Report) -> RenderableType:
    """Make one table for each workload with its remarks; above them the servers, below them the rest of the report."""
    about, machine = report.about, report.about["machine"]
    parts: list[RenderableType] = []
    for group, server in about["servers"].items():
        if server:
            parts.append(Text(f"{group}: {described(server)}", style="dim"))
    for section in report.sections:
        shown = [row for row in section.rows if row.status != "skipped"]
        if shown:
            parts += [_table(section, shown), *_remarks(section, shown), Text()]
        parts += [
            Text(f"{section.workload.title} not measured: {row.reason}: {row.subject.key}", style="dim")
            for row in section.rows
            if row.status == "skipped" and _is_news(section, row, table=bool(shown))
        ]
    subjects = [row.subject for section in report.sections for row in section.rows]
    notes = {one.label: one.missing or one.tuning for one in subjects if one.missing or one.tuning}
    parts += [Text(f"{label}: {note}", style="dim") for label, note in notes.items()]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    where = f"{machine['processor'] or machine['architecture']}, {machine['cores']} cores, {machine['system']}"
    busy = " (a busy machine: trust ratios, not times)" if machine["load_before"] > machine["cores"] / 2 else ""
    parts.append(
        Text(
            f"{about['started']}, {where}, {machine['python']}, load before {machine['load_before']:.1f}{busy}. "
            f"Versions: {versions}. Repeat: {about['command']}",
            style="dim",
        )
    )
    return Group(*parts, *warnings(report))


def warnings(report: Report) -> list[Text]:
    """Say what a reader must know before believing a figure: what is missing, and which subjects are no locks."""
    texts = ["Interrupted: what is missing was not measured."] if report.outcome.interrupted else []
    if report.outcome.out_of_time:
        texts.append(f"{limited(report)} More: --limit.")
    texts += [f"not measured: {kind}: {reason}" for kind, reason in report.about["not_started"].items()]
    broken = [f"BROKEN: {subject.key}: {report.outcome.broken(subject)}" for subject in report.broken]
    return [Text(text, style="yellow") for text in texts] + [Text(text, style="bold red") for text in broken]


def _is_news(section: Section, row: Row, *, table: bool) -> bool:
    """Tell whether to say why a subject was skipped: if a backend lacks a primitive, or if there is no table at all."""
    subject = row.subject
    return section.workload.kind in subject.lacks or (
        not table and subject.role == "lockkit" and subject.workloads is None
    )


def limited(report: Report) -> str:
    """Say what the time limit has cost."""
    limit = report.outcome.settings.limit or 0
    without = sum(cell.status == "pending" for cell in report.outcome.cells)
    cost = f"{without} measurements were not reached" if without else "every subject was measured at least once"
    return f"The run ended at its limit of {limit:g} s: {cost}."


def described(about: Mapping[str, str]) -> str:
    """Give version and settings of a server in one line."""
    rest = dict(about)
    name = f"{rest.pop('server', '')} {rest.pop('version', '')}".strip()
    return ", ".join([*([name] if name else []), *(f"{key} {value}" for key, value in rest.items())])


def _table(section: Section, rows: list[Row]) -> Table:
    table = Table(title=section.workload.title, title_justify="left", title_style="bold", pad_edge=False)
    figures = [
        figure for figure in section.workload.figures if figure.shown and any(figure.key in row.figures for row in rows)
    ]
    several = len({row.subject.group for row in rows}) > 1
    table.add_column("subject", overflow="fold")
    table.add_column("API")
    if several:
        table.add_column("at", overflow="fold")
    for figure in figures:
        table.add_column(figure.title, justify="right")
    ours = [section.ours(row) for row in rows]
    compared = {
        "baseline": [row.baseline for row in rows],
        "lockkit": [None if own is None else own.subject.key for own in ours],
    }
    ratios = {
        title: [_ratio(section, *pair) for pair in zip(rows, keys, strict=True)] for title, keys in compared.items()
    }
    ratios = {title: found for title, found in ratios.items() if any(found)}
    for title in ratios:
        table.add_column(f"{TIMES} {title}", justify="right")
    # Subjects of one backend stay together, so that they can be compared.
    groups = [row.subject.group for row in rows]
    for index, row in sorted(enumerate(rows), key=lambda one: groups.index(one[1].subject.group)):
        cells = [_name(row), Text(row.subject.api)]
        if several:
            cells.append(Text(row.subject.group))
        cells += [_number(row, figure) for figure in figures]
        table.add_row(*cells, *(found[index] or Text(DASH) for found in ratios.values()))
    return table


def _name(row: Row) -> Text:
    text = Text(row.label)
    text.stylize({"lockkit": "bold", "baseline": "dim", "peer": ""}[row.subject.role])
    if row.status != "ok":
        text.append(f" {row.status.upper()}", style="bold red" if row.status == "broken" else "yellow")
    elif row.suspect:
        text.append(" SUSPECT", style="yellow")
    return text


def _number(row: Row, figure: Figure) -> Text:
    value = row.figures.get(figure.key)
    style = "" if row.status == "ok" else "dim strike" if row.status == "broken" else "dim"
    return Text(DASH if value is None else f"{value:,.{figure.digits}f}", style=style)


def _ratio(section: Section, row: Row, other: str | None) -> Text | None:
    ratio = row.ratios.get(section.workload.headline, {}).get(other or "")
    if ratio is None:
        return None
    text = Text(str(ratio))
    text.highlight_regex(r" \(.*\)", "dim")
    return text


def _remarks(section: Section, rows: list[Row]) -> list[Text]:
    remarks = [Text(section.workload.explains, style="dim")]
    for row in rows:
        if row.reason:
            remarks.append(Text(f"{row.status}: {row.subject.key}: {row.reason}", style="yellow"))
        remarks += [Text(f"{row.subject.key}: {note}", style="yellow") for note in row.notes]
        if row.suspect:
            why = f"{row.suspect}: see what it leaves out, or whether it was measured wrongly"
            remarks.append(Text(f"suspect: {row.subject.key}: {why}", style="yellow"))
    return remarks
