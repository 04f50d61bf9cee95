"""What to take from a plot, in one sentence, worked out from its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lockkit_tools.bench.page.choice import Plot, written
from lockkit_tools.bench.report import Row, Section
from lockkit_tools.bench.settings import CONTENDERS

LEVEL: Final = 1.15
"""Ratios repeat to within about 15 %: what is closer is not told apart."""

SAME: Final = 1.05
"""A ratio that close to 1 says no more than that."""

FAIR: Final = 0.5
"""Below it the least-served contender gets less than half of what the most-served one gets."""


class _Entry(NamedTuple):
    name: str
    value: float
    row: Row


def conclude(plot: Plot, section: Section, rows: Sequence[Row], *, name: Callable[[Row], str]) -> str:
    """Say how lockkit does in a plot of one backend, compared with the other libraries and with the baseline."""
    good = [row for row in rows if row.status == "ok"]
    if plot.kind == "columns":
        return _endurance(plot, good, name)
    found = [_Entry(name(row), row.figures[key], row) for row in good if (key := _key(plot)) in row.figures]
    entries = [entry for entry in found if entry.value >= 0]
    if plot.figure == "fraction":
        text = _takeover(plot, entries)
    elif plot.better == "fair":
        text = _fairness(plot, entries)
    else:
        text = _ranking(plot, section, entries)
    beware = {
        "With {} no other client got the lock at all.": [
            name(row) for row in good if plot.figure == "fraction" and row.figures.get("never")
        ],
        "Do not believe the negative figure of {}: what was subtracted from it was disturbed.": [
            entry.name for entry in found if entry.value < 0
        ],
        "Suspect: {}, faster than the baseline.": [name(row) for row in good if plot.ratio and row.suspect],
    }
    return " ".join([text, *(sentence.format(_listed(names)) for sentence, names in beware.items() if names)])


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
    if _level(plot, low.value, high.value):
        return f"All backends are level, at {_value(plot, low.value)} to {_value(plot, high.value)}."
    lowest, highest = _value(plot, low.value), _compared(plot, high.value, low.value)
    return f"Lowest on {low.name} ({lowest}), highest on {high.name} ({highest})."


# -- less or more ------------------------------------------------------------------------------------------------------


def _ranking(plot: Plot, section: Section, entries: Sequence[_Entry]) -> str:
    best_first = sorted(entries, key=lambda entry: entry.value, reverse=plot.better == "more")
    ours = _ours(best_first)
    others = [entry for entry in best_first if entry.row.subject.role == "peer"]
    # A library is compared in the same API, if it has any there.
    others = [entry for entry in others if ours and entry.row.subject.face == ours.row.subject.face] or others
    if ours is None:
        if not best_first:
            return "Nobody has a figure here that can be believed."
        first = (others or best_first)[0]
        what = "library" if others else "baseline"
        return f"lockkit has no figure here; the best {what} is {first.name} with {_value(plot, first.value)}."
    baseline = _over_baseline(plot, section, ours)
    if not others:
        return f"No other library was measured here: lockkit has {_value(plot, ours.value)}{baseline}."
    other = others[0]
    mine, its = _value(plot, ours.value), _value(plot, other.value)
    starves = ""
    if other.row.figures.get("share", 1.0) < FAIR and "share" in ours.row.figures:
        its_share, my_share = (written(entry.row.figures["share"], "share") for entry in (other, ours))
        starves = f" {other.name} is unfair (fairness {its_share}; lockkit {my_share})."
    if _level(plot, ours.value, other.value):
        return f"lockkit ({mine}) and the best other library, {other.name} ({its}), are level{baseline}.{starves}"
    extreme = "lowest" if plot.better == "less" else "highest"
    if (ours.value < other.value) == (plot.better == "less"):
        next_best = f"the next, {other.name}, has {_compared(plot, other.value, ours.value)}"
        return f"lockkit is {extreme} with {mine}{baseline}; {next_best}.{starves}"
    has = _compared(plot, ours.value, other.value)
    return f"{other.name} is {extreme} with {its}; lockkit has {has}{baseline}.{starves}"


def _ours(entries: Sequence[_Entry]) -> _Entry | None:
    """Choose lockkit's sync API, if it was measured; of two equal entries the first."""
    found = [entry for entry in entries if entry.row.subject.role == "lockkit"]
    return min(found, key=lambda entry: (entry.row.subject.face != "blocking", entry.row.subject.number), default=None)


def _over_baseline(plot: Plot, section: Section, ours: _Entry) -> str:
    ratio = ours.row.ratios.get(section.workload.headline, {}).get(ours.row.baseline or "")
    if not plot.ratio or ratio is None:
        return ""
    headline = next(figure for figure in section.workload.figures if figure.key == section.workload.headline)
    what = "" if headline.key == _key(plot) else f" ({headline.title})"
    return f", {_share(ratio.median)} the baseline{what}"


