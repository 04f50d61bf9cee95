"""Writes docs/comparison/peers.md: figures from the committed run of the benchmark, words from `peers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lockkit_tools.bench.addresses import title
from lockkit_tools.bench.page.choice import PLOTS, Unit, written
from lockkit_tools.bench.page.plots import draw
from lockkit_tools.bench.report import Report, Row, Section
from tests.comparison.markdown import cell, code, table
from tests.comparison.measured_page import DASH, TIMES, sentences, subject
from tests.comparison.peers import PEERS, Peer
from tests.comparison.runs import BENCH, measured

PAGE = BENCH.parent.parent / "peers.md"

NOISE = 1.05
"""Figures that differ by less than this count as equal."""


@dataclass(frozen=True, slots=True)
class Compared:
    """
    A figure that tells which of two subjects is better.

    Attributes:
        workload: Which measures it.
        figure: Its key.
        better: What is.
        unit: Of its values.
        called: What it is called.
        short: What it is called above a column; empty: it is in no table.
    """

    workload: str
    figure: str
    better: Literal["less", "more"]
    unit: Unit
    called: str
    short: str = ""


COMPARED = (
    Compared("pair", "median_us", "less", "us", "pair, median", "pair"),
    Compared("pair", "p99_us", "less", "us", "pair, p99"),
    Compared("contention", "pairs_per_second", "more", "per_s", "pairs under contention", "under contention"),
    Compared("contention", "share", "more", "share", "fairness", "fairness"),
    Compared("contention", "longest_wait_ms", "less", "ms", "longest wait under contention"),
    Compared("sweep", "pairs_16", "more", "per_s", "pairs by 16 processes"),
    Compared("throughput", "pairs_16", "more", "per_s", "pairs by 16 processes, different locks"),
    Compared("handoff", "median_ms", "less", "ms", "hand-off, median", "hand-off"),
    Compared("handoff", "p99_ms", "less", "ms", "hand-off, p99"),
    Compared("crash", "fraction", "less", "share", "killed holder, in ttl", "killed holder, ttl"),
    Compared("freeze", "fraction", "less", "share", "frozen holder, in ttl", "frozen holder, ttl"),
    Compared("distance", "pair_trips", "less", "trips", "round trips of a pair", "round trips"),
    Compared("distance", "handoff_trips", "less", "trips", "round trips of a hand-off"),
    Compared("idle", "commands_per_second", "less", "per_s", "commands of idle waiters", "idle waiters"),
    Compared("idle", "connections", "less", "trips", "connections of idle waiters", "their connections"),
    Compared("idle", "cpu_percent", "less", "percent", "CPU of idle waiters"),
    Compared("held", "cpu_percent", "less", "percent", "CPU of held leases", "held leases, CPU"),
    Compared("held", "connections", "less", "trips", "connections of held leases"),
)

HEAD = (
    "# Other libraries\n\n"
    "<!-- Written by `nox -s comparison` from the runs in runs/ and tests/comparison/peers.py: change it there. -->\n\n"
    "Every library here answers a real need, and several are the better choice for some jobs.\n"
    "The figures come from the runs in [Measured](measured.md), "
    "which also lists their dates, the machine, the commands and the durability of each server.\n"
    "Each library is used as its documentation says; "
    "exceptions are under [Not used with defaults](#not-used-with-defaults).\n"
)


def text() -> str:
    """The whole page."""
    report = measured()
    lines = [
        HEAD,
        *_in_short(report),
        "",
        *_libraries(report),
        "",
        *_better(report),
        "",
        *_backends(report),
        "",
        *_otherwise(report),
    ]
    return "\n".join(lines) + "\n"


# -- what each is ------------------------------------------------------------------------------------------------------


def _libraries(report: Report) -> Iterator[str]:
    yield "## What each offers, and what it leaves to you"
    for peer in PEERS:
        rows = [row for section in report.sections for row in section.rows if _library(row) == peer.label]
        version = next((row.subject.version for row in rows if row.subject.version), "")
        yield ""
        yield f"### {peer.label}"
        yield ""
        if version:
            yield f"Version {version}."
        yield sentences(peer.offers)
        yield ""
        yield f"**Verdict.**\n{peer.verdict}"
        yield from _record(report, peer)
        yield ""
        for sentence, test, *ours in peer.leaves:
            beside = f"; lockkit: `{ours[0]}`" if ours else ""
            yield f"- {sentence} (`{test}`{beside})"
        if not peer.ttl:
            yield "- Its locks have no ttl: they end with their process, connection or file."
        for sentence in _seen(report, peer):
            yield f"- {sentence}"


def _record(report: Report, peer: Peer) -> Iterator[str]:
    """The run in one sentence: in how many figures the library did better than lockkit, and in how many worse."""
    counts = _counts(report, peer)
    if total := counts.total():
        yield (
            f"In the run it did better than lockkit in {counts['better']} of {total} figures, "
            f"worse in {counts['worse']}, and about as well in {counts['equal']}."
        )


def _in_short(report: Report) -> Iterator[str]:
    """All libraries together."""
    counts = sum((_counts(report, peer) for peer in PEERS), Counter[str]())
    broke = sorted({_library(row) for section in report.sections for row in section.rows if row.status == "broken"})
    yield (
        f"**In short:** {len(PEERS)} libraries, {counts.total()} comparisons on the same server and API.\n"
        f"lockkit did better in {counts['worse']}, worse in {counts['better']}, "
        f"and about as well in {counts['equal']}.\n"
        + (f"Two holders at once were seen with: {', '.join(broke)}." if broke else "No two holders at once were seen.")
    )


def _counts(report: Report, peer: Peer) -> Counter[str]:
    """In how many figures a library did better than lockkit, worse, and about as well."""
    return Counter(
        "better" if better(compared, row, ours) else "worse" if better(compared, ours, row) else "equal"
        for compared, row, ours in _compared(report)
        if _library(row) == peer.label
    )


def _compared(report: Report) -> Iterator[tuple[Compared, Row, Row]]:
    """Each figure of another library with lockkit's on the same backend and API, if neither drowned in noise."""
    for compared in COMPARED:
        section = _section(report, compared.workload)
        for row in section.rows if section is not None else []:
            ours = section.ours(row) if section is not None and row.subject.role == "peer" else None
            if ours is None or row.status != "ok":
                continue
            if all(each.figures.get(compared.figure, -1) >= 0 for each in (row, ours)):
                yield compared, row, ours


