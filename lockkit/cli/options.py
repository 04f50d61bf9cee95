"""
Options of the commands, each in one place: what it is for, and how the command gets it.

Times are seconds. None means that an option was not given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lockkit import validation

R = TypeVar("R")

WATCH_SECONDS_MIN = 0.1
"""The shortest ``--interval`` of ``lockkit watch``. Below it the looks take longer than the pauses, and are load."""


class Face(StrEnum):
    """The API on which ``lockkit verify`` runs the suite."""

    SYNC = "sync"
    ASYNC = "async"


class OnBusy(StrEnum):
    """What to do when another client holds the lock."""

    WAIT = "wait"
    FAIL = "fail"
    SKIP = "skip"


class OnDone(StrEnum):
    """What to do when the command was done already."""

    SKIP = "skip"
    FAIL = "fail"


class FailOn(StrEnum):
    """The lowest severity for which ``lockkit doctor`` ends with 1."""

    ERROR = "error"
    WARNING = "warning"


# -- what the parser makes of the values -------------------------------------------------------------------------------


def _duration(value: str | float) -> float:
    """Parse the value of an option that is a time; a default is a number already."""
    if isinstance(value, float | int) or value.lower() in {"nan", "inf", "-inf"}:
        return float(value)  # of these the check of the range says what is wrong
    try:
        return validation.parse_duration(value)
    except ValueError as error:
        message = f"{error}, not {value!r}"
        raise typer.BadParameter(message) from error


def _seconds(value: float | None) -> float | None:
    try:
        return None if value is None else validation.parse_seconds(value)
    except ValueError as error:
        message = f"{error}, not {value:g}"
        raise typer.BadParameter(message) from error


def _interval(value: float) -> float:
    if not WATCH_SECONDS_MIN <= value < float("inf"):
        message = f"it must be {WATCH_SECONDS_MIN:g} or more seconds, not {value:g}"
        raise typer.BadParameter(message)
    return value


def time_option(text: str, check: Callable[..., object] | None = None) -> Any:  # noqa: ANN401 - as typer
    """Make an option that is a time."""
    return typer.Option(metavar="TIME", parser=_duration, callback=check, help=text)


# -- options of several commands ---------------------------------------------------------------------------------------

_URL_HELP = (
    "Backend. Default: LOCKKIT_URL, else the profile named by LOCKKIT_ENV, else the profile default; without any "
    "configuration files of this user on this machine. "
    "Put a URL with a password into LOCKKIT_URL or a profile: all users of the machine can see the command line."
)

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help=_URL_HELP)]
UrlArgument = Annotated[str | None, typer.Argument(metavar="URL", help=_URL_HELP, show_default=False)]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="PROFILE", help="Profile of lockkit.toml or pyproject.toml.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def complete_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a lock."""
    from lockkit.cli.completion import complete_name  # noqa: PLC0415 - see the module

    return complete_name(incomplete, ctx.params.get("url"), ctx.params.get("profile"))


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the lock.", show_default=False, autocompletion=complete_names)
]

KillAfter = Annotated[float, time_option("Time between forwarding a SIGTERM to COMMAND and sending SIGKILL.", _seconds)]
NoWaitChildren = Annotated[
    bool,
    typer.Option(
        "--no-wait-children", help="Release the lock when COMMAND ends, also while processes that it started still run."
    ),
]
Ttl = Annotated[
    float | None,
    time_option(
        "How long the backend keeps the lock without renewal, and so how long others wait after a machine dies. "
        "Default: that of the profile or the URL, else 30."
    ),
]
Metadata = Annotated[str | None, typer.Option(metavar="TEXT", help="Text that lockkit holders shows. Never a secret.")]


