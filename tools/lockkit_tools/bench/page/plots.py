"""Boxes and bars: one row for each subject, with its name, its marks and its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockkit_tools.bench.page.choice import Plot, Unit, written
from lockkit_tools.bench.page.markup import Html, tag
from lockkit_tools.bench.page.scale import Scale
from lockkit_tools.bench.report import Row, Section

TIMES = "\N{MULTIPLICATION SIGN}"

QUANTILES = ("min", "p25", "median", "p75", "p99")

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Line:
    """What is drawn of one subject."""

    row: Row
    name: str  # what it is called in this plot
    values: Values  # by what the mark calls them
    times_baseline: str  # its headline figure as a multiple of its baseline's; empty where there is none


def draw(plot: Plot, section: Section, rows: Sequence[Row], *, name: Callable[[Row], str]) -> Html | None:
    """Draw a plot."""
    shown = [row for row in rows if row.shown]
    lines = [Line(row, name(row), _values(plot, section, row), _times_baseline(plot, section, row)) for row in shown]
    # Without values and without a reason for it: the figure does not apply.
    lines = [line for line in lines if line.values or line.row.reason or line.row.notes]
    if not any(line.values for line in lines):
        return None
    return {"box": _boxes, "bar": _bars}[plot.kind](plot, lines)


def _values(plot: Plot, section: Section, row: Row) -> Values:
    """Give a subject's values; empty if it has none."""
    if plot.kind == "box":
        found = {key: row.figures.get(f"{key}_{plot.figure}") for key in QUANTILES}
    else:
        rounds = [
            measured["figures"][plot.figure]
            for measured in section.rounds
            if measured["subject"] == row.subject.key and plot.figure in measured["figures"]
        ]
        found = {"value": row.figures.get(plot.figure)}
        found |= {"low": min(rounds), "high": max(rounds)} if rounds else {}
    complete = {key: value for key, value in found.items() if value is not None}
    return complete if len(complete) == len(found) else {}


def _times_baseline(plot: Plot, section: Section, row: Row) -> str:
    if not plot.ratio:
        return ""
    ratio = row.over_baseline(section.workload)
    return "" if ratio is None else f"{written(ratio.median, 'share')}{TIMES}"


# -- boxes and bars ----------------------------------------------------------------------------------------------------


def _boxes(plot: Plot, lines: Sequence[Line]) -> Html:
    scale = Scale.log([value for line in lines for value in line.values.values()])

    def mark(values: Values) -> list[Html]:
        left, box, middle, end, right = (scale.at(values[key]) for key in QUANTILES)
        return [
            _whisker(left, right),
            tag("rect", class_="body", x=_percent(box), width=_percent(max(end - box, 0.6)), y="4", height="14"),
            tag("line", class_="median", x1=_percent(middle), x2=_percent(middle), y1="1", y2="21"),
        ]

    return _chart(plot, lines, scale, mark)


def _bars(plot: Plot, lines: Sequence[Line]) -> Html:
    highest = [line.values["high"] for line in lines if line.values]
    scale = Scale.linear([*highest, *([plot.line] if plot.line is not None else [])])

    def mark(values: Values) -> list[Html]:
        length = max(scale.at(values["value"]), 0.3)  # a bar of no length looks like no figure
        bar = tag("rect", class_="body", x="0", width=_percent(length), y="4", height="14")
        if values["low"] == values["high"]:
            return [bar]
        return [bar, _whisker(scale.at(values["low"]), scale.at(values["high"]))]

    return _chart(plot, lines, scale, mark)


def _chart(plot: Plot, lines: Sequence[Line], scale: Scale, mark: Callable[[Values], list[Html]]) -> Html:
    rows = []
    for line in lines:
        if not line.values:
            rows.append(_row(line, tag("span", _why_empty(line.row), class_="why"), ""))
            continue
        text = written(line.values["median" if plot.kind == "box" else "value"], plot.unit)
        described = f"{line.name}: {text}"
        grid = [
            tag("line", class_="grid", x1=_percent(position), x2=_percent(position), y1="0", y2="22")
            for position in map(scale.at, scale.ticks())
        ]
        if plot.line is not None:
            position = _percent(scale.at(plot.line))
            grid.append(tag("line", class_="mark", x1=position, x2=position, y1="0", y2="22"))
        marks = tag(
            "svg", tag("title", described), *grid, *mark(line.values), role="img", aria_label=described, height="22"
        )
        rows.append(_row(line, marks, text))
    compared = any(line.times_baseline for line in lines)
    axis = _axis(scale, plot.unit, f"{TIMES} baseline" if compared else "")
    return tag("div", *rows, axis, class_="chart compared" if compared else "chart")


def _row(line: Line, marks: Html, text: str) -> Html:
    suspect = (
        [tag("span", " suspect", class_="suspect", title=line.row.suspect)]
        if line.times_baseline and line.row.suspect
        else []
    )
    return tag(
        "div",
        tag("div", line.name, *suspect, class_="name"),
        tag("div", marks, class_="marks"),
        tag("div", text, tag("small", line.times_baseline), class_="value"),
        class_=f"row {line.row.subject.role} {line.row.status}",
    )


def _axis(scale: Scale, unit: Unit, over_ratios: str) -> Html:
    ticks = scale.ticks()
    labels = []
    for tick in ticks:
        position = scale.at(tick)
        side = "start" if position < 5 else "end" if position > 95 else "middle"
        labels.append(tag("span", written(tick, unit), class_=side, style=f"left:{position:.4g}%"))
    return tag(
        "div",
        tag("div", class_="name"),
        tag("div", *labels, class_="ticks"),
        tag("div", tag("small", over_ratios), class_="value"),
        class_="row axis",
    )


def _why_empty(row: Row) -> str:
    if row.reason:
        return f"{row.status}: {row.reason}"
    return "; ".join(row.notes) or "no figure"


def _whisker(left: float, right: float) -> Html:
    ends = [tag("line", x1=_percent(position), x2=_percent(position), y1="7", y2="15") for position in (left, right)]
    return tag("g", tag("line", x1=_percent(left), x2=_percent(right), y1="11", y2="11"), *ends, class_="whisker")


def _percent(position: float) -> str:
    return f"{position:.4g}%"
