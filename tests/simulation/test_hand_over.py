"""Tickets, progress and notes on simulated time: one holder and one taker, whatever happens to clients and network."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord, RenewalPlan
from lockkit.engine.leases import Leases
from lockkit.errors import LockError, LockLost
from lockkit_tools.simulation import CALM, Conditions, LockServer, Process
from tests.simulation.support import Stage, known_first, sleep

TTL = 2.0
STALL = 3.0
CALL_SECONDS = 0.5
SLOW_SECONDS = 3 * TTL
SEEDS = range(150)
CLIENTS = ("alice", "bob", "carol")

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


@dataclass
class Seen:
    """
    What happened to one lock.

    Attributes:
        leases: All that were granted, by acquiring and by tickets.
        beats: The last beat of each owner, true time.
        takers: How many have taken each ticket.
        problems: What broke a promise.
        stalled: How many leases were lost for lack of progress.
    """

    leases: list[Any] = field(default_factory=list)
    beats: dict[str, float] = field(default_factory=dict)
    takers: Counter[str] = field(default_factory=Counter)
    problems: set[str] = field(default_factory=set)
    stalled: int = 0
    note_token: int = 0

    def problem(self) -> str:
        """Say what is wrong; empty if nothing is."""
        twice = ["a ticket was taken twice"] if max(self.takers.values(), default=0) > 1 else []
        return "; ".join([*sorted(self.problems), *twice])

    def look(self, stage: Stage) -> None:
        """Compare what the clients believe with one another, and with the server."""
        believers = [lease for lease in self.leases if lease.held]
        if len(believers) > 1:
            self.problems.add("two holders")
        record = stage.server.records.get("x")
        last = None if record is None else self.beats.get(record.owner)
        if last is not None and stage.world.now > last + STALL + TTL + SLOW_SECONDS + CALL_SECONDS + 0.2:
            self.problems.add("held although its holder made no progress")
        if "x" in stage.server.notes:
            token = json.loads(stage.server.notes["x"][0])["token"]
            if token < self.note_token:
                self.problems.add("a former holder has overwritten the note")
            self.note_token = token


def granted(stage: Stage, seen: Seen, lease: Any) -> Any:  # noqa: ANN401 - of the asyncio API
    """Note a lease; the grant is its first beat."""
    if any(other.token >= lease.token for other in seen.leases):
        seen.problems.add("a token that is not larger")
    seen.leases.append(lease)
    seen.beats[lease.owner] = stage.world.now
    lease.on_lost(lambda _, reason: setattr(seen, "stalled", seen.stalled + (reason == "stalled")))
    return lease


async def serve(stage: Stage, process: Process, chance: random.Random, seen: Seen, queue: list[str]) -> None:
    """Acquire, or take what another one has handed over; work with or without progress; hand over, or release."""
    client = stage.client(process, call_timeout=CALL_SECONDS, ttl=TTL)
    while True:
        try:
            if queue and chance.random() < 0.7:
                ticket = chance.choice(queue)  # and leave it there: the message is delivered again
                lease = granted(stage, seen, await client.take(ticket, stall=STALL))
                seen.takers[ticket] += 1
            else:
                lease = granted(stage, seen, await client.lock("x", stall=STALL).acquire(chance.choice((0, 1.0, 5.0))))
            await work(stage, process, chance, seen, lease)
            if chance.random() < 0.5:
                queue.append(await lease.ticket(ttl=chance.choice((1.0, 5.0))))
            else:
                await lease.release()
            del lease
        except LockError:
            await sleep(process, chance.uniform(0.0, 0.5))


async def work(stage: Stage, process: Process, chance: random.Random, seen: Seen, lease: Any) -> None:  # noqa: ANN401
    """Work for a while; one in five is stuck."""
    stuck = chance.random() < 0.2
    for _ in range(chance.randrange(6)):
        await sleep(process, chance.uniform(0.0, 2 * STALL if stuck else STALL / 2))
        try:
            lease.beat()
        except LockLost:
            return
        seen.beats[lease.owner] = stage.world.now
        if chance.random() < 0.3:
            await lease.write_note({"at": stage.world.now})


def play(seed: int, server: type[LockServer] = LockServer) -> Seen:
    """Run one schedule: clients pause and crash, the network is cut, messages come late."""
    chance = random.Random(f"hand over {seed}")
    lost = chance.choice((0.0, 0.1, 0.2))
    conditions = Conditions(
        latency=(0.001, 0.01), requests_lost=lost, answers_lost=lost, slow=lost, slow_max=SLOW_SECONDS
    )
    stage = Stage(seed, conditions=conditions)
    stage.server = server(stage.node, stage.network, stage.history)
    seen, queue = Seen(), list[str]()
    processes = [stage.process(name, rate=1 + chance.uniform(-0.004, 0.004)) for name in CLIENTS]
    for process in processes:
        process.start(serve(stage, process, random.Random(f"{process.name} {seed}"), seen, queue), "serve")
    for _ in range(chance.choice((0, 2, 4))):
        at, process, seconds = chance.uniform(0.0, 40.0), chance.choice(processes), chance.uniform(0.1, 3 * TTL)
        kind = chance.random()
        if kind < 0.6:
            stage.world.call_at(at, process.pause)
            stage.world.call_at(at + seconds, process.resume)
        elif kind < 0.9:
            stage.world.call_at(at, stage.network.cut, process, stage.node)
            stage.world.call_at(at + seconds, stage.network.heal, process, stage.node)
        elif process is not processes[0]:
            stage.world.call_at(at, process.crash)
    for step in range(600):
        stage.world.call_at(step / 10, seen.look, stage)
    stage.world.call_at(50.0, setattr, stage.network, "conditions", CALM)
    stage.world.run(until=60.0)
    stage.end()
    return seen


def test_one_holder_and_one_taker_whatever_happens() -> None:
    """Tokens grow, notes are the newest holder's, and a holder that is stuck loses the lock."""
    histories = [play(seed) for seed in SEEDS]

    assert [(seed, seen.problem()) for seed, seen in zip(SEEDS, histories, strict=True) if seen.problem()] == []
    assert sum(sum(seen.takers.values()) for seen in histories) > len(histories)
    assert sum(seen.stalled for seen in histories) > len(histories) / 4
    assert sum(seen.note_token > 0 for seen in histories) > len(histories) / 2


