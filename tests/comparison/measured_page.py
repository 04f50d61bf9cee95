"""Writes docs/comparison/measured.md from the committed runs of the benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockkit_tools.bench.addresses import title
from lockkit_tools.bench.page.choice import PLOTS, written
from lockkit_tools.bench.page.conclusion import compare_backends
from lockkit_tools.bench.page.page import glance
from lockkit_tools.bench.report import Report, Row, Section
from lockkit_tools.bench.table import described, limited
from lockkit_tools.bench.workloads.base import Figure
from tests.comparison.markdown import cell, code, table
from tests.comparison.runs import BENCH, IDLE, PRIMITIVES, SCALE, bench, measured

PAGE = BENCH.parent.parent / "measured.md"

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
SUSPECT = "faster than its baseline: suspect, unless the lock by hand can be improved there"

HEAD = (
    "# Measured\n\n"
    "<!-- Written by `nox -s comparison` from the runs in runs/: measure again to change it. -->\n\n"
    "A run of `lockkit bench` in four parts: lockkit on every backend, other libraries on the same servers, "
    "and baselines: minimal locks, written by hand.\n"
    "Every subject ran in its own processes, and all took turns in random order.\n"
    "A witness outside every backend checked whether two contenders were ever inside at the same time.\n"
    "Measurements on your own servers say more than any page: see "
    "[Measure your servers](../how-to/measure-your-servers.md).\n\n"
    "Compare subjects on one backend: they used the same server in the same minutes.\n"
    "Times on different backends also compare the servers and how durable they are.\n"
    "Ratios repeat to within about 15 %, times only on such a machine.\n"
)


@dataclass(frozen=True, slots=True)
class Part:
    """
    A page of its own about some workloads.

    Attributes:
        name: Of its file.
        title: Heading.
        workloads: Their names, in order.
    """

    name: str
    title: str
    workloads: tuple[str, ...]

    @property
    def page(self) -> Path:
        """Its file."""
        return PAGE.parent / "measured" / f"{self.name}.md"


PARTS = (
    Part("one-lock", "What a lock costs", ("pair", "distance", "overhead", "import")),
    Part("contention", "What contention costs", ("contention", "sweep", "throughput", "handoff")),
    Part("takeover", "How soon a dead holder is replaced", ("crash", "freeze")),
    Part("waiting-and-holding", "What waiting and holding cost", ("idle", "held")),
    Part(
        "beyond-one-lock",
        "What readers, permits, elections and the rest cost",
        ("read", "write", "readers", "permits", "locks", "election", "once"),
    ),
)


def text() -> str:
    """The page with the runs, the servers, and lockkit on each backend."""
    report = measured()
    lines = [
        HEAD,
        *in_short(report, ("pair", "handoff", "crash")),
        "",
        "Figure by figure:",
        "",
        *(f"- [{part.title}](measured/{part.name}.md)" for part in PARTS),
        "",
    ]
    lines += [*_at_a_glance(report), "", "## The runs", "", *run(bench(), "runs/bench.json")]
    for path in (PRIMITIVES, SCALE, IDLE):
        names = ", ".join(f"`{section.workload.name}`" for section in bench(path).sections)
        lines += ["", f"Another part has {names}:", "", *run(bench(path), f"runs/{path.name}")]
    lines += ["", *_servers(report)]
    return "\n".join(lines) + "\n"


def part_text(part: Part) -> str:
    """The page of some workloads."""
    sections = {section.workload.name: section for section in measured().sections}
    lines = [
        f"# {part.title}\n",
        "<!-- Written by `nox -s comparison` from the runs in runs/: measure again to change it. -->\n",
        "Figures of the runs in [Measured](../measured.md), which has their dates, machine and servers.",
        "The last column is the multiple of the baseline; **lockkit** and *baselines* are set apart.",
        "",
        *in_short(measured(), part.workloads),
    ]
    for name in part.workloads:
        if name in sections and any(row.shown for row in sections[name].rows):
            lines += ["", *_workload(sections[name])]
    return "\n".join(lines) + "\n"


def in_short(report: Report, workloads: Sequence[str]) -> Iterator[str]:
    """The figures that decide, of lockkit's sync API over all backends: a sentence for each of three workloads."""
    # Not the overhead: a difference of two figures, negative where it drowns in noise.
    names = [name for name in workloads if name != "overhead"]
    sections = [section for section in report.sections if section.workload.name in names]
    several = [section for section in sections if len({row.subject.group for row in section.rows if _first(row)}) > 1]
    yield "**In short**, for lockkit's sync API:"
    yield ""
    for section in several[:3]:
        (plot, *_), rows = PLOTS[section.workload.name], list(filter(_first, section.rows))
        found = compare_backends(plot, rows, name=lambda row: title(row.subject.group))
        yield f"- {section.workload.title}: {found[0].lower()}{found[1:]}"


# -- the run -----------------------------------------------------------------------------------------------------------


def run(report: Report, link: str) -> Iterator[str]:
    """When, how and where a run was made, with a link to it."""
    about, machine = report.about, report.about["machine"]
    settings = report.outcome.settings
    facts = {
        "when": about["started"].replace("T", " ").replace("+00:00", " UTC"),
        "command": code(about["command"]),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        "system": f"{machine['system']}, {machine['python']}",
        "load before": f"{machine['load_before']:.1f} processes",
        "rounds": f"up to {settings.rounds}; {settings.rounds_max_long} for long workloads",
        "everything else": f"[{link.rpartition('/')[2]}]({link}), every figure of every round",
    }
    for what, fact in facts.items():
        yield f"- {what}: {fact}"
    if report.outcome.out_of_time:
        yield ""
        yield limited(report)
    for kind, reason in about["not_started"].items():
        yield ""
        yield f"Not measured: {kind}, {code(reason)}."


