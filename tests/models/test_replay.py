"""What the code does on simulated time is an execution of its model; what a mutant does is none."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lockkit.backend import Grant, Note
from lockkit.backends.redis.keys import Command
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.delayed_restart import DelayedRestart
from lockkit.backends.redlock.nodes import Answer, Argument
from lockkit.backends.redlock.votes import Attempts
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.engine.lookup import Notes
from lockkit.engine.ticket import Taking
from lockkit.lease import BaseLease
from lockkit.primitives.election import Tenure
from lockkit_tools.servers import require
from lockkit_tools.simulation.claims import ProcessClaim
from tests.models.redis_code import SteppedRedis
from tests.models.redlock_code import NotingNode
from tests.models.redlock_restart_code import RestartingNode
from tests.models.replay import Follower
from tests.models.replays import REPLAYS, replay
from tests.models.schedules import Plan
from tests.models.state_code import State
from tests.simulation.support import known_first
from tests.simulation.test_mutants import believe_from_the_answer
from tests.simulation.test_sharing import OneMark

SEEDS = range(20)
"""Of `nox -s tests`; `nox -s models` replays more."""

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")

Followers = dict[int, Follower]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, Followers]]:
    """The models, ready to follow traces."""
    require("redis", local=True)
    with ExitStack() as stack:
        yield {name: stack.enter_context(one.followers()) for name, one in REPLAYS.items()}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "lockkit")


@pytest.mark.parametrize("name", REPLAYS)
def test_code_does_what_its_model_allows(name: str, compiled: dict[str, Followers]) -> None:
    """Each event of each schedule, in this order, and at this time."""
    with REPLAYS[name].traces() as trace:
        for seed, events, allowed in replay(compiled[name], trace, SEEDS):
            assert allowed == len(events), (seed, events[:allowed], allowed and events[allowed])


def _altered(old: str, new: str, name: str) -> type[SteppedRedis]:
    """Make a server that has changed one of its scripts."""

    class Altered(SteppedRedis):
        def packed(self, script: Command, body: bytes) -> bytes:
            packed = super().packed(script, body)
            head, mark, rest = packed.partition(b"EVAL\r\n$")
            length, _, rest = rest.partition(b"\r\n")
            text, rest = rest[: int(length)], rest[int(length) :]
            if getattr(script, "name", "") == name:
                assert old.encode() in text, old
                text = text.replace(old.encode(), new.encode(), 1)
            return head + mark + b"%d\r\n" % len(text) + text + rest

    return Altered


class ReleasesAnybodys(NotingNode):
    """Deletes without comparing the value."""

    def release(self, lock: str, value: str) -> Answer:
        """Delete it."""
        return super().release(lock, self._get("lock", lock) or value)

    undo = release


class OneIsEnough(RedlockBackend):
    """Takes one of three nodes for a majority."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._quorum = 1


def use_value_again(
    self: Attempts, value: str, *, unused: bool = False, real: Callable[..., None] = Attempts.taken_back
) -> None:
    """Have the next attempt use a value for which nodes have voted."""
    del unused
    real(self, value, unused=True)


class ReaderBesideWriter(State):
    """A reader does not look whether a writer holds the lock."""

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        return claim.mode == "shared" or super()._fits_beside(claim)


class Overtakes(State):
    """Who fits does not look at the queue."""

    def _is_next(self, claim: ProcessClaim) -> bool:
        return claim.mode != "exclusive" or super()._is_next(claim)


class OnePermitTooMany(State):
    """Counts from 0."""

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        return super()._fits_beside(replace(claim, limit=claim.limit + 1))


class AnybodysNote(State):
    """Does not compare the owner."""

    def confirm(self, owner: str, now: float, dead: Callable[[ProcessClaim], bool] | None = None) -> None:
        """Take anybody for the holder."""


async def look_once(self: Notes, *asked: Any, real: Callable[..., Awaitable[Note | None]] = Notes.read) -> Note | None:
    """Have who holds a key not look again."""
    return None if self._leases.all() else await real(self, *asked)


def tell_once(self: Tenure, real: Callable[[Tenure], bool] = Tenure._look) -> bool:
    """Forget that the leader was told to stop."""
    over = real(self)
    self.over = self.failed = False
    return over


class TakenWithoutComparing(State):
    """Does not compare the owner that the ticket names."""

    def take_over(self, name: str, owner: str, claim: ProcessClaim, now: float, token_min: int) -> Grant | None:
        """Take the lock from the present holder, of any owner."""
        holder = owner if self.alone is None else self.alone.claim.owner
        return super().take_over(name, holder, claim, now, token_min)


class TokenKept(State):
    """Goes on under the token of the ticket."""

    def take_over(self, name: str, owner: str, claim: ProcessClaim, now: float, token_min: int) -> Grant | None:
        """Take it."""
        self.token -= 1
        return super().take_over(name, owner, claim, now, min(token_min, self.token))


async def count_from_the_repeat(
    self: Taking[Any], started: float, real: Callable[..., Awaitable[Any]] = Taking._ask
) -> object:
    """Count the deadline from the request that was answered, not from the first."""
    self._began = started
    return await real(self, started)


@dataclass(frozen=True)
class Mutant:
    """A mistake in the code, and a seed whose schedule shows it."""

    model: str
    seed: int
    parts: dict[str, Any] = field(default_factory=dict)
    patch: tuple[type, str, object] | None = None

    def is_refused(self, followers: Followers) -> bool:
        """Tell whether the model refuses one of its traces: that of the known schedule, or another one."""
        with pytest.MonkeyPatch.context() as patches, REPLAYS[self.model].traces(**self.parts) as trace:
            if self.patch is not None:
                patches.setattr(*self.patch)
            seeds = known_first(self.seed, range(100))
            return any(
                allowed is not None and allowed < len(events) for _, events, allowed in replay(followers, trace, seeds)
            )