class GivesTwice(LockServer):
    """Gives a lock to whoever has a ticket, and not only what the ticket's owner holds."""

    def take_over(
        self, client: Process, name: str, former: str, owner: str, *, ttl: float, metadata: str
    ) -> int | None:
        """Take it."""
        del former
        record = self._live(name, self.node.now())
        return (
            None if record is None else super().take_over(client, name, record.owner, owner, ttl=ttl, metadata=metadata)
        )


class KeepsTheToken(LockServer):
    """Hands a lock over without a larger token."""

    def take_over(
        self, client: Process, name: str, former: str, owner: str, *, ttl: float, metadata: str
    ) -> int | None:
        """Take it."""
        before = self.tokens.get(name, 0)
        if (token := super().take_over(client, name, former, owner, ttl=ttl, metadata=metadata)) is not None:
            self.records[name].token = self.tokens[name] = token = max(before, 1)
        return token


class AnybodyWrites(LockServer):
    """Writes a note without comparing the owner."""

    def write_note(self, name: str, owner: str, text: str, keep: float) -> bool:
        """Put it there."""
        del owner
        self.notes[name] = text, self.node.now() + keep
        return True


def beat_late(self: Engine[Any], record: LeaseRecord) -> None:
    """Believe again in a lease whose deadline has passed: the beat comes first, and not the clock."""
    if record.renewal.stalled:
        record.valid_until = self.runtime.now() + record.grant.ttl
    self.renewer.beat(record)
    record.check()


def keep_going(self: RenewalPlan, now: float) -> bool:
    """Have no beat ever missed."""
    del now
    self.stall_at = float("inf")
    return False


# A server, or what is broken in the client; what is found, and in which schedule it was.
MUTANTS: dict[str, tuple[type[LockServer], tuple[type, str, object] | None, str, int]] = {
    "ticket taken twice": (GivesTwice, None, "taken twice", 0),
    "same token": (KeepsTheToken, None, "not larger", 0),
    "note of a former holder": (AnybodyWrites, None, "overwritten the note", 14),
    "late beat": (LockServer, (Engine, "beat", beat_late), "two holders", 35),
    "no stall": (LockServer, (RenewalPlan, "beat", keep_going), "made no progress", 15),
    "giver goes on": (LockServer, (Leases, "hand_over", lambda *_: None), "two holders", 0),
}


@pytest.mark.parametrize(("server", "patch", "found", "known"), MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_found(
    server: type[LockServer],
    patch: tuple[type, str, object] | None,
    found: str,
    known: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the check that is for it, in one of the first schedules."""
    if patch is not None:
        monkeypatch.setattr(*patch)
    assert any(found in play(seed, server).problem() for seed in known_first(known, range(600)))