def _servers(report: Report) -> Iterator[str]:
    yield "## Servers and versions"
    yield ""
    yield (
        "A server that flushes every change to disk is slower than one that does not, "
        "but loses nothing in a power failure."
    )
    yield ""
    rows = [[title(group), described(server) or "-"] for group, server in report.about["servers"].items()]
    yield from table(["backend", "server and its durability"], rows)
    yield ""
    yield "Versions:"
    yield ""
    for name, version in sorted(report.about["versions"].items(), key=lambda entry: entry[0].lower()):
        yield f"- {name} {version}"


# -- all backends ------------------------------------------------------------------------------------------------------

GLANCE = (
    ("pair", "median_us", "us", "pair"),
    ("handoff", "median_ms", "ms", "hand-off"),
    ("crash", "fraction", "share", "killed holder, ttl"),
    ("freeze", "fraction", "share", "frozen holder, ttl"),
    ("distance", "pair_trips", "trips", "round trips"),
    ("idle", "commands_per_second", "per_s", "idle waiters"),
    ("held", "cpu_percent", "percent", "held leases, CPU"),
)
"""Workload, figure, its unit, and what it is called."""


def _at_a_glance(report: Report) -> Iterator[str]:
    yield "## lockkit on each backend"
    yield ""
    yield "The sync API: medians, and in brackets the multiple of the baseline, where there is one."
    yield "Killed and frozen holder: time until another client takes over, in multiples of the ttl."
    yield "Idle waiters: commands per second that 100 of them cost the server."
    yield ""
    sections = {section.workload.name: section for section in report.sections}
    columns = [entry for entry in GLANCE if entry[0] in sections]
    rows: dict[str, list[str]] = defaultdict(lambda: [DASH] * len(columns))
    for column, (name, figure, unit, _) in enumerate(columns):
        for row in sections[name].rows:
            if _first(row) and figure in row.figures:
                value = written(row.figures[figure], unit)  # type: ignore[arg-type]
                if (multiple := row.over_baseline(sections[name].workload)) is not None:
                    value += f" ({multiple.median:.2g}{TIMES})"
                rows[title(row.subject.group)][column] = value
    head = ["backend", *(called for *_, called in columns)]
    yield from table(head, [[backend, *values] for backend, values in rows.items()])
    for section in report.sections:
        drawn = glance(section)
        if drawn is not None:
            plot, chart = drawn
            yield ""
            yield f"### {section.workload.title}, on each"
            yield ""
            yield str(chart)
            yield ""
            yield sentences(plot.reads)
            yield "The plot does not show what each backend guarantees in return: see [Capabilities](capabilities.md)."


def _first(row: Row) -> bool:
    subject = row.subject
    return subject.role == "lockkit" and subject.face == "blocking" and subject.number == 1 and row.shown


# -- one workload ------------------------------------------------------------------------------------------------------


def _workload(section: Section) -> Iterator[str]:
    workload = section.workload
    rows = [row for row in section.rows if row.shown]
    figures = [figure for figure in workload.figures if figure.shown and any(figure.key in row.figures for row in rows)]
    baselines = any(row.baseline for row in rows)
    yield f"## {workload.title}"
    yield ""
    yield sentences(workload.explains)
    yield sentences(workload.silent)
    yield ""
    head = ["backend", "subject", *(figure.title for figure in figures)]
    if baselines:
        (headline,) = (figure.title for figure in workload.figures if figure.key == workload.headline)
        head.append(f"{TIMES} baseline, {headline}")
    order = [row.subject.group for row in rows]
    body = []
    for row in sorted(rows, key=lambda row: order.index(row.subject.group)):
        words = [title(row.subject.group), subject(row), *(spread(section, row, figure) for figure in figures)]
        body.append([*words, str(row.over_baseline(workload) or DASH)] if baselines else words)
    yield from table(head, body)
    yield from remarks(rows)


def subject(row: Row) -> str:
    """The name of a row; lockkit's rows and those that failed or did not exclude are marked."""
    name = row.subject.label + (" (asyncio)" if row.subject.face == "asyncio" else "")
    name = f"**{name}**" if row.subject.role == "lockkit" else f"*{name}*" if row.subject.role == "baseline" else name
    return name if row.status == "ok" else f"{name}: {row.status}"


def spread(section: Section, row: Row, figure: Figure) -> str:
    """A figure over all rounds, and the lowest and the highest of them where they were several."""
    value = row.figures.get(figure.key)
    if value is None:
        return DASH
    middle = f"{value:,.{figure.digits}f}"
    values = [
        entry["figures"][figure.key]
        for entry in section.rounds
        if entry["subject"] == row.subject.key and figure.key in entry["figures"]
    ]
    if figure.combine in {"max", "sum"} or len(values) < 2 or min(values) == max(values):
        return middle
    return f"{middle} ({min(values):,.{figure.digits}f}{DASH}{max(values):,.{figure.digits}f})"


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """The remarks on figures, each once with all subjects that it concerns."""
    said: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        doubt = [SUSPECT] if row.suspect else []
        for remark in ([f"{row.status}: {row.reason}"] if row.reason else []) + doubt + row.notes:
            said[remark].append(f"{row.subject.label} at {title(row.subject.group)}")
    if said:
        yield ""
    for remark, names in said.items():
        yield f"- {code(cell(remark))}: {', '.join(dict.fromkeys(names))}"


def sentences(prose: str) -> str:
    """Each on a line of its own."""
    return prose.replace(". ", ".\n").replace("? ", "?\n")
