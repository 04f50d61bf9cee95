"""
Candidates of one election on simulated time, and a checker of what their leaders do.

A leader asks ``must_stop``, and after each False takes a step that lasts as long as its grace at most: the time that it
needs to stop. From the answer to the end of the step it *acts*. Acts of different terms must never overlap, whatever
happens to the network and to the other processes. An act during which its own process is paused is exempt: no lock
service can promise anything then, and its token must be compared (`stale_acts`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from lockkit.aio import Election, Term
from lockkit.errors import LockError
from lockkit_tools.simulation import Conditions, Process
from tests.simulation.support import Stage, sleep

TTL = 2.0
SECONDS = 40.0
CANDIDATES = 3


class Act(NamedTuple):
    """What a leader did after it was told that it need not stop. True time."""

    start: float
    end: float
    term: int
    client: str
    exempt: bool


@dataclass
class Acts:
    """
    What happened.

    Attributes:
        done: The acts, in the order of their ends.
        pauses: How often each process has been paused.
    """

    done: list[Act] = field(default_factory=list)
    pauses: dict[str, int] = field(default_factory=dict)

    @property
    def terms(self) -> set[int]:
        """Return the terms in which a leader acted."""
        return {act.term for act in self.done}


def overlaps(acts: Acts) -> list[tuple[Act, Act]]:
    """Return the acts of different terms that overlap."""
    found = []
    counted = sorted(act for act in acts.done if not act.exempt)
    newest: Act | None = None
    for act in counted:
        if newest is not None and act.term != newest.term and act.start < newest.end:
            found.append((newest, act))
        if newest is None or act.end > newest.end:
            newest = act
    return found


def stale_acts(acts: Acts) -> list[tuple[Act, Act]]:
    """Return exempt acts that went on while a later term acted: what only the term number tells the storage."""
    return [
        (one, other)
        for one in acts.done
        for other in acts.done
        if one.exempt and one.term < other.term and one.start < other.end and other.start < one.end
    ]


def hold_elections(seed: int) -> Acts:
    """Run candidates through cut networks, pauses and crashes."""
    chance_of = Stage(seed).world.chance("election")
    slow = Conditions(requests_lost=0.02, answers_lost=0.02, slow=0.1, slow_max=0.3)
    stage = Stage(seed, conditions=slow)
    acts = Acts()
    for number in range(CANDIDATES):
        name = f"candidate{number}"
        process = stage.process(name, rate=chance_of.uniform(0.996, 1.004))
        acts.pauses[name] = 0
        chance = stage.world.chance(name)
        client = stage.client(process, call_timeout=0.1 * TTL, ttl=TTL)
        contest = client.election("x", ttl=TTL, grace=chance.choice((None, 0.2, 0.9)), value=name)
        process.start(_lead_again_and_again(stage, process, contest, acts, chance), "candidate")
        _schedule_faults(stage, process, acts, chance)
    stage.world.run(until=SECONDS)
    stage.end()
    return acts


async def _lead_again_and_again(
    stage: Stage, process: Process, contest: Election, acts: Acts, chance: random.Random
) -> None:
    while True:
        try:
            async with contest.campaign() as term:
                await _lead(stage, process, term, acts, chance)
        except LockError:
            await sleep(process, 0.1)


async def _lead(stage: Stage, process: Process, term: Term, acts: Acts, chance: random.Random) -> None:
    """Act until told to stop, or until it is enough."""
    enough = process.now() + chance.uniform(0.5, 5.0) * TTL
    while process.now() < enough:
        paused = acts.pauses[process.name]
        if await term.must_stop(chance.choice((0.0, 0.1, 0.5))):
            return
        start = stage.world.now
        await sleep(process, term.grace * chance.choice((0.1, 0.5, 0.98)))
        exempt = acts.pauses[process.name] != paused
        acts.done.append(Act(start, stage.world.now, term.token, process.name, exempt))


def _schedule_faults(stage: Stage, process: Process, acts: Acts, chance: random.Random) -> None:
    """Cut the process off, or pause it, several times; now and then it crashes."""
    at = 0.0
    while at < SECONDS:
        at += chance.uniform(1.0, 4.0) * TTL
        lasts = chance.uniform(0.1, 2.0) * TTL
        if chance.random() < 0.7:
            stage.world.call_at(at, stage.network.cut, process, stage.node)
            stage.world.call_at(at + lasts, stage.network.heal, process, stage.node)
        else:
            stage.world.call_at(at, _pause, process, acts)
            stage.world.call_at(at + lasts, process.resume)
    if chance.random() < 0.2:
        stage.world.call_at(chance.uniform(0.0, SECONDS), process.crash)


def _pause(process: Process, acts: Acts) -> None:
    if not process.dead and not process.paused:
        acts.pauses[process.name] += 1
        process.pause()
