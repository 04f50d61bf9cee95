"""Choices and options of the commands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ElectOptions", "Face", "FailOn", "HoldOptions", "LabOptions", "OnBusy", "OnDone", "RunOptions"]


class Face(StrEnum):
    """The API on which ``lockkit verify`` runs the suite: sync (blocking) or async (asyncio)."""

    BLOCKING = "blocking"
    ASYNCIO = "asyncio"


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
    """
    The options of ``lockkit run``. Times are seconds.

    Attributes:
        url: Backend, or None.
        profile: Profile, or None.
        ttl: Of the lease; None: the client's default.
        on_busy: See `OnBusy`.
        timeout: How long to wait; None: without limit for ``wait``, not at all for the others.
        grace: Between SIGTERM and SIGKILL when the lease is about to end; None: `default_grace`.
        kill_after: Between a forwarded SIGTERM and SIGKILL.
        min_hold: Keep the lock at least so long, even if the command ends earlier.
        metadata: Text for ``lockkit holders``.
        once_per: Period of which each slot has one successful run, such as ``1d``; None: no such rule.
        tz: Time zone of the slots' dates; None: UTC.
        once: Key for which there is one successful run; None: no such rule.
        attempts: How often a slot or key is tried at most; None: without limit.
        on_done: See `OnDone`.
    """

    url: str | None
    profile: str | None
    ttl: float | None
    on_busy: OnBusy
    timeout: float | None
    grace: float | None
    kill_after: float
    min_hold: float
    metadata: str | None
    once_per: str | None = None
    tz: str | None = None
    once: str | None = None
    attempts: int | None = None
    on_done: OnDone = OnDone.SKIP


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectOptions:
    """
    The options of ``lockkit elect``. Times are seconds.

    Attributes:
        url: Backend, or None.
        profile: Profile, or None.
        ttl: Of the term; None: the client's default.
        grace: Between SIGTERM and the deadline; None: a third of the ttl.
        kill_after: Between a forwarded SIGTERM and SIGKILL.
        value: Text that others see as the leader's.
    """

    url: str | None
    profile: str | None
    ttl: float | None
    grace: float | None
    kill_after: float
    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """
    The options of ``lockkit lab``.

    Attributes:
        backend: Only the scenes that run there; None: all.
        fenced: Storage compares tokens; None: as the scenario says.
        ttl: Of the leases, seconds; None: as the scenario says.
        seed: Draws latencies; None: as the scenario says.
        svg: File to write a picture to.
        html: File to write a page to.
        toml: Print the scenario itself.
        real: Play it on real processes too.
        as_json: Print JSON.
    """

    backend: str | None = None
    fenced: bool | None = None
    ttl: float | None = None
    seed: int | None = None
    svg: Path | None = None
    html: Path | None = None
    toml: bool = False
    real: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """
    The options of ``lockkit hold``. Times are seconds.

    Attributes:
        url: Backend, or None.
        profile: Profile, or None.
        ttl: Of the lease; None: the client's default.
        timeout: How long to wait; None: without limit.
        metadata: Text for ``lockkit holders``.
        renewals: Tell of each renewal.
        as_json: Write JSON objects.
    """

    url: str | None
    profile: str | None
    ttl: float | None
    timeout: float | None
    metadata: str | None
    renewals: bool
    as_json: bool