# -- options of one command --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of ``lockkit run``."""

    url: Url = None
    profile: Profile = None
    ttl: Ttl = None
    on_busy: Annotated[
        OnBusy,
        typer.Option(
            help="If another client holds the lock: wait for it, fail with exit status 75, or skip with exit status 0."
        ),
    ] = OnBusy.WAIT
    timeout: Annotated[
        float | None,
        time_option("How long to wait for the lock. Default: without limit; with fail and skip, try once."),
    ] = None
    signal_grace: Annotated[
        float | None,
        time_option(
            "Time between SIGTERM and SIGKILL when the lease is lost; at most half of the ttl. "
            "Default: a sixth of the ttl, at most 10.",
            _seconds,
        ),
    ] = None
    kill_after: KillAfter = 60
    no_wait_children: NoWaitChildren = False
    min_hold: Annotated[
        float,
        time_option(
            "Keep the lock at least this long, even if COMMAND ends earlier: for short jobs on machines whose "
            "clocks differ. A signal ends it.",
            _seconds,
        ),
    ] = 0
    metadata: Metadata = None
    once_per: Annotated[
        str | None,
        typer.Option(
            metavar="PERIOD",
            help="Run COMMAND only if no run has succeeded yet in this slot of time: 1d is a calendar day, 6h a "
            "quarter of one. Also s, m and w. Slots go by the backend's clock.",
        ),
    ] = None
    tz: Annotated[
        str | None,
        typer.Option("--tz", metavar="ZONE", help="Time zone of the slots, such as Europe/Berlin. Default: UTC."),
    ] = None
    once: Annotated[
        str | None, typer.Option(metavar="KEY", help="Run COMMAND only if no run has succeeded yet for this KEY.")
    ] = None
    attempts: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Start COMMAND at most N times for a slot or KEY, then end with status 76."
        ),
    ] = None
    on_done: Annotated[
        OnDone, typer.Option(help="If it was done already: skip with exit status 0, or fail with exit status 76.")
    ] = OnDone.SKIP
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no line when --on-busy=skip or --on-done=skip skips COMMAND.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectOptions:
    """The options of ``lockkit elect``."""

    url: Url = None
    profile: Profile = None
    ttl: Annotated[
        float | None,
        time_option(
            "How long others wait for the next term after a machine dies. Default: that of the profile or the "
            "URL, else 30."
        ),
    ] = None
    grace: Annotated[
        float | None,
        time_option("Time between SIGTERM and the deadline; below half of the ttl. Default: a third of the ttl."),
    ] = None
    kill_after: KillAfter = 60
    no_wait_children: NoWaitChildren = False
    value: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text that others see as the leader's, such as an address. Never a secret."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """The options of ``lockkit hold``."""

    url: Url = None
    profile: Profile = None
    ttl: Ttl = None
    timeout: Annotated[
        float | None, time_option("How long to wait for the lock; 0 tries once. Default: without limit.")
    ] = None
    metadata: Metadata = None
    renewals: Annotated[
        bool, typer.Option("--renewals", help="Write a line renewed, with the new deadline, after each renewal.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Write each line as a JSON object.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakOptions:
    """The options of ``lockkit break``."""

    url: Url = None
    profile: Profile = None
    permit: Annotated[
        int | None,
        typer.Option("--permit", min=0, max=999, metavar="N", help="Free this permit of the semaphore NAME instead."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Free it even if it may be data of an application.")] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """The options of ``lockkit watch``."""

    url: Url = None
    profile: Profile = None
    interval: Annotated[float, time_option("How often to ask the backend.", _interval)] = 1.0
    once: Annotated[bool, typer.Option("--once", help="Ask once, print what is held, and end.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False


def taking(options: type[Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the options of a dataclass, which it gets as `options`."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "options"]
        types = get_type_hints(options, include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(one.name, keyword, default=one.default, annotation=types[one.name])
            for one in fields(options)
        ]

        @wraps(command)
        def run(**given: Any) -> R:
            arguments = {one.name: given.pop(one.name) for one in own}
            return command(**arguments, options=options(**given))

        run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined] # what typer reads
        return run

    return decorate
