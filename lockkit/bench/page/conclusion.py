"""What to take from a plot, in one sentence, worked out from its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from lockkit.bench.page.choice import written
from lockkit.bench.settings import CONTENDERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockkit.bench.page.choice import Plot
    from lockkit.bench.report import Row, Section

__all__ = ["compare_backends", "conclude"]

LEVEL: Final = 1.15
"""Ratios repeat to within about 15 %: what is closer is not told apart."""

FAIR: Final = 0.5
"""Below it the least-served contender gets less than half of what the most-served one gets."""


class _Entry(NamedTuple):
    name: str
    value: float
    row: Row


def conclude(plot: Plot, section: Section, rows: Sequence[Row], *, name: Callable[[Row], str]) -> str:
    """
    Say how lockkit does in a plot of one backend, compared with the other libraries and with the baseline.

    Args:
        plot: Which.
        section: The workload's results.
        rows: Those in the plot. Only those that ended well count: what broke or failed has no figure to believe.
        name: What a row is called there.

    Returns:
        A sentence; two where there is something to beware of.
    """
    good = [row for row in rows if row.status == "ok"]
    say = {"fair": _fairness, "less": _ranking, "more": _ranking}[plot.better]
    if plot.kind == "columns":
        text = _endurance(plot, good, name)
    else:
        entries = [_Entry(name(row), row.figures[key], row) for row in good if (key := _key(plot)) in row.figures]
        text = say(plot, section, entries)
    never = [name(row) for row in good if plot.figure == "fraction" and row.figures.get("never")]
    suspects = [name(row) for row in good if plot.ratio and row.suspect]
    if never:
        text += f" With {_listed(never)} no other client got the lock at all."
    if suspects:
        text += f" Suspect: {_listed(suspects)}, faster than the baseline."
    return text


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
    if _close(low.value, high.value):
        return f"All backends are level, at {_value(plot, low.value)} to {_value(plot, high.value)}."
    times = f", {_times(high.value / low.value)} as much" if low.value > 0 else ""
    return (
        f"Lowest on {low.name} ({_value(plot, low.value)}), highest on {high.name} ({_value(plot, high.value)}{times})."
    )


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
    if _close(ours.value, other.value):
        return f"lockkit ({mine}) and the best other library, {other.name} ({its}), are level{baseline}."
    extreme = "lowest" if plot.better == "less" else "highest"
    is_ahead = (ours.value < other.value) == (plot.better == "less")
    if is_ahead:
        next_best = f"the next, {other.name}, has {_compared(its, other.value, ours.value)}"
        return f"lockkit is {extreme} with {mine}{baseline}; {next_best}."
    return f"{other.name} is {extreme} with {its}; lockkit has {_compared(mine, ours.value, other.value)}{baseline}."


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
    times = f"{ratio.median:.0%} of" if ratio.median < 1 else _times(ratio.median)
    return f", {times} the baseline{what}"


def _compared(text: str, value: float, to: float) -> str:
    if to <= 0 or value <= 0:
        return text
    return f"{text}, {value / to:.0%} of that" if value < to else f"{text}, {_times(value / to)} as much"


# -- others ------------------------------------------------------------------------------------------------------------


def _fairness(plot: Plot, section: Section, entries: Sequence[_Entry]) -> str:
    del section
    if not entries:
        return "Nobody has a figure here that can be believed."
    unfair = [entry for entry in sorted(entries, key=lambda entry: entry.value) if entry.value < FAIR]
    ours = _ours(entries)
    lockkit = "" if ours is None or ours in unfair else f" lockkit has {_value(plot, ours.value)}."
    if unfair:
        names = _listed([f"{entry.name} ({_value(plot, entry.value)})" for entry in unfair])
        return f"The least-served contender of {names} gets less than half as much as the most-served one.{lockkit}"
    least = min(entries, key=lambda entry: entry.value)
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
    text = f"With {last} contenders instead of {first} lockkit does {ours.value:.0%} of its pairs per second"
    if not others:
        return f"{text}; no other library was measured here."
    if len(others) == 1:
        return f"{text}, {others[0].name} {others[0].value:.0%}."
    least, most = others[0], others[-1]
    return (
        f"{text}; of the others {most.name} keeps most ({most.value:.0%}) and {least.name} least ({least.value:.0%})."
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _key(plot: Plot) -> str:
    return f"median_{plot.figure}" if plot.kind == "box" else plot.figure


def _value(plot: Plot, value: float) -> str:
    unit = " ttl" if plot.figure == "fraction" else " round trips" if plot.unit == "trips" else ""
    return f"{written(value, plot.unit)}{unit}"


def _close(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high <= low * LEVEL if low > 0 else high == low


def _times(ratio: float) -> str:
    return f"{written(ratio, 'share')} times"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
