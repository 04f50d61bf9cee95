"""``lockkit bench``: its options. What it does is loaded when it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

import typer

from lockkit.cli.app import add, argument, option, options, time
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
FaceChoice = StrEnum("FaceChoice", ["SYNC", "ASYNC", "BOTH"])
ServersChoice = StrEnum("ServersChoice", ["LOCAL", "DOCKER", "NONE"])

_FACES: dict[FaceChoice, list[Face]] = {
    FaceChoice.SYNC: ["blocking"],
    FaceChoice.ASYNC: ["asyncio"],
    FaceChoice.BOTH: ["blocking", "asyncio"],
}


def _count(about: str) -> Any:  # noqa: ANN401 - typer's
    return option(None, about, metavar="N", min=1)


def _time(least: float, about: str) -> Any:  # noqa: ANN401 - typer's
    """Make an option that is a time of at least so many seconds."""
    return time(None, about, _at_least(least))


def _at_least(least: float) -> Callable[[float | None], float | None]:
    def check(value: float | None) -> float | None:
        if value is not None and not least <= value < inf:
            raise typer.BadParameter(f"must be {least:g} or more seconds, not {value:g}")
        return value

    return check


@options
class Bench:
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

    urls: list[str] | None = argument(
        None, "URL", "lockkit backends. Default: the embedded ones, and those of --servers."
    )
    servers: ServersChoice = option(
        ServersChoice.NONE, "Also start throw-away servers and measure on them: local programs, containers, or none."
    )
    workload: list[WorkloadChoice] | None = option(
        None, f"Run only this workload; can be repeated. One of {', '.join(WORKLOAD_NAMES)}.", metavar="NAME"
    )
    face: FaceChoice | None = option(None, "Measure the sync or the async API. Default: both; with --quick sync.")
    peers: bool = option(True, "Also measure other libraries and hand-written baselines.")  # noqa: FBT003 - its default
    quick: bool = option(
        False,  # noqa: FBT003 - its default
        "A first look in less than two minutes: fewer workloads, short turns, more noise.",
    )
    rounds: int | None = _count("Turns of every subject.")
    long_rounds: int | None = _count("Turns in long workloads; no more than --rounds.")
    seconds: float | None = _time(0.01, "Duration of a turn in pair and contention.")
    processes: int | None = _count("Contenders.")
    waiters: int | None = _count("Idle waiters.")
    idle_seconds: float | None = _time(0.1, "How long to observe the idle waiters.")
    leases: int | None = _count("Held leases.")
    lease_ttl: float | None = _time(0.1, "ttl of the held leases, and how long they are held.")
    limit: float | None = _time(1, "Begin no turn after this time; the report says what was not reached.")
    seed: int | None = option(None, "Seed of the random order of the subjects.", metavar="N")
    as_json: bool = option(False, "Write the whole report as JSON.", "--json")  # noqa: FBT003 - its default
    html: Path | None = option(None, "Also write the report as one page with plots.", metavar="FILE", dir_okay=False)

    def run(self) -> int:
        if self.html is not None and not self.html.absolute().parent.is_dir():  # before the run, not after it
            raise typer.BadParameter(f"there is no directory {self.html.parent}", param_hint="--html")
        from lockkit_tools.bench.session import Session  # noqa: PLC0415 - see the module

        names = ("rounds", "seconds", "processes", "waiters", "idle_seconds", "leases", "lease_ttl", "limit")
        given = {"rounds_max_long": self.long_rounds} | {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        session = Session(
            replace(QUICK if self.quick else Settings(), **changed),
            workloads=list(dict.fromkeys(choice.value for choice in self.workload or ()))
            or (QUICK_WORKLOADS if self.quick else WORKLOAD_NAMES),
            faces=_FACES[self.face or (FaceChoice.SYNC if self.quick else FaceChoice.BOTH)],
            peers=self.peers,
            quick=self.quick,
            seed=self.seed,
        )
        return session.run(self.urls or [], self.servers.value, as_json=self.as_json, html=self.html)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    add(app, "bench", "Measure locks side by side.", Bench)
