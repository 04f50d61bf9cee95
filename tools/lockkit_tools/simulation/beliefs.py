"""
Judges leases that are held beside others: read/write locks and semaphores.

A `Belief` is the time in which a client may act on a lease: from when it was handed out to its deadline, release or
loss, in true time. `Witness` takes it down from outside, after each step of the client's process.

================ ==================================================================================================
check            what it says
================ ==================================================================================================
overlap          the belief of a writer overlaps no other of that lock; beliefs of readers may overlap each other
slots            no two beliefs of one slot at one instant
limit            at most as many beliefs at one instant as the semaphore has permits
own_limits       of clients with different limits, each gets a permit only if its own is not reached by older beliefs
tokens           no token twice; a later grant has the higher token, over all modes; clients get the token of the grant
guard            a guard refuses nobody who believes, and always a writer after a newer holder has come by, or a reader
                 after a newer writer has
progress         a waiting client is served, while others come and go
================ ==================================================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import attrgetter

from lockkit.aio import Lease
from lockkit.backend import Mode
from lockkit.engine.lease_record import LeaseRecord
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.checker import ROUNDING, Problem
from lockkit_tools.simulation.history import Granted
from lockkit_tools.simulation.world import Process, World


@dataclass(slots=True)
class Belief:
    """When a client may act on a lease."""

    name: str  # of the lock or semaphore
    client: str
    owner: str
    mode: Mode
    slot: int | None
    token: int  # as the client has it
    start: float
    end: float  # true time; moves with the deadline, until the belief is over

    def __str__(self) -> str:
        """Say whose it is."""
        what = f"slot {self.slot}" if self.mode == "permit" else self.mode
        return f"{self.client} ({self.name!r}, {what}, token {self.token}, {self.start:.6f} to {self.end:.6f})"

    def covers(self, at: float) -> bool:
        """Tell whether the client believes at this time, rounding aside."""
        return self.start - ROUNDING <= at < self.end - ROUNDING


@dataclass(frozen=True, slots=True)
class Access:
    """A holder came by at the storage, which compared its token."""

    at: float
    name: str
    owner: str
    token: int
    slot: int | None
    shared: bool
    accepted: bool


@dataclass(slots=True)
class Wait:
    """A call of ``acquire``; `end` stays ``inf`` if it never returned, and is its client's if that crashed."""

    name: str
    client: str
    mode: Mode
    start: float
    end: float = inf


@dataclass
class Witness:
    """Watches what clients believe."""

    world: World
    beliefs: list[Belief] = field(default_factory=list)  # in the order of their starts
    accesses: list[Access] = field(default_factory=list)  # in the order in which the storage saw them
    waits: list[Wait] = field(default_factory=list)  # in the order of the calls
    _watches: dict[str, list[Watch]] = field(default_factory=dict)

    def join(self, process: Process) -> None:
        """Watch a process from now on."""
        self._watches[process.name] = []
        process.probe = lambda: self._look(process)
        process.at_crash.append(lambda: self._crashed(process))

    def wait(self, process: Process, name: str, mode: Mode) -> Wait:
        """Note that a client calls ``acquire``; the caller sets `Wait.end` when it has returned."""
        wait = Wait(name, process.name, mode, self.world.now)
        self.waits.append(wait)
        return wait

    def watch(self, process: Process, lease: Lease, name: str) -> Watch:
        """Watch a lease that has just been handed out."""
        watch = Watch(self, process, lease._record, name)
        self._watches[process.name].append(watch)
        return watch

    def _look(self, process: Process) -> None:
        """Look at the fields: asking the lease would make it notice its loss."""
        watches = self._watches[process.name]
        for watch in watches:
            watch.look()
        watches[:] = [watch for watch in watches if not watch.over]

    def _crashed(self, process: Process) -> None:
        for watch in self._watches[process.name]:
            watch.end()
        for wait in self.waits:
            if wait.client == process.name:
                wait.end = min(wait.end, self.world.now)


class Watch:
    """A lease that is watched."""

    __slots__ = ("_process", "_record", "_valid_until", "_witness", "belief", "over")

    def __init__(self, witness: Witness, process: Process, record: LeaseRecord, name: str) -> None:
        self._witness = witness
        self._process = process
        self._record = record
        self._valid_until = record.valid_until
        self.over = False
        grant = record.grant
        self.belief = Belief(
            name, process.name, grant.owner, record.mode, grant.slot, grant.token, witness.world.now, self._until()
        )
        witness.beliefs.append(self.belief)

    def look(self) -> None:
        """Take down what has changed."""
        record = self._record
        if record.lost_reason is not None or record.released:
            self.end()
        elif record.valid_until != self._valid_until:
            self._valid_until = record.valid_until
            if self.belief.end < self._witness.world.now:
                self._renew_belief(self.belief.mode)  # it came back after its deadline
            self.belief.end = self._until()

    def weaken(self) -> None:
        """Believe as a reader only, from now on: the lease is about to be downgraded."""
        if self._witness.world.now < self.belief.end:
            until, self.belief.end = self.belief.end, self._witness.world.now
            self._renew_belief("shared")
            self.belief.end = until

    def end(self) -> None:
        """Believe no more."""
        self.over = True
        self.belief.end = min(self.belief.end, self._witness.world.now)

    def _renew_belief(self, mode: Mode) -> None:
        old, now = self.belief, self._witness.world.now
        self.belief = Belief(old.name, old.client, old.owner, mode, old.slot, old.token, now, now)
        self._witness.beliefs.append(self.belief)

    def _until(self) -> float:
        return self._process.clock.true_time(self._valid_until)