def _share(ratio: float) -> str:
    """Say how a figure compares with the baseline's."""
    if 1 / SAME < ratio < SAME:
        return "as much as"
    return f"{ratio:.0%} of" if ratio < 1 else f"{_times(ratio)}"


def _compared(plot: Plot, value: float, to: float) -> str:
    """Write a value, and how many times another it is; not where that is nothing, as far as one can read."""
    text = _value(plot, value)
    if to <= 0 or value <= 0 or "0" in {_number(plot, to), _number(plot, value)}:
        return text
    return f"{text}, {value / to:.0%} of that" if value < to else f"{text}, {_times(value / to)} as much"


# -- others ------------------------------------------------------------------------------------------------------------


def _takeover(plot: Plot, entries: Sequence[_Entry]) -> str:
    """
    Say when another client gets the lock.

    Sooner is not better here: a lock that is never renewed would have expired soon anyway.
    """
    ours = _ours(entries)
    others = sorted((entry for entry in entries if entry.row.subject.role == "peer"), key=lambda entry: entry.value)
    if ours is None:
        return "lockkit has no figure here."
    text = f"With lockkit another client gets the lock after {_value(plot, ours.value)}"
    if not others:
        return f"{text}."
    first, last = (f"{_value(plot, entry.value)} ({entry.name})" for entry in (others[0], others[-1]))
    return f"{text}; with other libraries after {first if len(others) == 1 else f'{first} to {last}'}."


def _fairness(plot: Plot, entries: Sequence[_Entry]) -> str:
    if not entries:
        return "Nobody has a figure here that can be believed."
    unfair = [entry for entry in sorted(entries, key=lambda entry: entry.value) if entry.value < FAIR]
    ours = _ours(entries)
    lockkit = "" if ours is None or ours in unfair else f" lockkit has {_value(plot, ours.value)}."
    if unfair:
        names = _listed([f"{entry.name} ({_value(plot, entry.value)})" for entry in unfair])
        return f"The least-served contender of {names} gets less than half as much as the most-served one.{lockkit}"
    least = min(entries, key=lambda entry: entry.value)
    lockkit = "" if least is ours else lockkit
    return f"No contender starves: the least fair is {least.name} with {_value(plot, least.value)}.{lockkit}"


def _endurance(plot: Plot, rows: Sequence[Row], name: Callable[[Row], str]) -> str:
    """Say how much is left of the throughput when many contend."""
    kept = []
    for row in rows:
        counts = [count for count in CONTENDERS if f"{plot.figure}_{count}" in row.figures]
        if len(counts) > 1 and row.figures[f"{plot.figure}_{counts[0]}"] > 0:
            share = row.figures[f"{plot.figure}_{counts[-1]}"] / row.figures[f"{plot.figure}_{counts[0]}"]
            kept.append((_Entry(name(row), share, row), counts[0], counts[-1]))
    entries = sorted((entry for entry, _, _ in kept), key=lambda entry: entry.value)
    ours = _ours(entries)
    if ours is None:
        return "lockkit has no figures here that can be compared."
    first, last = next((first, last) for entry, first, last in kept if entry is ours)
    others = [entry for entry in entries if entry.row.subject.role == "peer"]
    text = f"With {last} contenders instead of {first} lockkit does {_percent(ours.value)} of its pairs per second"
    if not others:
        return f"{text}; no other library was measured here."
    if len(others) == 1:
        return f"{text}, {others[0].name} {_percent(others[0].value)}."
    least, most = others[0], others[-1]
    keeps = f"{most.name} keeps most ({_percent(most.value)}) and {least.name} least ({_percent(least.value)})"
    return f"{text}; of the others {keeps}."


# -- words -------------------------------------------------------------------------------------------------------------


def _key(plot: Plot) -> str:
    return f"median_{plot.figure}" if plot.kind == "box" else plot.figure


def _value(plot: Plot, value: float) -> str:
    if plot.figure == "fraction":
        return f"{written(value, plot.unit)} ttl" if value >= 0.01 or value == 0 else "less than 0.01 ttl"
    return f"{written(value, plot.unit)}{' round trips' if plot.unit == 'trips' else ''}"


def _number(plot: Plot, value: float) -> str:
    """Write the number alone: ``0`` is what rounds to nothing."""
    return written(value, plot.unit).split()[0].removesuffix("/s")


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _level(plot: Plot, one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return _value(plot, low) == _value(plot, high) or (low > 0 and high <= low * LEVEL)


def _times(ratio: float) -> str:
    return f"{written(ratio, 'share')} times"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
