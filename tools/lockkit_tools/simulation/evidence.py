"""A history sorted by what it is about, for the checks. Reading it once is what makes each check a few lines."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.history import (
    Acquired,
    Believed,
    Broken,
    Called,
    Closed,
    Crashed,
    Cut,
    DataLost,
    Dropped,
    Ended,
    Event,
    Failed,
    Freed,
    Granted,
    Healed,
    History,
    Kept,
    Looked,
    Paused,
    Quiet,
    Released,
    Resumed,
    Stuck,
    Told,
    Undone,
    Unheld,
    Wrote,
)

Span = tuple[float, float]


@dataclass(slots=True)
class SeenLease:
    """One lease as its client saw it."""

    acquired: Acquired
    deadlines: list[Span]  # since when, the deadline
    ended: float = inf  # since when the client itself does not count it as held
    lost: Unheld | None = None
    told: list[Told] = field(default_factory=list)
    looks: list[Looked] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    dropped: bool = False


@dataclass(slots=True)
class SeenGrant:
    """One grant as the server saw it."""

    granted: Granted
    ends: list[Span]  # since when, the end
    freed: Freed | None = None


@dataclass(slots=True)
class SeenCall:
    """One call of ``acquire``."""

    called: Called
    end: Acquired | Failed | None = None


@dataclass(slots=True)
class Seen:
    """
    Everything.

    Attributes:
        leases: As clients saw them, by owner.
        grants_of: As the server saw them, by owner. An owner gets one grant; a second is a problem.
        grants: As the server gave them, by name of the lock.
        free: By name of the lock: when nobody held it, and how it had become free.
        faults: When network or server were not well.
        data_lost: When the server lost its data.
        undone: When the server last ran an undo or release of an owner.
        quiet: What was left at the server.
        bugs: What must not happen at all.
    """

    ended: float
    calls: dict[int, SeenCall] = field(default_factory=dict)
    leases: dict[str, SeenLease] = field(default_factory=dict)
    grants_of: dict[str, list[SeenGrant]] = field(default_factory=lambda: defaultdict(list))
    grants: dict[str, list[Granted]] = field(default_factory=lambda: defaultdict(list))
    pauses: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    crashed: dict[str, float] = field(default_factory=dict)
    closed: dict[str, Closed] = field(default_factory=dict)
    faults: list[Span] = field(default_factory=list)
    data_lost: list[float] = field(default_factory=list)
    undone: dict[str, float] = field(default_factory=dict)
    freed: list[Freed] = field(default_factory=list)
    free: dict[str, list[tuple[Span, str]]] = field(default_factory=lambda: defaultdict(list))
    quiet: list[Quiet] = field(default_factory=list)
    writes: list[Wrote] = field(default_factory=list)
    bugs: list[Stuck | Broken] = field(default_factory=list)

    def alive_until(self, client: str) -> float:
        """When a client crashed; infinity if it did not."""
        return self.crashed.get(client, inf)

    def after_pauses(self, client: str, at: Instant, grace: Seconds) -> float:
        """When `grace` seconds after `at` are over for a client that may be stopped in between."""
        bound = at + grace
        for start, end in self.pauses.get(client, ()):
            if end > at and start <= bound:
                bound = max(bound, end + grace)
        return bound


class IncompleteError(Exception):
    """Something that must be in the history is missing."""


def read(history: History) -> Seen:
    """Sort a history."""
    if not history or not isinstance(history[-1], Ended):
        message = "the history has no end"
        raise IncompleteError(message)
    seen = Seen(history[-1].at)
    for event in history:
        _take(seen, event)
    for name in {call.called.name for call in seen.calls.values()}:
        seen.free[name] = _free(seen, seen.grants[name])
    return seen


def _free(seen: Seen, grants: list[Granted]) -> list[tuple[Span, str]]:
    """When nobody held a lock at the server, and how the last lease before had ended."""
    free = []
    since, how = 0.0, "new"
    for granted in grants:
        free.append(((since, granted.at), how))
        grant = next(one for one in seen.grants_of[granted.owner] if one.granted is granted)
        since, how = (grant.ends[-1][1], "expired") if grant.freed is None else (grant.freed.at, grant.freed.how)
    free.append(((since, seen.ended), how))
    return free


def _take(seen: Seen, event: Event) -> None:
    match event:
        case Called() | Acquired() | Failed():
            _take_call(seen, event)
        case Believed() | Unheld() | Looked() | Told() | Released() | Dropped():
            if event.owner not in seen.leases:
                message = f"no lease of owner {event.owner} was handed out"
                raise IncompleteError(message)
            _take_lease(seen.leases[event.owner], event)
        case Paused() | Resumed() | Crashed() | Closed() | Cut() | Healed():
            _take_fault(seen, event)
        case Granted() | Kept() | Freed() | Undone() | DataLost() | Quiet():
            _take_server(seen, event)
        case Wrote():
            seen.writes.append(event)
        case Stuck() | Broken():
            seen.bugs.append(event)
        case Ended():
            return  # read first
        case _:
            message = f"what is {event!r}?"  # type: ignore[unreachable]
            raise IncompleteError(message)


def _take_call(seen: Seen, event: Called | Acquired | Failed) -> None:
    if isinstance(event, Called):
        seen.calls[event.call] = SeenCall(event)
        return
    seen.calls[event.call].end = event
    # Not if it was entered again by the task that held it.
    if isinstance(event, Acquired) and event.owner not in seen.leases:
        seen.leases[event.owner] = SeenLease(event, [(event.at, event.until)])


def _take_lease(lease: SeenLease, event: Believed | Unheld | Looked | Told | Released | Dropped) -> None:
    match event:
        case Believed():
            lease.deadlines.append((event.at, event.until))
        case Unheld():
            lease.ended = min(lease.ended, event.at)
            lease.lost = lease.lost if event.why == "released" else event
        case Looked():
            lease.looks.append(event)
        case Told():
            lease.told.append(event)
        case Released():
            lease.released.append(event)
        case Dropped():
            lease.dropped = True


def _take_fault(seen: Seen, event: Paused | Resumed | Crashed | Closed | Cut | Healed) -> None:
    match event:
        case Paused():
            seen.pauses[event.client].append((event.at, inf))
        case Resumed():
            start, _ = seen.pauses[event.client].pop()
            seen.pauses[event.client].append((start, event.at))
        case Crashed():
            seen.crashed[event.client] = event.at
        case Closed():
            seen.closed[event.client] = event
        case Cut():
            seen.faults.append((event.at, inf))
        case Healed():
            seen.faults[-1:] = [(start, event.at) for start, _ in seen.faults[-1:]]


def _take_server(seen: Seen, event: Granted | Kept | Freed | Undone | DataLost | Quiet) -> None:
    match event:
        case Granted():
            seen.grants[event.name].append(event)
            seen.grants_of[event.owner].append(SeenGrant(event, [(event.at, event.until)]))
        case Kept():
            seen.grants_of[event.owner][-1].ends.append((event.at, event.until))
        case Freed():
            seen.freed.append(event)
            seen.grants_of[event.owner][-1].freed = event
        case Undone():
            seen.undone[event.owner] = event.at
        case DataLost():
            seen.data_lost.append(event.at)
        case Quiet():
            seen.quiet.append(event)
