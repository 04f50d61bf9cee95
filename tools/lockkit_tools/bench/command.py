"""``lockkit bench``: its options. What it does is loaded when it is run."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lockkit import validation
from lockkit_tools.bench.settings import QUICK, Settings
from lockkit_tools.bench.subject import Face

WORKLOAD_NAMES = (
    "pair", "contention", "handoff", "crash", "freeze", "distance", "sweep", "throughput", "idle", "held", "overhead",
    "read", "write", "readers", "permits", "locks", "election", "once", "import",
)  # fmt: skip
"""The keys of `lockkit_tools.bench.workloads.WORKLOADS`, in the order of the report."""

QUICK_WORKLOADS = ("pair", "contention", "handoff", "crash")
"""The default workloads of a first look."""

WorkloadChoice = StrEnum("WorkloadChoice", {name.upper(): name for name in WORKLOAD_NAMES})  # type: ignore[misc]


class FaceChoice(StrEnum):
    """Values of ``--face``."""

    SYNC = "sync"
    ASYNC = "async"
    BOTH = "both"


class ServersChoice(StrEnum):
    """Values of ``--servers``."""

    LOCAL = "local"
    DOCKER = "docker"
    NONE = "none"


FACES: dict[FaceChoice, list[Face]] = {
    FaceChoice.SYNC: ["blocking"],
    FaceChoice.ASYNC: ["asyncio"],
    FaceChoice.BOTH: ["blocking", "asyncio"],
}


def _count(what: str) -> Any:  # noqa: ANN401 - typer's
    return typer.Option(metavar="N", min=1, help=what)


def _time(least: float, what: str) -> Any:  # noqa: ANN401 - typer's
    """Make an option that is a time of at least so many seconds."""

    def parse(value: str | float) -> float:
        try:
            seconds = validation.parse_duration(value) if isinstance(value, str) else value
        except ValueError as error:
            raise typer.BadParameter(f"{error}, not {value!r}") from error
        if seconds < least:
            raise typer.BadParameter(f"must be {least:g} or more seconds, not {value}")
        return seconds

    return typer.Option(metavar="TIME", parser=parse, help=what)


Urls = Annotated[
    list[str] | None,
    typer.Argument(metavar="URL", help="lockkit backends. Default: the embedded ones, and those of --servers."),
]
Servers = Annotated[
    ServersChoice,
    typer.Option(help="Also start throw-away servers and measure on them: local programs, containers, or none."),
]
Workloads = Annotated[
    list[WorkloadChoice] | None,
    typer.Option(metavar="NAME", help=f"Run only this workload; can be repeated. One of {', '.join(WORKLOAD_NAMES)}."),
]
ChosenFace = Annotated[
    FaceChoice | None, typer.Option(help="Measure the sync or the async API. Default: both; with --quick sync.")
]
Peers = Annotated[bool, typer.Option(help="Also measure other libraries and hand-written baselines.")]
Quick = Annotated[
    bool, typer.Option(help="A first look in less than two minutes: fewer workloads, short turns, more noise.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write the report as one page with plots.")
]
Limit = Annotated[float | None, _time(1, "Begin no turn after this time; the report says what was not reached.")]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("bench", short_help="Measure locks side by side.")(bench)


def bench(  # the signature is the command line
    urls: Urls = None,
    *,
    servers: Servers = ServersChoice.NONE,
    workload: Workloads = None,
    face: ChosenFace = None,
    peers: Peers = True,
    quick: Quick = False,
    rounds: Annotated[int | None, _count("Turns of every subject.")] = None,
    long_rounds: Annotated[int | None, _count("Turns in long workloads; no more than --rounds.")] = None,
    seconds: Annotated[float | None, _time(0.01, "Duration of a turn in pair and contention.")] = None,
    processes: Annotated[int | None, _count("Contenders.")] = None,
    waiters: Annotated[int | None, _count("Idle waiters.")] = None,
    idle_seconds: Annotated[float | None, _time(0.1, "How long to observe the idle waiters.")] = None,
    leases: Annotated[int | None, _count("Held leases.")] = None,
    lease_ttl: Annotated[float | None, _time(0.1, "ttl of the held leases, and how long they are held.")] = None,
    limit: Limit = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the random order of the subjects.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole report as JSON.")] = False,
    html: Html = None,
) -> None:
    """
    Measure locks side by side: lockkit on your URLs, other libraries on the same servers, and hand-written baselines.

    Every subject runs in its own processes; all take turns in random order, round after round, and ratios are taken
    within a round. A witness outside every backend detects locks that let two in at once. Use servers that nobody else
    is using, or let --servers=local start some, because commands are counted for the whole server.

    Ctrl-C and SIGTERM end the run and report what was measured.

    Exit status: 0; 1 if lockkit broke exclusion or failed; 69 if a server does not answer, and then nothing was
    measured; 78 for a wrong URL, or if the page cannot be written; 128 + n if signal n ended it, such as 130 for
    Ctrl-C.
    """
    if html is not None and not html.absolute().parent.is_dir():  # before the run, not after it
        raise typer.BadParameter(f"there is no directory {html.parent}", param_hint="--html")
    from lockkit_tools.bench.session import Session  # noqa: PLC0415 - see the module

    given = {"rounds": rounds, "rounds_max_long": long_rounds, "seconds": seconds, "processes": processes}
    given |= {"waiters": waiters, "idle_seconds": idle_seconds, "leases": leases, "lease_ttl": lease_ttl}
    given["limit"] = limit
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    default = QUICK_WORKLOADS if quick else WORKLOAD_NAMES
    session = Session(
        replace(QUICK if quick else Settings(), **changed),
        workloads=list(dict.fromkeys(choice.value for choice in workload or ())) or default,
        faces=FACES[face or (FaceChoice.SYNC if quick else FaceChoice.BOTH)],
        peers=peers,
        quick=quick,
        seed=seed,
    )
    raise typer.Exit(session.run(urls or [], servers.value, as_json=as_json, html=html))