def _library(row: Row) -> str:
    """Name the library of a row: what follows a comma in its label tells how it is used."""
    return row.subject.label.partition(",")[0]


def _seen(report: Report, peer: Peer) -> Iterator[str]:
    """What the run says of a library, in words."""
    rows = [row for section in report.sections for row in section.rows if _library(row) == peer.label]
    if not rows:
        yield "The run does not include it: see [Measure your servers](../how-to/measure-your-servers.md)."
        return
    polls = sorted({row.subject.poll for row in rows if row.subject.poll})
    if polls:
        said = "Its waiters poll" if peer.waits else "It does not wait: the benchmark polled"
        if not all(row.subject.poll for row in rows):
            said += f" at {'; '.join(sorted({title(row.subject.group) for row in rows if row.subject.poll}))}"
        yield f"{said}, every {' or '.join(f'{poll:g}' for poll in polls)} s."
    if peer.ttl and not any(row.subject.renews for row in rows):
        yield "It does not renew its locks."
    for section in report.sections:
        mine = [row for row in section.rows if _library(row) == peer.label]
        kept = sorted({title(row.subject.group) for row in mine if row.figures.get("never")})
        if kept:
            yield f"{section.workload.title}: no other client got the lock within three ttl, at {'; '.join(kept)}."
        for row in mine:
            if row.status in {"broken", "failed"}:
                yield f"{section.workload.title}: {row.status} at {title(row.subject.group)}, {code(cell(row.reason))}."


# -- where others are better -------------------------------------------------------------------------------------------


