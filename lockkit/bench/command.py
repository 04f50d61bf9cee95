"""``lockkit bench``: its options. What it does is loaded when it is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockkit.bench.options import QUICK_WORKLOADS, WORKLOAD_NAMES, FaceChoice, ServersChoice, WorkloadChoice
from lockkit.bench.settings import QUICK, Settings

if TYPE_CHECKING:
    from lockkit.bench.subject import Face

__all__ = ["bench", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("bench")(bench)


def bench(  # the signature is the command line
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...", help="Backends of lockkit. Default: the embedded ones, and those of --servers."
        ),
    ] = None,
    *,
    servers: Annotated[
        ServersChoice,
        typer.Option(
            help="Start throw-away servers and measure on them too: programs of this machine, containers, or none."
        ),
    ] = ServersChoice.NONE,
    workload: Annotated[
        list[WorkloadChoice] | None, typer.Option(help="Only this one; may be given several times.")
    ] = None,
    face: Annotated[
        FaceChoice | None, typer.Option(help="Blocking, asyncio, or both. Default: both; with --quick blocking.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure other libraries and hand-written baselines too.")] = True,
    quick: Annotated[
        bool, typer.Option(help="A first look in less than two minutes: fewer workloads, short turns, more noise.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often every subject takes its turn.")] = None,
    long_rounds: Annotated[
        int | None, typer.Option(min=1, help="The same for workloads that take long; no more than --rounds.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Length of a turn in pair and contention.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Contenders.")] = None,
    waiters: Annotated[int | None, typer.Option(min=1, help="Idle waiters.")] = None,
    idle_seconds: Annotated[float | None, typer.Option(min=0.1, help="How long they are watched.")] = None,
    leases: Annotated[int | None, typer.Option(min=1, help="Held leases.")] = None,
    lease_ttl: Annotated[
        float | None, typer.Option(min=0.1, help="Their ttl, seconds, and how long they are held.")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=1, help="Begin no turn after so many seconds; what was not reached is told."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the subjects.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole report as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write the report as one page with plots, too."),
    ] = None,
) -> None:
    """
    Measure locks side by side: lockkit on your URLs, other libraries in the same place, and hand-written baselines.

    Every subject runs in processes of its own; all take turns in random order, round after round, and ratios are taken
    within a round. A witness outside of all backends tells which locks did not exclude. Use servers that nobody else
    uses meanwhile, or let --servers=local start some; commands are counted for the whole server.

    Ctrl-C ends the run and reports what there is.

    Exit status: 0; 1 if lockkit broke exclusion or failed; 78 for a wrong URL; 130 after Ctrl-C.
    """
    if html is not None and not html.absolute().parent.is_dir():
        # Before the run, not after it.
        raise typer.BadParameter(f"there is no directory {html.parent}", param_hint="--html")
    from lockkit.bench.session import Wanted, run  # noqa: PLC0415 - see the module

    given: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "processes": processes, "waiters": waiters}
    given |= {"leases": leases, "lease_ttl": lease_ttl, "limit": limit}
    given |= {"rounds_max_long": long_rounds, "idle_seconds": idle_seconds}
    faces: tuple[Face, ...] = ("blocking", "asyncio")
    face = face or (FaceChoice.BLOCKING if quick else FaceChoice.BOTH)
    wanted = Wanted(
        urls=urls or [],
        servers=servers.value,
        several=not quick,
        workloads=[choice.value for choice in workload or ()] or (QUICK_WORKLOADS if quick else WORKLOAD_NAMES),
        faces=[kind for kind in faces if face in {FaceChoice.BOTH, kind}],
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
