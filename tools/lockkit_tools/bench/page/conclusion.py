"""What to take from a plot, in a sentence or two, worked out from its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lockkit_tools.bench.page.choice import Plot, written
from lockkit_tools.bench.report import Row, Section

LEVEL: Final = 1.15
"""Ratios repeat to within about 15 %: what is closer is not told apart."""

FAIR: Final = 0.5
"""Below it the least-served contender gets less than half of what the most-served one gets."""


class _Entry(NamedTuple):
    name: str
    value: float
    row: Row


def conclude(plot: Plot, section: Section, rows: Sequence[Row], *, name: Callable[[Row], str]) -> str:
    """Say how lockkit does in a plot of one backend, next to the other libraries and the baseline."""
    good = [row for row in rows if row.status == "ok"]
    found = [_Entry(name(row), row.figures[key], row) for row in good if (key := _key(plot)) in row.figures]
    entries = sorted((one for one in found if one.value >= 0), key=lambda one: one.value, reverse=plot.better != "less")
    ours = _ours(entries)
    others = [entry for entry in entries if entry.row.subject.role == "peer"]
    # A library is compared in the same API, if it has any there.
    others = [entry for entry in others if ours and entry.row.subject.face == ours.row.subject.face] or others
    if ours is None:
        sentences = ["lockkit has no figure here."]
    else:
        sentences = [f"lockkit: {_value(plot, ours.value)}{_over_baseline(plot, section, ours)}."]
    if others:
        ends = [*others[:1], *others[1:][-1:]]
        sentences.append("Other libraries: " + " to ".join(f"{_value(plot, e.value)} ({e.name})" for e in ends) + ".")
    else:
        sentences.append("No other library was measured here.")
    beware = {
        "Unfair, the least-served contender gets less than half as much as the most-served one: {}.": [
            name(row) for row in good if plot.better != "less" and row.figures.get("share", 1.0) < FAIR
        ],
        "With {} no other client got the lock at all.": [
            name(row) for row in good if plot.figure == "fraction" and row.figures.get("never")
        ],
        "Do not believe the negative figure of {}: what was subtracted from it was disturbed.": [
            entry.name for entry in found if entry.value < 0
        ],
        "Suspect: {}, faster than the baseline.": [name(row) for row in good if plot.ratio and row.suspect],
    }
    return " ".join([*sentences, *(text.format(" and ".join(names)) for text, names in beware.items() if names)])


def compare_backends(plot: Plot, rows: Sequence[Row], *, name: Callable[[Row], str]) -> str:
    """Say on which backend lockkit's figure is lowest and highest."""
    key = _key(plot)
    entries = sorted(
        (_Entry(name(row), row.figures[key], row) for row in rows if row.status == "ok" and key in row.figures),
        key=lambda entry: entry.value,
    )
    if not entries:
        return "No backend has a figure to compare."
    low, high = entries[0], entries[-1]
    lowest, highest = _value(plot, low.value), _value(plot, high.value)
    if lowest == highest or 0 < high.value <= low.value * LEVEL:
        return f"All backends are level, at {lowest} to {highest}."
    # Not how many times as much, where it is many times what reads as nothing.
    if low.value > 0 and written(low.value, plot.unit).split()[0].removesuffix("/s") != "0":
        highest += f", {written(high.value / low.value, 'share')} times as much"
    return f"Lowest on {low.name} ({lowest}), highest on {high.name} ({highest})."


def _ours(entries: Sequence[_Entry]) -> _Entry | None:
    """Choose lockkit's sync API, if it was measured; of two equal entries the first."""
    found = [entry for entry in entries if entry.row.subject.role == "lockkit"]
    return min(found, key=lambda entry: (entry.row.subject.face != "blocking", entry.row.subject.number), default=None)


def _over_baseline(plot: Plot, section: Section, ours: _Entry) -> str:
    ratio = ours.row.over_baseline(section.workload)
    if not plot.ratio or ratio is None:
        return ""
    headline = next(figure for figure in section.workload.figures if figure.key == section.workload.headline)
    what = "" if headline.key == _key(plot) else f" ({headline.title})"
    return f", {written(ratio.median, 'share')} times the baseline{what}"


def _key(plot: Plot) -> str:
    return f"median_{plot.figure}" if plot.kind == "box" else plot.figure


def _value(plot: Plot, value: float) -> str:
    if plot.figure == "fraction":
        return f"{written(value, plot.unit)} ttl" if value >= 0.01 or value == 0 else "less than 0.01 ttl"
    return f"{written(value, plot.unit)}{' round trips' if plot.unit == 'trips' else ''}"