def _better(report: Report) -> Iterator[str]:
    yield "## Where they are better"
    yield ""
    yield (
        "Every figure in which a library did better than lockkit on the same backend and API "
        "by more than 5 %, as the median of the rounds."
    )
    yield (
        "A figure alone is not a verdict: a client that monopolises the lock reaches many pairs per second, "
        "a library that writes no token to disk is faster, "
        "and a lock that is never renewed is free sooner after its holder dies: it would have expired soon anyway."
    )
    yield ""
    order = [peer.label for peer in PEERS]
    rows = sorted(_wins(report), key=lambda row: order.index(row[0].removesuffix(" (asyncio)").partition(",")[0]))
    if rows:
        yield from table(["library", "backend", "figure", "its", "lockkit's", "lockkit's / its"], rows)
    else:
        yield "Nowhere in this run."


def _wins(report: Report) -> Iterator[list[str]]:
    for compared, row, ours in _compared(report):
        if found := better(compared, row, ours):
            names = [subject(row), title(row.subject.group), compared.called]
            values = [written(each.figures[compared.figure], compared.unit) for each in (row, ours)]
            yield [*names, *values, found]


def better(compared: Compared, theirs: Row, ours: Row) -> str:
    """How much worse lockkit is, as a multiple; empty if it is not."""
    its, own = theirs.figures[compared.figure], ours.figures[compared.figure]
    worse = own > its * NOISE if compared.better == "less" else its > own * NOISE
    if not worse:
        return ""
    return f"{own / its:.2g}{TIMES}" if its else "from nothing"


def _section(report: Report, name: str) -> Section | None:
    return next((section for section in report.sections if section.workload.name == name), None)


# -- backend by backend ------------------------------------------------------------------------------------------------


def _backends(report: Report) -> Iterator[str]:
    yield "## Backend by backend"
    yield ""
    yield "Medians of the rounds; *baselines* are written by hand, without a library."
    groups = dict.fromkeys(
        row.subject.group
        for section in report.sections
        for row in section.rows
        if row.subject.role == "peer" and row.shown and row.subject.group in report.about["servers"]
    )
    for group in groups:
        yield ""
        yield f"### {title(group)}"
        yield ""
        yield from _table(report, group)
        yield from _plot(report, group)


def _table(report: Report, group: str) -> Iterator[str]:
    columns = [compared for compared in COMPARED if compared.short]
    found: dict[str, dict[int, str]] = {}
    for number, compared in enumerate(columns):
        section = _section(report, compared.workload)
        for row in section.rows if section is not None else []:
            if row.subject.group != group or not row.shown:
                continue
            values = found.setdefault(subject(row).partition(":")[0], {})
            values[number] = _value(compared, row)
    used = [
        number for number in range(len(columns)) if any(values.get(number, DASH) != DASH for values in found.values())
    ]
    head = ["subject", *(columns[number].short for number in used)]
    yield from table(head, [[name, *(values.get(n, DASH) for n in used)] for name, values in found.items()])


def _value(compared: Compared, row: Row) -> str:
    if row.status in {"broken", "failed"}:
        return row.status
    if row.figures.get("never") and compared.figure == "fraction":
        return "never"
    value = row.figures.get(compared.figure)
    return DASH if value is None else written(value, compared.unit)


def _plot(report: Report, group: str) -> Iterator[str]:
    section = _section(report, "pair")
    if section is None:
        return
    (plot,) = PLOTS["pair"]
    rows = [row for row in section.rows if row.subject.group == group]
    chart = draw(plot, section, rows, name=lambda row: row.subject.label + FACES[row.subject.face])
    if chart is not None:
        yield ""
        yield str(chart)
        yield ""
        yield f"{sentences(plot.reads)}"
        yield "At the right: the shortest time of a pair, as a multiple of the baseline's."


FACES = {"blocking": "", "asyncio": " (asyncio)"}


def _otherwise(report: Report) -> Iterator[str]:
    """How the benchmark's use of a library differs from its defaults."""
    yield "## Not used with defaults"
    yield ""
    yield "A library's defaults would have stopped the measurement, or its documentation leaves a choice:"
    yield ""
    tuned: dict[str, list[str]] = {}
    for section in report.sections:
        for row in section.rows:
            if row.subject.tuning:
                tuned.setdefault(row.subject.tuning, []).append(row.subject.label)
    for tuning, labels in tuned.items():
        yield f"- {', '.join(dict.fromkeys(labels))}: {cell(tuning)}"
