"""
Choices and options of the commands, as the commands get them. `lockkit.cli.app` says what each is for.

Times are seconds. None means that an option was not given.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of ``lockkit run``."""

    url: str | None
    profile: str | None
    ttl: float | None
    on_busy: OnBusy
    timeout: float | None
    grace: float | None
    kill_after: float
    wait_children: bool
    min_hold: float
    metadata: str | None
    once_per: str | None
    tz: str | None
    once: str | None
    attempts: int | None
    on_done: OnDone
    quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectOptions:
    """The options of ``lockkit elect``."""

    url: str | None
    profile: str | None
    ttl: float | None
    grace: float | None
    kill_after: float
    wait_children: bool
    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """The options of ``lockkit hold``."""

    url: str | None
    profile: str | None
    ttl: float | None
    timeout: float | None
    metadata: str | None
    renewals: bool
    as_json: bool
