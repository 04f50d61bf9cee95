"""Turns what happened in a simulation into a history that other checkers read: see `lockkit_tools.history`."""

from __future__ import annotations

from collections.abc import Iterator

from lockkit_tools.history import Stay
from lockkit_tools.simulation.checker import ROUNDING, believed
from lockkit_tools.simulation.evidence import Seen, SeenCall, SeenLease, read
from lockkit_tools.simulation.history import Acquired, History


def stays(history: History) -> Iterator[Stay]:
    """
    Give a stay for each call of ``acquire``.

    A holder believes in its lease until its deadline, or until it releases or loses it; no longer than the server has
    its data, and until somebody breaks the lock by force: no lock service could promise more.
    """
    seen = read(history)
    for call in seen.calls.values():
        yield _stay(seen, call)


def _stay(seen: Seen, call: SeenCall) -> Stay:
    called, end = call.called, call.end
    stay = Stay(called.name, called.client, _ns(called.at))
    if isinstance(end, Acquired):
        lease = seen.leases[end.owner]
        leaving = _last_belief(seen, lease)
        if leaving > end.at:  # else it was lost under way: whether it was ever held is not known
            stay.returned, stay.token, stay.leaving, stay.left = _ns(end.at), end.token, _ns(leaving), _left(lease)
    elif end is not None and end.error == "LockTimeout":
        stay.returned = _ns(end.at)
    return stay


def _last_belief(seen: Seen, lease: SeenLease) -> float:
    freed = [grant.freed for grant in seen.grants_of.get(lease.acquired.owner, ()) if grant.freed is not None]
    taken = [one.at for one in freed if one.how in {"broken", "lost"}]
    return min([max((end for _, end in believed(seen, lease)), default=0.0) - 2 * ROUNDING, *taken])


def _left(lease: SeenLease) -> int | None:
    """Give when its release returned, if that is what freed the lock."""
    ends = [released.at for released in lease.released if released.outcome == "ok"]
    return _ns(ends[0]) if ends and lease.lost is None else None


def _ns(at: float) -> int:
    return int(at * 1e9)
