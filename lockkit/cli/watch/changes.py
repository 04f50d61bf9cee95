"""What has changed between two looks, and what can be told of a holder that was seen several times."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lockkit.backend import Holder
from lockkit.cli.watch.looking import Look, Sighting
from lockkit.engine.lookup import Kind as Named
from lockkit.units import Instant, Seconds

Kind = Literal["appeared", "changed", "renewed", "expiring", "released"]

EXPIRING_SHARE = 1 / 3
"""Of the longest time left that was seen. lockkit renews when two thirds are left: below a third it has failed twice.
With a larger share a single late renewal is reported; with a smaller one the report comes when little can be done."""

WHOLE_SECONDS = 1.0
"""What a backend that answers in whole seconds (etcd) may be wrong by."""

ROUNDED_SECONDS = 0.02
"""What else an expiry may seem to move by: the server's clock against this one's, and milliseconds that are cut off."""

LATE_SHARE = 0.25
"""A renewal counts as missed when it is late by this share of the time between two: lockkit sends those of several
leases together, and repeats a failed one."""

INTERVALS_KEPT = 5
"""Of the last renewals; their median is what one expects. With fewer a single late one counts for much; more take
longer to follow a changed ttl."""


class Change(NamedTuple):
    """
    One event.

    Attributes:
        kind: What happened.
        name: To which lock.
        holder: Its holder now; of a released lock its last one.
        previous: Its holder before, if another has it now.
        of: What the name stands for.
    """

    kind: Kind
    name: str
    holder: Holder
    previous: Holder | None = None
    of: Named = "lock"


@dataclass(slots=True)
class Record:
    """
    What was seen of one holder of one lock.

    Attributes:
        name: The lock.
        holder: As last seen.
        since: When it was first seen, monotonic clock.
        from_start: It was there at the first look, so it holds the lock for longer than was seen.
        seen: When it was last seen, monotonic clock.
        expires: When its lease ends unless it is renewed, at the latest, monotonic clock; None if the backend does not
            know.
        longest: The longest time left that was seen, seconds: the ttl, or less.
        renewed: When its last renewal was noticed, monotonic clock; it was at most one look earlier.
        intervals: Between its last renewals, seconds.
        expiring: The lease is near its end.
        of: What the name stands for.
    """

    name: str
    holder: Holder
    since: Instant
    from_start: bool
    seen: Instant
    expires: Instant | None = None
    longest: Seconds = 0.0
    renewed: Instant | None = None
    intervals: deque[Seconds] = field(default_factory=lambda: deque(maxlen=INTERVALS_KEPT))
    expiring: bool = False
    of: Named = "lock"

    @property
    def missed(self) -> int | None:
        """
        How many renewals are overdue, at least.

        None if that cannot be told: no renewal was seen, so it is not known whether there are any, and how often.
        A renewal moves the expiry by the time since the one before, if the ttl is the same: so the distance of two is
        known, even when looks are rare (it is that of several then, and too few are counted).
        """
        if self.renewed is None or not self.intervals:
            return None
        return max(0, int((self.seen - self.renewed) / statistics.median_high(self.intervals) - LATE_SHARE))

    def remaining(self, now: Instant) -> Seconds | None:
        """Tell the time left, if there was no renewal since the last look."""
        return None if self.expires is None else max(0.0, self.expires - now)

    def see(self, sighting: Sighting) -> list[Change]:
        """Add what was seen now: it is the same holder. Gives what has changed."""
        self.holder, self.seen = sighting.holder, sighting.answered
        remaining = sighting.holder.remaining
        if remaining is None:
            self.expires = None
            return []
        changes: list[Change] = []
        latest = sighting.answered + remaining
        if self.expires is not None:
            moved = sighting.asked + remaining - self.expires
            if moved > (WHOLE_SECONDS if remaining == int(remaining) else ROUNDED_SECONDS):
                self.renewed, self.expiring = sighting.answered, False
                self.intervals.append(latest - self.expires)
                changes.append(Change("renewed", self.name, self.holder, of=self.of))
        self.longest = max(self.longest, remaining)
        self.expires = latest
        if not self.expiring and remaining < self.longest * EXPIRING_SHARE:
            self.expiring = True
            changes.append(Change("expiring", self.name, self.holder, of=self.of))
        return changes


class Watched:
    """All holders of all locks, as last seen."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._records: dict[tuple[str, Named, str, int | None], Record] = {}
        self._looked = False

    @property
    def records(self) -> list[Record]:
        """Those that hold a lock, in no particular order."""
        return list(self._records.values())

    def see(self, look: Look) -> list[Change]:
        """Compare a look with the one before; gives what has changed, in the order of the names."""
        before, self._records = self._records, {}
        changes: list[Change] = []
        new: list[Record] = []
        for sighting in look.sightings:
            holder = sighting.holder
            key = (sighting.name, sighting.kind, holder.owner, holder.token)
            record = before.pop(key, None)
            if record is None:
                first = sighting.answered
                record = Record(sighting.name, holder, first, not self._looked, first, of=sighting.kind)
                new.append(record)
            changes += record.see(sighting)
            self._records[key] = record
        self._looked = True
        changes += _handed_over(before.values(), new)
        return sorted(changes, key=lambda change: change.name)


def _handed_over(gone: Collection[Record], new: Collection[Record]) -> list[Change]:
    """Make one event of two where one holder of an exclusive lock follows another."""
    changes: list[Change] = []
    left = {(record.name, record.of): record.holder for record in gone if record.holder.mode == "exclusive"}
    followed = set()
    for record in new:
        place = record.name, record.of
        previous = left.get(place) if record.holder.mode == "exclusive" else None
        if previous is None:
            changes.append(Change("appeared", record.name, record.holder, of=record.of))
        else:
            followed.add(place)
            changes.append(Change("changed", record.name, record.holder, previous, record.of))
    ended = [record for record in gone if (record.name, record.of) not in followed]
    return [*(Change("released", record.name, record.holder, of=record.of) for record in ended), *changes]
