"""Once per key on simulated time: one completion, whatever happens to clients, network and server."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockkit.backend import Note
from lockkit.engine.lookup import Notes
from lockkit.errors import LockError
from lockkit.primitives.once import Attempt
from lockkit.units import Instant
from lockkit_tools.simulation import CALM, Conditions, LockServer, Process, draw
from tests.simulation.support import Stage, known_first, sleep
from tests.simulation.test_hand_over import AnybodyWrites

TTL = 2.0
CLIENTS = ("alice", "bob", "carol")
KEEP = 100_000.0
REPEATS = 15
SEEDS = range(100)

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


@dataclass
class Seen:
    """
    What happened to one key.

    Attributes:
        begun: Results of the runs that began.
        stored: Results whose `done` returned.
        repeats: Results that repeats got.
    """

    begun: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)

    def problem(self) -> str:
        """Say what is wrong; empty if nothing is."""
        if len(self.stored) > 1:
            return "completed twice"
        if len(set(self.repeats)) > 1:
            return "different results"
        if self.stored and self.repeats and self.stored[0] != self.repeats[0]:
            return "another result than the one that was stored"
        return "" if set(self.repeats) <= set(self.begun) else "a result of no run"


async def fail() -> None:
    """End a run in an error."""
    raise ValueError


async def work(stage: Stage, process: Process, chance: random.Random, seen: Seen) -> None:
    """Attempt the key until it is done, and some more; runs take their time, and some end in an error."""
    client = stage.client(process, call_timeout=chance.choice((0.1, 0.5, 1.0)), ttl=TTL)
    repeats = 0
    while repeats < REPEATS:
        result = f"{process.name} {len(seen.begun)}"
        try:
            async with client.once("key", keep=KEEP, timeout=chance.choice((None, 1.0, 0))) as attempt:
                if not attempt.first:
                    seen.repeats.append(attempt.result)
                    repeats += 1
                    await sleep(process, chance.uniform(0.0, 0.5))
                    continue
                seen.begun.append(result)
                await sleep(process, chance.uniform(0.0, 2 * TTL))
                await (fail() if chance.random() < 0.3 else attempt.done(result))
                seen.stored.append(result)
        except (LockError, ValueError):
            await sleep(process, chance.uniform(0.0, 0.5))


def play(seed: int, server: type[LockServer] = LockServer) -> Seen:
    """Run one schedule: clients pause and crash, the network is cut, the server pauses and restarts with its data."""
    chance = random.Random(f"once {seed}")
    schedule = draw(seed)
    conditions = schedule.conditions
    if chance.random() < 0.5:  # a note under way for longer than the lease is what a server must refuse
        conditions = Conditions(latency=(0.001, 0.01), requests_lost=0.2, answers_lost=0.2, slow=0.5, slow_max=5 * TTL)
    stage = Stage(seed, conditions=conditions)
    stage.server = server(stage.node, stage.network, stage.history, wakeup=schedule.wakeup)
    seen = Seen()
    processes = [stage.process(name, rate=1 + chance.uniform(-0.004, 0.004)) for name in CLIENTS]
    for process in processes:
        process.start(work(stage, process, random.Random(f"{process.name} {seed}"), seen), "work")
    for _ in range(chance.choice((0, 2, 5))):
        at, process, kind = chance.uniform(0.0, 10.0), chance.choice(processes), chance.random()
        seconds = chance.uniform(0.1, 3 * TTL)
        if kind < 0.5:
            stage.world.call_at(at, process.pause)
            stage.world.call_at(at + seconds, process.resume)
        elif kind < 0.7:
            stage.world.call_at(at, stage.network.cut, process, stage.node)
            stage.world.call_at(at + seconds, stage.network.heal, process, stage.node)
        elif kind < 0.8 and process is not processes[0]:
            stage.world.call_at(at, process.crash)
        else:
            stage.world.call_at(at, stage.node.stop)
            stage.world.call_at(at + seconds, stage.node.start)
    stage.world.call_at(20.0, setattr, stage.network, "conditions", CALM)
    stage.world.run(until=2000.0)
    stage.end()
    return seen


def test_key_completes_once_whatever_happens() -> None:
    """All repeats get the result of the one run that completed; in many schedules several began."""
    histories = [play(seed) for seed in SEEDS]

    assert [(seed, seen.problem()) for seed, seen in zip(SEEDS, histories, strict=True) if seen.problem()] == []
    assert all(seen.repeats for seen in histories)
    assert sum(len(seen.begun) > 1 for seen in histories) > len(histories) / 4


class Forgets(LockServer):
    """Ends a note with the lease of its writer."""

    def release(self, name: str, owner: str) -> bool:
        """Free the lock, and drop its note."""
        self.notes.pop(name, None)
        return super().release(name, owner)


@pytest.mark.parametrize(("server", "known"), [(AnybodyWrites, 55), (Forgets, 0)])
def test_broken_server_is_found(server: type[LockServer], known: int) -> None:
    """In one of the first schedules (of 2,000: a note that is under way for longer than a lease is rare)."""
    assert any(play(seed, server).problem() for seed in known_first(known, range(2000)))


def test_second_look_under_the_lock_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a client that waited for a run runs again."""
    read = Notes.read

    async def once_per_attempt(self: Notes, name: str, answer_by: Instant) -> Note | None:
        holds = any(record.grant.name == name for record in self._leases.all())
        return None if holds else await read(self, name, answer_by)

    monkeypatch.setattr(Notes, "read", once_per_attempt)

    assert any(play(seed).problem() for seed in SEEDS)


class StopsAlice(LockServer):
    """Stops alice while she looks at the note under the lock, for longer than her lease."""

    alice: Process

    def read_note(self, name: str) -> Note | None:
        """Read it."""
        record = self.records.get(name)
        if record is not None and record.client == "alice":
            self.alice.pause()
            self.alice.world.call_in(5 * TTL, self.alice.resume)
        return super().read_note(name)


def test_process_that_was_stopped_until_its_lease_had_ended_looks_again() -> None:
    """Another run has completed meanwhile: it does not run."""
    stage = Stage()
    stage.server = server = StopsAlice(stage.node, stage.network, stage.history)
    first: dict[str, bool] = {}

    async def attempt(process: Process) -> None:
        client = stage.client(process, ttl=TTL)
        await sleep(process, 0.0 if process.name == "alice" else 1.0)
        async with client.once("key", keep=KEEP) as attempt:
            first[process.name] = attempt.first
            if attempt.first:
                await attempt.done(process.name)
            assert attempt.result == "bob"

    server.alice = stage.process("alice")
    for process in (server.alice, stage.process("bob")):
        process.start(attempt(process), "attempt")
    stage.world.run(until=100.0)
    stage.end()

    assert first == {"alice": False, "bob": True}
    assert not stage.world.failures


def test_release_before_the_note_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in the wrong order: the note is refused, or the next run has begun."""
    complete = Attempt._complete

    async def released_first(self: Attempt, record: Any, outcome: str) -> None:  # noqa: ANN401 - a lease record
        engine = self._once.engine
        backend = engine.client.ready()
        await backend.release(record.grant)
        await complete(self, record, outcome)

    monkeypatch.setattr(Attempt, "_complete", released_first)

    assert any(play(seed).problem() or not play(seed).repeats for seed in SEEDS)