class AdmittedInAnyRun(RestartingNode):
    """Does not compare the run that was looked at."""

    def admit(self, lock: str, wait_ms: int, ttl_ms: int, looked_at: bytes) -> Answer:
        """Mark it."""
        del looked_at
        return super().admit(lock, wait_ms, ttl_ms, b"")


class MarkReadBefore(RestartingNode):
    """Votes by the mark that it had at the vote before."""

    former: dict[str, int] | None = None

    def acquire(self, lock: str, value: str, ttl_ms: int, *others: Argument) -> Answer:
        """Vote."""
        mark, former = self.mark, self.former
        self.former = mark
        self.mark = mark or (former and {**former, "run": self.run})
        answer = super().acquire(lock, value, ttl_ms, *others)
        self.mark = mark
        return answer


def voting_at_once(decide: Callable[[int, int], bool]) -> tuple[type, str, object]:
    """Have nodes vote at once: by how many of the nodes that answered are not marked."""
    real = DelayedRestart._mark

    async def mark(self: DelayedRestart, unmarked: list[int], looks: dict[int, Any], *, at_once: bool) -> None:
        await real(self, unmarked, looks, at_once=at_once or decide(len(unmarked), len(looks)))

    return DelayedRestart, "_mark", mark


LATE = (LeaseRecord, "set_deadline", believe_from_the_answer)
MUTANTS = {
    "release.lua compares no owner": Mutant(
        "redis", 2, {"kind": _altered("local alone_there = holder == owner", "local alone_there = holder", "release")}
    ),
    "release.lua makes no offer": Mutant(
        "redis", 0, {"kind": _altered("if type(first) ~= 'string' then", "if true then", "release")}
    ),
    "deadline from the answer": Mutant("redis", 20, patch=LATE),
    "a node releases whatever it has": Mutant("redlock", 1, {"node": ReleasesAnybodys}),
    "one node is enough": Mutant("redlock", 0, {"backend": OneIsEnough}),
    "a value is used twice": Mutant("redlock", 0, patch=(Attempts, "taken_back", use_value_again)),
    "deadline from the last answer": Mutant("redlock", 13, patch=LATE),
    "a reader beside a writer": Mutant("shares", 1, {"state": ReaderBesideWriter}),
    "who fits overtakes": Mutant("shares", 2, {"state": Overtakes}),
    "one permit too many": Mutant("shares", 0, {"state": OnePermitTooMany}),
    "the guard has one mark": Mutant("shares", 12, {"guard": OneMark}),
    "no second look": Mutant("once", 0, patch=(Notes, "read", look_once)),
    "a note without the lock": Mutant("once", 3, {"state": AnybodysNote}),
    "no look at the lease before the run": Mutant("once", 58, patch=(BaseLease, "held", True)),
    "stop at the deadline": Mutant(
        "election", 2, patch=(Tenure, "stop_at", property(lambda self: self._record.valid_until))
    ),
    "stop is not final": Mutant("election", 38, patch=(Tenure, "_look", tell_once)),
    "deadline of a term from the answer": Mutant("election", 31, patch=LATE),
    "taken without comparing": Mutant("ticket", 2, {"state": TakenWithoutComparing}),
    "the token of the ticket is kept": Mutant("ticket", 0, {"state": TokenKept}),
    "the giver goes on believing": Mutant("ticket", 0, patch=(Leases, "hand_over", lambda *_: None)),
    "deadline of a taker from its repeat": Mutant("ticket", 11, patch=(Taking, "_ask", count_from_the_repeat)),
    "a node votes at once": Mutant("redlock_restart", 1, patch=voting_at_once(lambda *_: True)),
    "a first start of those that answer": Mutant("redlock_restart", 0, patch=voting_at_once(int.__eq__)),
    "admit.lua compares no run": Mutant("redlock_restart", 18, {"node": AdmittedInAnyRun}),
    "the mark is read before the vote": Mutant("redlock_restart", 1, {"node": MarkReadBefore}),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_does_what_its_model_does_not_allow(mutant: Mutant, compiled: dict[str, Followers]) -> None:
    """A mistake in the code shows."""
    assert mutant.is_refused(compiled[mutant.model])


@pytest.mark.parametrize("name", REPLAYS)
def test_trace_that_is_made_up_is_refused(name: str, compiled: dict[str, Followers]) -> None:
    """A wrong answer, an event too many, one too few, and one too late."""
    made = compiled[name]
    with REPLAYS[name].traces() as trace:
        found = (events for seed, events, _ in replay(made, trace, SEEDS) if Plan.draw(seed).clients == 2)
        events = next(events for events in found if any(event.kind == "HOLDS" for event in events))
    index = next(index for index, event in enumerate(events) if event.kind == "HOLDS")
    held = events[index]
    follow = made[2].follow

    assert follow(events) == len(events)
    assert follow([*events[:index], held._replace(value=0), *events[index + 1 :]]) == index
    assert follow([*events[: index + 1], held, *events[index + 1 :]]) == index + 1
    assert follow([*events[:index], *events[index + 1 :]]) != len(events) - 1
    assert follow([event._replace(at=event.at + 30.0 * (at > index)) for at, event in enumerate(events)]) != len(events)
