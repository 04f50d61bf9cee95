"""The page: a glance at all backends, every workload with its plots, and the report of the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

from rich.console import Console

from lockkit_tools.bench.addresses import title
from lockkit_tools.bench.page.choice import HOW, PLOTS, Plot
from lockkit_tools.bench.page.conclusion import compare_backends, conclude
from lockkit_tools.bench.page.markup import Html, tag
from lockkit_tools.bench.page.plots import draw
from lockkit_tools.bench.report import Report, Row, Section
from lockkit_tools.bench.table import described, render, warnings

TIMES = "\N{MULTIPLICATION SIGN}"

WIDTH = 160
"""Columns of the tables, which scroll on a narrow screen."""

GLANCE = ("pair", "handoff", "crash")
"""Workloads that are shown for all backends together."""


def page(report: Report) -> str:
    """Write the report as HTML, complete in itself."""
    sections = [section for section in report.sections if any(row.shown for row in section.rows)]
    body = tag(
        "main",
        _head(report),
        *(tag("p", text.plain, class_="warning") for text in warnings(report)),
        _glance(sections, report),
        *(_section(section, report) for section in sections),
        _all_figures(report),
    )
    folder = files("lockkit_tools.bench.page")
    style = "".join(folder.joinpath(name).read_text("utf-8") for name in ("style.css", "charts.css"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "lockkit bench"),
        tag("style", Html(style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _head(report: Report) -> Html:
    legend = [
        tag("span", tag("i", class_=f"swatch {role}"), f" {text}")
        for role, text in (
            ("lockkit", "lockkit"),
            ("peer", "another library"),
            ("baseline", "baseline: a minimal lock of this kind, written by hand"),
        )
    ]
    settings = report.outcome.settings
    return tag(
        "header",
        tag("h1", "Locks, side by side"),
        tag(
            "p",
            "Every subject ran in its own processes, and all took turns in random order, in up to "
            f"{settings.rounds} rounds. Compare subjects on one backend: they used the same server in the same "
            "minutes. Times on different backends also compare the servers and how durable they are: a server that "
            "flushes every change to disk is slower than one that does not, but loses nothing in a power failure.",
        ),
        tag("p", *legend, class_="legend"),
        tag("ul", *(tag("li", text) for text in _marks(report)), class_="remarks"),
    )


def _marks(report: Report) -> list[str]:
    """Explain the marks of all plots, once."""
    plots = [plot for section in report.sections for plot in PLOTS[section.workload.name]]
    kinds = dict.fromkeys(plot.kind for plot in plots)
    titles = {"box": "Boxes", "bar": "Bars"}
    lines = [f"{titles[kind]}: {HOW[kind].format(things='turns')}" for kind in kinds]
    if any(plot.ratio for plot in plots):
        lines.append(
            f"{TIMES} baseline: a subject's figure as a multiple of the baseline's, compared within each round. "
            "One that is faster than its baseline in every round is marked as suspect: see what the baseline or the "
            "subject leaves out, such as fairness or durability, or whether it was measured wrongly."
        )
    return lines


def _all_figures(report: Report) -> Html:
    """Show what the terminal shows: every figure, remarks, servers, versions, and how to repeat the run."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    console.print(render(report))
    text = Html(console.export_html(code_format="{code}", inline_styles=True))
    return tag("section", tag("h2", "All figures, servers and versions"), tag("pre", text, class_="scroll"))


# -- plots -------------------------------------------------------------------------------------------------------------


def _glance(sections: Sequence[Section], report: Report) -> Html:
    """Show lockkit's sync API on all backends."""
    figures = []
    for section, drawn in zip(sections, map(glance, sections), strict=True):
        if drawn is not None:
            plot, chart = drawn
            taken = compare_backends(plot, _ours(section), name=lambda row: title(row.subject.group))
            caption = f"{plot.hint} The plot does not show what each backend guarantees in return: see its page."
            figures.append(_figure(section.workload.title, "", chart, taken, caption.lstrip()))
    if not figures:
        return Html()
    return tag(
        "section",
        tag("h2", "lockkit on each backend"),
        tag("p", f"The sync API, version {report.about['versions']['lockkit']}."),
        tag("div", *figures, class_="panels"),
    )


def glance(section: Section) -> tuple[Plot, Html] | None:
    """Draw lockkit's sync API on all backends; None for a workload not drawn like this, or with one backend only."""
    ours = _ours(section)
    if section.workload.name not in GLANCE or len({row.subject.group for row in ours}) < 2:
        return None
    # Without multiples of the baseline: each backend has a different one.
    plot = replace(PLOTS[section.workload.name][0], ratio=False)
    chart = draw(plot, section, ours, name=lambda row: title(row.subject.group))
    return None if chart is None else (plot, chart)


def _ours(section: Section) -> list[Row]:
    shown = [row for row in section.rows if row.shown and row.subject.number == 1]
    return [row for row in shown if (row.subject.role, row.subject.face) == ("lockkit", "blocking")]


def _section(section: Section, report: Report) -> Html:
    workload = section.workload
    groups = dict.fromkeys(row.subject.group for row in section.rows if row.shown)
    panels = []
    for group in groups:
        rows = [row for row in section.rows if row.subject.group == group and row.shown]
        for plot in PLOTS[workload.name]:
            drawn = draw(plot, section, rows, name=_name)
            if drawn is None:
                continue
            about = described(report.about["servers"].get(group, {}))
            heading = title(group) if len(PLOTS[workload.name]) == 1 else f"{title(group)}: {plot.title.lower()}"
            headline = next(figure.title for figure in workload.figures if figure.key == workload.headline)
            baseline = f"{TIMES} baseline: of the {headline}. " if "baseline</small>" in drawn else ""
            taken = conclude(plot, section, rows, name=_name)
            hint = f"{plot.hint} " if plot.hint else ""
            panels.append(_figure(heading, about, drawn, taken, f"{hint}{baseline}Not shown: {workload.silent}"))
    return tag(
        "section",
        tag("h2", workload.title),
        tag("p", workload.explains),
        tag("div", *panels, class_="panels"),
        id=workload.name,
    )


def _figure(title: str, about: str, drawn: Html, taken: str, caption: str) -> Html:
    small = [tag("span", about, class_="about")] if about else []
    below = tag("figcaption", tag("p", taken, class_="taken"), caption)
    return tag("figure", tag("h3", title, *small), drawn, below)


def _name(row: Row) -> str:
    return row.label + (" (async)" if row.subject.face == "asyncio" else "")
