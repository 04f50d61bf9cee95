"""Writes docs/comparison/measured/scale.md from the committed run of the benchmark about scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockkit_tools.bench.addresses import title
from lockkit_tools.bench.report import Report
from lockkit_tools.bench.settings import CONTENDERS
from tests.comparison.markdown import table
from tests.comparison.measured_page import DASH, run
from tests.comparison.runs import IDLE, SCALE, bench

PAGE = SCALE.parent.parent / "measured" / "scale.md"

LEASE_TTL = 30.0
"""Of the held leases in the table, seconds: the default."""

BUSY_PERCENT = 70.0
"""A machine that is busier has no time left: the start and the end of a turn, in which it idles, count too."""

COLUMNS = (
    ("throughput", ("pairs_1", "pairs_16", "machine_percent", "clients_percent")),
    ("sweep", ("pairs_16", "share_16")),
    ("held", ("leases", "ttl", "cpu_percent")),
    ("idle", ("waiters", "commands_per_second", "connections")),
)
"""What is taken from which workload."""

HEAD = (
    "# How far each backend goes\n\n"
    "<!-- Written by `nox -s comparison` from the runs in runs/: measure again to change it. -->\n\n"
    "lockkit's sync API, with clients and servers on one machine.\n"
    "[How far it scales](../../explanation/scale.md) says what to do at each limit.\n"
)


def text() -> str:
    """The whole page."""
    report = bench(SCALE)
    figures = _figures(report, bench(IDLE))
    lines = [
        HEAD,
        *_in_short(figures),
        "",
        *_names(figures),
        "",
        *_one_name(figures),
        "",
        *_leases(figures),
        "",
        *_waiters(figures),
        "",
    ]
    lines += ["## The run", "", *run(report, "../runs/scale.json")]
    return "\n".join([*lines, "- servers and versions: [Measured](../measured.md)"]) + "\n"


Figures = dict[str, dict[str, dict[str, float]]]
"""By backend and workload."""


def _figures(*reports: Report) -> Figures:
    found: Figures = {}
    for section in (section for report in reports for section in report.sections):
        for row in section.rows:
            if row.subject.role == "lockkit" and row.subject.face == "blocking" and row.status == "ok":
                found.setdefault(title(row.subject.group), {})[section.workload.name] = dict(row.figures)
    return found


def _in_short(figures: Figures) -> Iterator[str]:
    """The ends of three of the tables."""
    yield "**In short:**"
    yield ""
    for workload, key, what in (
        ("throughput", "pairs_16", "pairs a second by 16 processes, each with a lock of its own"),
        ("sweep", "pairs_16", "pairs a second by 16 processes with one lock"),
        ("idle", "connections", "connections of the clients that wait"),
    ):
        found = {backend: own[workload][key] for backend, own in figures.items() if key in own.get(workload, {})}
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        yield f"- {what}: from {found[low]:,.0f} on {low} to {found[high]:,.0f} on {high}"


def _names(figures: Figures) -> Iterator[str]:
    yield "## Pairs per second, each process with a lock of its own"
    yield ""
    yield "Processes acquire and release without waiting for each other."
    yield "On `memory` they are threads of one process."
    yield "The last columns are about the largest number of processes: how busy the machine was, and what was used up."
    yield ""
    head = ["backend", *(f"by {count}" for count in CONTENDERS), "machine busy", "by the clients", "limit"]
    rows = []
    for backend, found in figures.items():
        own = found.get("throughput", {})
        pairs = [_number(own.get(f"pairs_{count}")) for count in CONTENDERS]
        reached = "one interpreter" if backend == "memory" else limit(own)
        rows.append([backend, *pairs, _percent(own, "machine_percent"), _percent(own, "clients_percent"), reached])
    yield from table(head, rows)


def limit(figures: Mapping[str, float]) -> str:
    """Say what was used up."""
    busy, clients = figures.get("machine_percent"), figures.get("clients_percent")
    if busy is None or clients is None:
        return DASH
    if busy < BUSY_PERCENT:
        return "the disk or the network"
    return "the clients' processors" if clients >= 50 else "the server's processors"


def _one_name(figures: Figures) -> Iterator[str]:
    yield "## Pairs per second, all processes with the same lock"
    yield ""
    yield "Each pair is a hand-off, so more processes do not make it faster."
    yield "Fairness is the least-served process \N{DIVISION SIGN} the most-served one of 16."
    yield ""
    head = ["backend", *(f"by {count}" for count in CONTENDERS), "fairness"]
    rows = []
    for backend, found in figures.items():
        own = found.get("sweep", {})
        share = f"{own['share_16']:.2f}" if "share_16" in own else DASH
        rows.append([backend, *(_number(own.get(f"pairs_{count}")) for count in CONTENDERS), share])
    yield from table(head, rows)


def _leases(figures: Figures) -> Iterator[str]:
    yield "## Held leases"
    yield ""
    yield f"CPU time of the client for each 10,000 leases with a ttl of {LEASE_TTL:g} s, and how many fill one core."
    yield "Both are extrapolated from fewer leases with a shorter ttl: the number of renewals per second counts."
    yield "The modes `row` and `advisory` keep a connection for each lease, which is their limit."
    yield ""
    rows = []
    for backend, found in figures.items():
        own = found.get("held")
        if not own or "mode=" in backend or not own["cpu_percent"]:
            continue
        each = own["cpu_percent"] / own["leases"] * own["ttl"] / LEASE_TTL
        measured = f"{own['leases']:,.0f} of {own['ttl']:g} s: {own['cpu_percent']:.2f} %"
        rows.append([backend, measured, f"{each * 10_000:.1f} %", f"{_rounded(100 / each):,}"])
    yield from table(["backend", "measured", "10,000 leases", "leases that fill one core"], rows)


def _waiters(figures: Figures) -> Iterator[str]:
    yield "## Waiters"
    yield ""
    yield "What clients that wait for one lock cost the server, in one process."
    yield ""
    rows = []
    for backend, found in figures.items():
        own = found.get("idle")
        if own:
            commands = f"{own['commands_per_second']:,.1f}" if "commands_per_second" in own else DASH
            rows.append([backend, _number(own.get("waiters")), commands, _number(own.get("connections"))])
    yield from table(["backend", "waiters", "commands/s", "connections"], rows)


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _percent(figures: Mapping[str, float], key: str) -> str:
    return f"{figures[key]:.0f} %" if key in figures else DASH


def _rounded(value: float) -> int:
    """To two figures: it is extrapolated."""
    return int(float(f"{value:.2g}"))
