"""A history sorted by what it is about, for the checks. Reading it once is what makes each check a few lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from lockkit.units import Instant, Seconds
from lockkit_tools.simulation import history as h
from lockkit_tools.simulation.history import History

Span = tuple[float, float]


@dataclass(slots=True)
class SeenLease:
    """One lease as its client saw it."""

    acquired: h.Acquired
    deadlines: list[Span]  # since when, the deadline
    ended: float = inf  # since when the client itself does not count it as held
    lost: h.Unheld | None = None
    told: list[h.Told] = field(default_factory=list)
    looks: list[h.Looked] = field(default_factory=list)
    released: list[h.Released] = field(default_factory=list)
    dropped: bool = False


@dataclass(slots=True)
class SeenGrant:
    """One grant as the server saw it."""

    granted: h.Granted
    ends: list[Span]  # since when, the end
    freed: h.Freed | None = None


@dataclass(slots=True)
class SeenCall:
    """One call of ``acquire``."""

    called: h.Called
    end: h.Acquired | h.Failed | None = None


@dataclass(slots=True)
class Seen:
    """Everything."""

    ended: float
    calls: dict[int, SeenCall] = field(default_factory=dict)
    leases: dict[str, SeenLease] = field(default_factory=dict)  # as clients saw them, by owner
    # As the server saw them, by owner. An owner gets one grant; a second is a problem.
    grants_of: dict[str, list[SeenGrant]] = field(default_factory=lambda: defaultdict(list))
    grants: dict[str, list[h.Granted]] = field(default_factory=lambda: defaultdict(list))  # by name of the lock
    pauses: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    crashed: dict[str, float] = field(default_factory=dict)
    closed: dict[str, h.Closed] = field(default_factory=dict)
    faults: list[Span] = field(default_factory=list)  # when network or server were not well
    undone: dict[str, float] = field(default_factory=dict)  # when the server last ran an undo or release of an owner
    freed: list[h.Freed] = field(default_factory=list)
    # By name of the lock: when nobody held it, and how it had become free.
    free: dict[str, list[tuple[Span, str]]] = field(default_factory=lambda: defaultdict(list))
    quiet: list[h.Quiet] = field(default_factory=list)  # what was left at the server
    writes: list[h.Wrote] = field(default_factory=list)
    bugs: list[h.Stuck | h.Broken] = field(default_factory=list)  # what must not happen at all

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
    """Sort a history. What is about a lease that was never handed out is a `KeyError`: something is missing."""
    if not history or not isinstance(history[-1], h.Ended):
        raise IncompleteError("the history has no end")
    seen = Seen(history[-1].at)
    for event in history:
        _READERS[type(event)](seen, event)
    for name in {call.called.name for call in seen.calls.values()}:
        seen.free[name] = _free(seen, seen.grants[name])
    return seen


def _free(seen: Seen, grants: list[h.Granted]) -> list[tuple[Span, str]]:
    """When nobody held a lock at the server, and how the last lease before had ended."""
    free = []
    since, how = 0.0, "new"
    for granted in grants:
        free.append(((since, granted.at), how))
        grant = next(one for one in seen.grants_of[granted.owner] if one.granted is granted)
        since, how = (grant.ends[-1][1], "expired") if grant.freed is None else (grant.freed.at, grant.freed.how)
    free.append(((since, seen.ended), how))
    return free


def _acquired(seen: Seen, event: h.Acquired) -> None:
    seen.calls[event.call].end = event
    # Not if it was entered again by the task that held it.
    seen.leases.setdefault(event.owner, SeenLease(event, [(event.at, event.until)]))


def _unheld(seen: Seen, event: h.Unheld) -> None:
    lease = seen.leases[event.owner]
    lease.ended = min(lease.ended, event.at)
    lease.lost = lease.lost if event.why == "released" else event


def _resumed(seen: Seen, event: h.Resumed) -> None:
    start, _ = seen.pauses[event.client].pop()
    seen.pauses[event.client].append((start, event.at))


def _healed(seen: Seen, event: h.Healed) -> None:
    seen.faults[-1:] = [(start, event.at) for start, _ in seen.faults[-1:]]


def _granted(seen: Seen, event: h.Granted) -> None:
    seen.grants[event.name].append(event)
    seen.grants_of[event.owner].append(SeenGrant(event, [(event.at, event.until)]))


def _freed(seen: Seen, event: h.Freed) -> None:
    seen.freed.append(event)
    seen.grants_of[event.owner][-1].freed = event


_READERS: dict[type, Callable[[Seen, Any], object]] = {
    h.Called: lambda seen, event: seen.calls.update({event.call: SeenCall(event)}),
    h.Acquired: _acquired,
    h.Failed: lambda seen, event: setattr(seen.calls[event.call], "end", event),
    h.Believed: lambda seen, event: seen.leases[event.owner].deadlines.append((event.at, event.until)),
    h.Unheld: _unheld,
    h.Looked: lambda seen, event: seen.leases[event.owner].looks.append(event),
    h.Told: lambda seen, event: seen.leases[event.owner].told.append(event),
    h.Released: lambda seen, event: seen.leases[event.owner].released.append(event),
    h.Dropped: lambda seen, event: setattr(seen.leases[event.owner], "dropped", True),
    h.Paused: lambda seen, event: seen.pauses[event.client].append((event.at, inf)),
    h.Resumed: _resumed,
    h.Crashed: lambda seen, event: seen.crashed.update({event.client: event.at}),
    h.Closed: lambda seen, event: seen.closed.update({event.client: event}),
    h.Cut: lambda seen, event: seen.faults.append((event.at, inf)),
    h.Healed: _healed,
    h.Granted: _granted,
    h.Kept: lambda seen, event: seen.grants_of[event.owner][-1].ends.append((event.at, event.until)),
    h.Freed: _freed,
    h.Undone: lambda seen, event: seen.undone.update({event.owner: event.at}),
    h.Quiet: lambda seen, event: seen.quiet.append(event),
    h.Wrote: lambda seen, event: seen.writes.append(event),
    h.Stuck: lambda seen, event: seen.bugs.append(event),
    h.Broken: lambda seen, event: seen.bugs.append(event),
    h.DataLost: lambda _, __: None,  # each lease was freed with it
    h.Ended: lambda _, __: None,  # read first
}
