"""
Replays the code against the models: is what it did an execution of the model?

A `Recorder` takes down what the code does on simulated time: what servers do, and what clients believe. Spin then
searches the model for an execution with exactly these events, in this order, and in about these ticks
(`models/common.h`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lockkit.aio import Lease
from lockkit.engine.lease_record import LeaseRecord, LeaseState
from lockkit_tools.simulation import Process, World
from tests.models.check import MODELS, call, spin

KINDS = {
    name: int(number)
    for name, number in re.findall(
        r"#define ([A-Z]+) (\d+)\n", (MODELS / "common.h").read_text().partition("* Replay")[2]
    )
}
"""What can be seen, by the names that the models have for it."""

OWNERS_MAX, TOKENS_MAX, EVENTS_MAX = 63, 63, 300
"""What `EVENT` has room for, and what a search can follow. A trace ends there: what begins an execution is one too."""


MEGABYTES_MAX = 300
"""For one trace. More decides some traces more, and takes longer until it gives up the others."""


class Event(NamedTuple):
    """One event: when, what, of which owner, with which answer, and what the server has then."""

    at: float
    kind: str
    owner: int
    value: int
    shown: int

    def line(self, tick: float) -> str:
        """Write it as `models/replay.h` reads it."""
        number = ((KINDS[self.kind] * 64 + self.owner) * 64 + self.value) * 1024 + self.shown
        return f"{number} {int(self.at / tick)}\n"


class Recorder:
    """
    The events of one schedule.

    What ends by itself, a key or a belief, is an event too: it is written down before the next one that comes later.

    Attributes:
        show: What the server has, as the model's `SHOWN`.
    """

    def __init__(
        self, world: World, clients: Sequence[Process], name_of: Callable[[Lease], str] = lambda lease: lease.owner
    ) -> None:
        self._name_of = name_of  # as the servers know the lease
        self.events: list[Event] = []
        self.show: Callable[[], int] = lambda: 0
        self.ends: dict[str, float] = {}  # of keys: when each ends, by its owner
        self.full = False
        self._world = world
        self._clients = {process.name: index for index, process in enumerate(clients)}
        self._owners: dict[str, int] = {}
        self._turns = dict.fromkeys(self._clients, 0)
        self._believed: dict[LeaseRecord, tuple[Process, str, float]] = {}
        self._tokens: set[int] = set()
        self._newest = 0

    def asks(self, process: Process, owner: str) -> None:
        """Note that a client sends a request; the first one of an owner gives it its number."""
        if owner not in self._owners:
            turn = self._turns[process.name]
            self._turns[process.name] += 1
            self._owners[owner] = 1 + self._clients[process.name] + len(self._clients) * turn
        self.add("ASKS", owner)

    def number(self, owner: str) -> int:
        """Give the number of an owner in the model; 0 of nobody."""
        return self._owners[owner] if owner else 0

    def client(self, owner: str) -> int:
        """Give the number of the client of an owner."""
        return (self._owners[owner] - 1) % len(self._clients)

    def token(self, token: int) -> int:
        """Give the rank of a token among those that were granted: tokens that increase have ranks that do."""
        self._tokens.add(token)
        return sorted(self._tokens).index(token) + 1

    def add(self, kind: str, owner: str, value: int = 0) -> None:
        """Note an event."""
        self.look()
        self._write(self._world.now, kind, self.number(owner), value)

    def does(self, process: Process, kind: str, value: int) -> None:
        """Note an event of a client that has no owner yet."""
        self.look()
        self._write(self._world.now, kind, 1 + self._clients[process.name], value)

    def holds(self, process: Process, lease: Lease) -> None:
        """Note that a client begins to believe in a lease."""
        self.add("HOLDS", self._name_of(lease), int(lease.token > self._newest))
        self._newest = max(self._newest, lease.token)
        self._believed[lease._record] = process, self._name_of(lease), self._true(process, lease._record)

    def crashes(self, process: Process) -> None:
        """Note that a client ends."""
        self.look()
        self._believed = {record: one for record, one in self._believed.items() if one[0] is not process}
        self.does(process, "CRASHED", 0)

    def look(self) -> None:
        """Note what has ended since, and what clients did to their leases in this step. Call it after each step."""
        now = self._world.now
        ended = [(until, "ENDS", owner) for _, owner, until in self._believed.values() if until <= now]
        ended += [(until, "EXPIRES", owner) for owner, until in self.ends.items() if until <= now]
        for until, kind, owner in sorted(ended):
            self._write(until, kind, self.number(owner), 0)
            self.ends.pop(owner, None) if kind == "EXPIRES" else None
        for record, (process, owner, until) in list(self._believed.items()):
            self._believed[record] = process, owner, self._true(process, record)
            if until <= now or record.state is not LeaseState.HELD:
                del self._believed[record]
                if until > now:
                    self._write(now, "ENDS", self.number(owner), 0)

    def _true(self, process: Process, record: LeaseRecord) -> float:
        return process.clock.true_time(record.valid_until)

    def _write(self, at: float, kind: str, owner: int, value: int) -> None:
        self.full = len(self.events) == EVENTS_MAX or self.full or owner > OWNERS_MAX or value > TOKENS_MAX
        if not self.full:
            self.events.append(Event(at, kind, owner, value, self.show()))


class Follower:
    """
    A model, compiled to follow traces.

    Args:
        folder: An empty one, for what Spin and the compiler write.
        tick: How long one is, seconds.
    """

    def __init__(self, model: str, flags: Sequence[str], folder: Path, *, tick: float) -> None:
        self.tick = tick
        self._program = folder / "pan"
        call(str(folder), spin(), "-a", "-DREPLAY", *flags, str(MODELS / f"{model}.pml"))
        options = ["-O0", "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEGABYTES_MAX}", f"-I{MODELS}"]
        call(str(folder), "gcc", *options, "-o", "pan", "pan.c")

    def follow(self, events: Sequence[Event]) -> int | None:
        """
        Return how many events the model allows, one after the other: all of them, or up to the first it does not.

        None: the search was given up, since it needs more than `MEGABYTES_MAX`.
        """
        text = "".join(event.line(self.tick) for event in events)
        done = subprocess.run(
            [self._program, "-m100000", "-w20", "-E"], input=text, capture_output=True, text=True, check=True,
            cwd=self._program.parent, timeout=60,
        )  # fmt: skip
        found = re.search(r"followed (\d+) of (\d+)", done.stdout)
        assert found is not None, done.stdout + done.stderr
        assert int(found[2]) == len(events), "the whole trace was read"
        return None if "Search not completed" in done.stdout and found[1] != found[2] else int(found[1])