# -- the checks ----------------------------------------------------------------------------------------------------


def overlap(beliefs: Sequence[Belief]) -> Iterator[Problem]:
    """Yield the beliefs of writers that overlap another one."""
    for earlier, later in _pairs(beliefs):
        if earlier.mode == "exclusive" or later.mode == "exclusive":
            yield Problem("overlap", later.start, f"{later} believes while {earlier} does")


def slots(beliefs: Sequence[Belief]) -> Iterator[Problem]:
    """Yield the beliefs of one slot that overlap, and permits without a slot."""
    for belief in beliefs:
        if belief.slot is None:
            yield Problem("slots", belief.start, f"{belief} has no slot")
    for earlier, later in _pairs(beliefs):
        if earlier.slot == later.slot:
            yield Problem("slots", later.start, f"{later} believes while {earlier} does")


def limit(beliefs: Sequence[Belief], permits: int) -> Iterator[Problem]:
    """Yield the beliefs that began while all permits were held."""
    beside: dict[int, int] = defaultdict(int)
    for _, later in _pairs(beliefs):
        beside[id(later)] += 1
    for belief in beliefs:
        if beside[id(belief)] >= permits:
            yield Problem("limit", belief.start, f"{belief} believes beside {beside[id(belief)]}, of {permits} permits")


def own_limits(beliefs: Sequence[Belief], limits: Mapping[str, int]) -> Iterator[Problem]:
    """
    Yield the beliefs that began beside as many older ones as their client's own limit.

    What has a lower token and is believed in still was held at the grant. Younger ones do not count: a client with a
    higher limit may get a permit before the answer to this one has arrived.
    """
    older: dict[int, int] = defaultdict(int)
    for earlier, later in _pairs(beliefs):
        older[id(later)] += earlier.token < later.token
    for belief in beliefs:
        if older[id(belief)] >= limits[belief.client]:
            text = f"{belief} believes beside {older[id(belief)]} older, of its own limit {limits[belief.client]}"
            yield Problem("own_limits", belief.start, text)


def tokens(grants: Sequence[Granted], beliefs: Sequence[Belief]) -> Iterator[Problem]:
    """Yield the grants with a token that is not higher than the one before, and beliefs with another than granted."""
    by_name: dict[str, list[Granted]] = defaultdict(list)
    for granted in grants:
        by_name[granted.name].append(granted)
    for of_name in by_name.values():
        for before, after in pairwise(of_name):
            if after.token <= before.token:
                text = f"{after.name!r}: token {after.token} was granted after {before.token}"
                yield Problem("tokens", after.at, text)
    granted_to = {granted.owner: granted.token for granted in grants}
    for belief in beliefs:
        if belief.token != granted_to.get(belief.owner):
            text = f"{belief} was granted token {granted_to.get(belief.owner)}"
            yield Problem("tokens", belief.start, text)


def guard(accesses: Sequence[Access], beliefs: Sequence[Belief]) -> Iterator[Problem]:
    """Yield what a guard refused though its client believed, and accepted though a newer holder had come by."""
    by_owner: dict[str, list[Belief]] = defaultdict(list)
    for belief in beliefs:
        by_owner[belief.owner].append(belief)
    newest: dict[tuple[str, int | None, bool], int] = defaultdict(int)
    for access in accesses:
        place = access.name, access.slot
        who = f"{'a read' if access.shared else 'a write'} of {place} with token {access.token}"
        if not access.accepted:
            if any(one.covers(access.at) and (one.mode != "shared" or access.shared) for one in by_owner[access.owner]):
                yield Problem("guard", access.at, f"{who} was refused, though its client believed")
            continue
        # Of its own token only a reader's: the lease was downgraded.
        reads = 0 if access.shared else newest[(*place, True)]
        if access.token < newest[(*place, False)] or access.token < reads:
            yield Problem("guard", access.at, f"{who} was accepted after a newer one")
        key = (*place, access.shared)
        newest[key] = max(newest[key], access.token)


def progress(waits: Iterable[Wait], longest: Seconds, *, since: Instant, until: Instant) -> Iterator[Problem]:
    """Yield the calls that waited for longer than `longest` seconds between two times."""
    for wait in waits:
        waited = min(wait.end, until) - max(wait.start, since)
        if waited > longest:
            text = f"{wait.client} ({wait.name!r}, {wait.mode}) waited for {waited:.3f} s"
            yield Problem("progress", wait.start, text)


def _pairs(beliefs: Sequence[Belief]) -> Iterator[tuple[Belief, Belief]]:
    """Yield each two beliefs in one name that overlap, the earlier first."""
    by_name: dict[str, list[Belief]] = defaultdict(list)
    for belief in sorted(beliefs, key=attrgetter("start")):
        living = [one for one in by_name[belief.name] if one.end > belief.start + ROUNDING]
        if belief.end > belief.start + ROUNDING:
            for one in living:
                yield one, belief
            living.append(belief)
        by_name[belief.name] = living
