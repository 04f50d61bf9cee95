"""
What ``lockkit watch`` sees: it asks the backend, and compares the answers with those before.

It prints a line for each event; `lockkit.cli.watch` shows the same as a table.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import Any, Literal, NamedTuple

from lockkit.backend import Holder
from lockkit.cli.holders import Held, break_shown, describe, holders_of
from lockkit.cli.output import in_options, say
from lockkit.engine.lookup import SPACE_OF
from lockkit.engine.lookup import Kind as Named
from lockkit.errors import BackendUnavailable, Unsupported
from lockkit.runtime import monotonic, wall_clock
from lockkit.sync import Client
from lockkit.units import Instant, Seconds
from lockkit.validation import plain, shown

NAMES_MAX = 1000
"""Locks that are watched at most: each is one question per look. More would make a look last longer than its
interval, and load the server; fewer would not fill a large screen."""

WILDCARDS = re.compile(r"[*?]")

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

# -- asking ------------------------------------------------------------------------------------------------------------


class Sighting(NamedTuple):
    """One holder, as the backend described it; and when it was asked and answered, monotonic clock."""

    held: Held
    asked: Instant
    answered: Instant


class Look(NamedTuple):
    """Each holder of each lock at one time: `at` by the monotonic clock, `time` as Unix time."""

    sightings: Sequence[Sighting]
    at: Instant
    time: float
    cut: bool  # there were more than `NAMES_MAX` locks


class Looker:
    """Finds the locks that the user wants to see."""

    def __init__(self, client: Client, patterns: Sequence[str]) -> None:
        self._client = client
        self._names = [pattern for pattern in patterns if not WILDCARDS.search(pattern)]
        self._patterns = [pattern for pattern in patterns if WILDCARDS.search(pattern)] if patterns else ["*"]
        self._known: list[tuple[str, Named]] = []

    def look(self) -> Look:
        # What was seen before comes first, so that a cut list stays the same.
        chosen = dict.fromkeys([*product(self._names, SPACE_OF), *self._known])
        for found in self._listed():
            if found not in chosen and len(chosen) >= NAMES_MAX:
                cut = True
                break
            chosen[found] = None
        else:
            cut = False
        sightings: list[Sighting] = []
        for name, kind in chosen:
            asked = monotonic()
            holders = holders_of(self._client, name, kind)  # none: it was released since
            answered = monotonic()
            sightings += [Sighting(Held(name, kind, holder), asked, answered) for holder in holders]
        self._known = list(dict.fromkeys((held.name, held.kind) for held, _, _ in sightings))
        return Look(sightings, monotonic(), wall_clock(), cut)

    def _listed(self) -> Iterator[tuple[str, Named]]:
        for pattern, kind in product(self._patterns, SPACE_OF):
            expression = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
            matches = re.compile(expression, re.DOTALL).fullmatch
            try:
                names = self._client.names(WILDCARDS.split(pattern)[0], kind)
                yield from ((name, kind) for name in names if matches(name))
            except Unsupported as error:
                message = f"{error} For lockkit watch: give the names of the locks, without * and ?"
                raise Unsupported(message, backend=self._client.url) from error

    def break_lock(self, name: str, owners: Collection[str], permit: int | None = None) -> str:
        """Free a lock, or one permit of a semaphore, unless it has other holders than the user was shown."""
        what = repr(name) if permit is None else f"permit {permit} of {name!r}"
        broken = break_shown(self._client, name, permit, owners)
        if broken is None:
            return f"{what} has another holder by now: not broken"
        return f"broke {what}" if broken else f"nobody held {what} any more"


# -- comparing ---------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """One event. `held` is the holder after it, of a released lock the last one."""

    event: Literal["appeared", "changed", "renewed", "expiring", "released"]
    held: Held
    previous: Holder | None = None


@dataclass(slots=True)
class Record:
    """What was seen of one holder. Instants are of the monotonic clock."""

    held: Held  # as last seen
    since: Instant  # when it was first seen
    from_start: bool  # seen at the first look, so it holds the lock for longer than was seen
    seen: Instant  # when it was last seen
    expires: Instant | None = None  # when its lease ends unless it is renewed, at the latest; None: unknown
    longest: Seconds = 0.0  # the longest time left that was seen: the ttl, or less
    renewed: Instant | None = None  # when its last renewal was noticed; it was at most one look earlier
    interval: Seconds = 0.0  # the longest one between two renewals
    expiring: bool = False

    @property
    def missed(self) -> int | None:
        """
        How many renewals are overdue, at least.

        None if that cannot be told: no renewal was seen, so it is not known whether there are any, and how often.
        A renewal moves the expiry by the time since the one before, if the ttl is the same: so the distance of two is
        known, even when looks are rare (it is that of several then, and too few are counted).
        """
        if self.renewed is None:
            return None
        return max(0, int((self.seen - self.renewed) / self.interval - LATE_SHARE))

    def remaining(self, now: Instant) -> Seconds | None:
        """Tell the time left, if there was no renewal since the last look."""
        return None if self.expires is None else max(0.0, self.expires - now)

    def see(self, sighting: Sighting) -> list[Change]:
        """Add what was seen now: it is the same holder. Gives what has changed."""
        self.held, asked, self.seen = sighting
        remaining = self.held.holder.remaining
        if remaining is None:
            self.expires = None
            return []
        changes: list[Change] = []
        latest = self.seen + remaining
        if self.expires is not None:
            moved = asked + remaining - self.expires
            if moved > (WHOLE_SECONDS if remaining == int(remaining) else ROUNDED_SECONDS):
                self.renewed, self.expiring = self.seen, False
                self.interval = max(self.interval, latest - self.expires)
                changes.append(Change("renewed", self.held))
        self.longest = max(self.longest, remaining)
        self.expires = latest
        if not self.expiring and remaining < self.longest * EXPIRING_SHARE:
            self.expiring = True
            changes.append(Change("expiring", self.held))
        return changes


class Watched:
    """All holders of all locks, as last seen."""

    def __init__(self) -> None:
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
        new: list[Held] = []
        for sighting in look.sightings:
            held = sighting.held
            key = (held.name, held.kind, held.holder.owner, held.holder.token)
            record = before.pop(key, None)
            if record is None:
                record = Record(held, sighting.answered, not self._looked, sighting.answered)
                new.append(held)
            changes += record.see(sighting)
            self._records[key] = record
        self._looked = True
        # One event instead of two where one holder of an exclusive lock follows another.
        gone = [record.held for record in before.values()]
        left = {(*held[:2], held.holder.slot): held for held in gone if held.holder.mode == "exclusive"}
        for held in new:
            place = (*held[:2], held.holder.slot)
            previous = left.pop(place, None) if held.holder.mode == "exclusive" else None
            if previous is None:
                changes.append(Change("appeared", held))
            else:
                gone.remove(previous)
                changes.append(Change("changed", held, previous.holder))
        changes[:0] = [Change("released", held) for held in gone]
        return sorted(changes, key=lambda change: change.held.name)


# -- printing ----------------------------------------------------------------------------------------------------------


class Printer:
    """Prints a line for each event: in words, or as a JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._away = False
        self._cut = False

    def seen(self, look: Look, changes: Sequence[Change]) -> None:
        """Print what a look has changed."""
        if self._away:
            self._print("reachable", look.time, "again")
        self._away = False
        for event, held, previous in changes:
            kind = "" if held.kind == "lock" else f" ({held.kind_text})"
            words, values = f"{shown(held.name)}{kind}: {_about(held.holder)}", held.as_dict()
            if previous is not None:
                words += f", before: {_about(previous)}"
                values["previous"] = dataclasses.asdict(previous)
            self._print(event, look.time, words, **values)
        if look.cut and not self._cut:
            say(f"there are more locks: this shows the first {NAMES_MAX}; give a PATTERN")
        self._cut = look.cut

    def failed(self, error: BackendUnavailable) -> None:
        if not self._away:
            # A colon, not a column: the text may be long.
            self._print("unreachable:", wall_clock(), in_options(str(error)), error=str(error))
        self._away = True

    def _print(self, event: str, time: float, words: str, /, **values: Any) -> None:
        if self._as_json:
            line = json.dumps({"event": event.rstrip(":"), "at": round(time, 3), **values})
        else:
            line = f"{datetime.fromtimestamp(time, UTC).astimezone():%H:%M:%S} {event:<10} {words}"
        print(plain(line), flush=True)


def _about(holder: Holder) -> str:
    words = [describe(holder)]
    if holder.token is not None:
        words.append(f"token {holder.token}")
    if holder.mode == "shared":
        words.append(holder.mode)
    if holder.remaining is not None:
        words.append(f"{holder.remaining:.1f} s left")
    if holder.waiters:
        words.append(f"{holder.waiters} waiting")
    return ", ".join(words)
