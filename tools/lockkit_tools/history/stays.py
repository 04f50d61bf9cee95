"""Writes a history from what became of each acquisition, when a run is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from lockkit.testing.history import encode


@dataclass(slots=True)
class Stay:
    """A call that acquires a lock, and what ends its stay. Times are of one clock, nanoseconds."""

    lock: str  # its name
    client: str  # who called, for people
    called: int  # when ``acquire`` was called
    returned: int | None = None  # when it returned or raised; None if nobody knows whether it acquired the lock
    token: int | None = None  # fencing token of the lease; None if it was refused
    leaving: int = 0  # the last instant at which the holder surely held the lock: a release or loss comes after it
    # When ``release`` returned; None if nobody knows when the lock was free: the holder was killed, lost its lease or
    # got no answer.
    left: int | None = None


def write(path: Path, stays: Iterable[Stay]) -> None:
    """Write a history to a file, one operation a line: as JSON if its name ends in ``.json``, else as EDN."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(encode(operation, path) for operation in operations(stays))


def operations(stays: Iterable[Stay]) -> Iterator[dict[str, object]]:
    """
    Give the lines of a history.

    Processes are as in Jepsen: one makes one call after another, and none after a call whose end nobody knows. So each
    has at most one lock.
    """
    numbered = dict(enumerate(stays))
    # At one instant, calls begin before others end: that claims the least about their order.
    events = sorted((*event, number) for number, stay in numbered.items() for event in _events(stay))
    process_of: dict[int, int] = {}
    free, fresh = list[int](), count()
    for index, (time, _, f, kind, number) in enumerate(events):
        stay = numbered[number]
        if (f, kind) == ("acquire", "invoke"):
            process_of[number] = heappop(free) if free else next(fresh)
        if kind == "fail" or (f, kind) == ("release", "ok"):
            heappush(free, process_of[number])
        yield {
            "index": index,
            "process": process_of[number],
            "type": kind,
            "f": f,
            "value": stay.token if (f, kind) == ("acquire", "ok") else None,
            "time": time - events[0][0],
            "lock": stay.lock,
            "client": stay.client,
        }


def _events(stay: Stay) -> Iterator[tuple[int, int, str, str]]:
    """Give time, rank at that time, and what begins or ends."""
    yield stay.called, 0, "acquire", "invoke"
    if stay.returned is None:
        yield stay.called, 1, "acquire", "info"
        return
    yield stay.returned, 2, "acquire", "fail" if stay.token is None else "ok"
    if stay.token is not None:
        leaving = max(stay.leaving, stay.returned + 1)
        yield leaving, 0, "release", "invoke"
        yield (leaving, 1, "release", "info") if stay.left is None else (max(stay.left, leaving), 2, "release", "ok")
