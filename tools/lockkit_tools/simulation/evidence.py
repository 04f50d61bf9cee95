"""A history sorted by what it is about, for the checks. Reading it once is what makes each check a few lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
        ended: When the history ends.
        calls: By number.
        leases: As clients saw them, by owner.
        grants_of: As the server saw them, by owner. An owner gets one grant; a second is a problem.
        grants: As the server gave them, by name of the lock.
        free: By name of the lock: when nobody held it, and how it had become free.
        pauses: By client.
        crashed: By client.
        closed: By client.
        faults: When network or server were not well.
        data_lost: When the server lost its data.
        undone: When the server last ran an undo or release of an owner.
        freed: What the server freed.
        quiet: What was left at the server.
        writes: To the storage.
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
        reader = _READERS.get(type(event))
        if reader is None:
            message = f"what is {event!r}?"
            raise IncompleteError(message)
        reader(seen, event)
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


def _lease_of(seen: Seen, owner: str) -> SeenLease:
    if owner not in seen.leases:
        message = f"no lease of owner {owner} was handed out"
        raise IncompleteError(message)
    return seen.leases[owner]


def _read_called(seen: Seen, event: Called) -> None:
    seen.calls[event.call] = SeenCall(event)


def _read_acquired(seen: Seen, event: Acquired) -> None:
    seen.calls[event.call].end = event
    if event.owner in seen.leases:
        return  # entered again by the task that held it
    seen.leases[event.owner] = SeenLease(event, [(event.at, event.until)])


def _read_failed(seen: Seen, event: Failed) -> None:
    seen.calls[event.call].end = event


def _read_believed(seen: Seen, event: Believed) -> None:
    _lease_of(seen, event.owner).deadlines.append((event.at, event.until))


def _read_unheld(seen: Seen, event: Unheld) -> None:
    lease = _lease_of(seen, event.owner)
    lease.ended = min(lease.ended, event.at)
    if event.why != "released":
        lease.lost = event


def _read_looked(seen: Seen, event: Looked) -> None:
    _lease_of(seen, event.owner).looks.append(event)


def _read_told(seen: Seen, event: Told) -> None:
    _lease_of(seen, event.owner).told.append(event)


def _read_released(seen: Seen, event: Released) -> None:
    _lease_of(seen, event.owner).released.append(event)


def _read_dropped(seen: Seen, event: Dropped) -> None:
    _lease_of(seen, event.owner).dropped = True


def _read_paused(seen: Seen, event: Paused) -> None:
    seen.pauses[event.client].append((event.at, inf))


def _read_resumed(seen: Seen, event: Resumed) -> None:
    start, _ = seen.pauses[event.client].pop()
    seen.pauses[event.client].append((start, event.at))


def _read_crashed(seen: Seen, event: Crashed) -> None:
    seen.crashed[event.client] = event.at


def _read_closed(seen: Seen, event: Closed) -> None:
    seen.closed[event.client] = event


def _read_cut(seen: Seen, event: Cut) -> None:
    seen.faults.append((event.at, inf))


def _read_healed(seen: Seen, event: Healed) -> None:
    if seen.faults:
        start, _ = seen.faults.pop()
        seen.faults.append((start, event.at))


def _read_granted(seen: Seen, event: Granted) -> None:
    seen.grants[event.name].append(event)
    seen.grants_of[event.owner].append(SeenGrant(event, [(event.at, event.until)]))


def _read_kept(seen: Seen, event: Kept) -> None:
    seen.grants_of[event.owner][-1].ends.append((event.at, event.until))


def _read_freed(seen: Seen, event: Freed) -> None:
    seen.freed.append(event)
    seen.grants_of[event.owner][-1].freed = event


def _read_undone(seen: Seen, event: Undone) -> None:
    seen.undone[event.owner] = event.at


_READERS: dict[type, Callable[..., None]] = {
    Acquired: _read_acquired,
    Believed: _read_believed,
    Broken: lambda seen, event: seen.bugs.append(event),
    Called: _read_called,
    Closed: _read_closed,
    Crashed: _read_crashed,
    Cut: _read_cut,
    DataLost: lambda seen, event: seen.data_lost.append(event.at),
    Dropped: _read_dropped,
    Ended: lambda seen, event: None,  # noqa: ARG005 - read first
    Failed: _read_failed,
    Freed: _read_freed,
    Granted: _read_granted,
    Healed: _read_healed,
    Kept: _read_kept,
    Looked: _read_looked,
    Paused: _read_paused,
    Quiet: lambda seen, event: seen.quiet.append(event),
    Released: _read_released,
    Resumed: _read_resumed,
    Stuck: lambda seen, event: seen.bugs.append(event),
    Told: _read_told,
    Undone: _read_undone,
    Unheld: _read_unheld,
    Wrote: lambda seen, event: seen.writes.append(event),
}
