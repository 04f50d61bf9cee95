"""``lockkit bench``: its options. What it does is loaded when it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lockkit import validation
from lockkit_tools.bench.options import QUICK_WORKLOADS, WORKLOAD_NAMES, FaceChoice, ServersChoice, WorkloadChoice
from lockkit_tools.bench.settings import QUICK, Settings
from lockkit_tools.bench.subject import Face


def _time(least: float) -> Callable[[str | float], float]:
    """Make a parser for an option that is a time of at least so many seconds; a default is a number already."""

    def parse(value: str | float) -> float:
        try:
            seconds = validation.parse_duration(value) if isinstance(value, str) else value
        except ValueError as error:
            message = f"{error}, not {value!r}"
            raise typer.BadParameter(message) from error
        if seconds < least:
            message = f"must be {least:g} or more seconds, not {value}"
            raise typer.BadParameter(message)
        return seconds

    return parse


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("bench", short_help="Measure locks side by side.")(bench)


def bench(  # the signature is the command line
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="lockkit backends. Default: the embedded ones, and those of --servers."),
    ] = None,
    *,
    servers: Annotated[
        ServersChoice,
        typer.Option(help="Also start throw-away servers and measure on them: local programs, containers, or none."),
    ] = ServersChoice.NONE,
    workload: Annotated[
        list[WorkloadChoice] | None,
        typer.Option(
            metavar="NAME", help=f"Run only this workload; can be repeated. One of {', '.join(WORKLOAD_NAMES)}."
        ),
    ] = None,
    face: Annotated[
        FaceChoice | None,
        typer.Option(help="Measure the sync or the async API. Default: both; with --quick sync."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also measure other libraries and hand-written baselines.")] = True,
    quick: Annotated[
        bool, typer.Option(help="A first look in less than two minutes: fewer workloads, short turns, more noise.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Turns of every subject.")] = None,
    long_rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Turns in long workloads; no more than --rounds.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=_time(0.01), help="Duration of a turn in pair and contention."),
    ] = None,
    processes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Contenders.")] = None,
    waiters: Annotated[int | None, typer.Option(metavar="N", min=1, help="Idle waiters.")] = None,
    idle_seconds: Annotated[
        float | None, typer.Option(metavar="TIME", parser=_time(0.1), help="How long to observe the idle waiters.")
    ] = None,
    leases: Annotated[int | None, typer.Option(metavar="N", min=1, help="Held leases.")] = None,
    lease_ttl: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=_time(0.1), help="ttl of the held leases, and how long they are held."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=_time(1), help="Begin no turn after this time; the report says what was not reached."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the random order of the subjects.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole report as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Also write the report as one page with plots."),
    ] = None,
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
    if html is not None and not html.absolute().parent.is_dir():
        # Before the run, not after it.
        raise typer.BadParameter(f"there is no directory {html.parent}", param_hint="--html")
    from lockkit_tools.bench.session import Wanted, run  # noqa: PLC0415 - see the module

    given: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "processes": processes, "waiters": waiters}
    given |= {"leases": leases, "lease_ttl": lease_ttl, "limit": limit}
    given |= {"rounds_max_long": long_rounds, "idle_seconds": idle_seconds}
    faces: dict[FaceChoice, Face] = {FaceChoice.SYNC: "blocking", FaceChoice.ASYNC: "asyncio"}
    face = face or (FaceChoice.SYNC if quick else FaceChoice.BOTH)
    wanted = Wanted(
        urls=urls or [],
        servers=servers.value,
        several=not quick,
        workloads=list(dict.fromkeys(choice.value for choice in workload or ()))
        or (QUICK_WORKLOADS if quick else WORKLOAD_NAMES),
        faces=[kind for choice, kind in faces.items() if face in {FaceChoice.BOTH, choice}],
        peers=peers,
        quick=quick,
        settings=replace(
            QUICK if quick else Settings(), **{name: value for name, value in given.items() if value is not None}
        ),
        seed=seed,
        as_json=as_json,
        html=html,
    )
    raise typer.Exit(run(wanted))
