"""
Readers, writers and permits in random schedules, and mistakes that the checkers must find.

CI runs the first seeds; ``LOCKKIT_SIM_SEED=0-9999 pytest tests/simulation/test_sharing.py`` runs others. A seed that
failed: the same with its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockkit.backend import Renewal
from lockkit.backends.lock_state import LockState
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.engine.semaphore import SlotSearch
from lockkit.fencing import TokenGuard
from lockkit.storage.tokens import stale_token
from lockkit_tools.simulation.checker import Problem
from lockkit_tools.simulation.claims import ProcessClaim
from lockkit_tools.simulation.redlock import VotingNode
from tests.simulation.sharing import Crowd, Parts, use_permits, use_rwlock, use_slots
from tests.simulation.support import apart

Use = Callable[..., tuple[Crowd, list[Problem]]]
State = LockState[ProcessClaim]
Claims = Sequence[ProcessClaim]

# What the mutants below need, and more; `nox -s simulate` runs ten thousand.
SEEDS = "0-29"
# Of the slots one schedule of so many: each takes as long as five of the others.
SLOTS_STEP = 3
PART = 500

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


def played(use: Use, seeds: range, parts: Parts | None = None) -> Iterator[tuple[Crowd, list[Problem]]]:
    """Run schedules, the odd ones calm."""
    for seed in apart(seeds):
        yield use(seed, parts or Parts(), calm=seed % 2 == 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("use", [use_rwlock, use_permits, use_slots])
def test_random_schedules_are_valid(use: Use, seeds: range) -> None:
    """Whatever is done to clients, network and server; and the schedules give the checkers something to look at."""
    if use is use_slots and len(seeds) > 1:
        seeds = seeds[::SLOTS_STEP]
    beliefs = refused = 0
    for seed, (crowd, problems) in zip(seeds, played(use, seeds), strict=True):
        assert not problems, f"seed {seed}: " + "\n".join(map(str, problems))
        beliefs += len(crowd.witness.beliefs)
        refused += sum(not access.accepted for access in crowd.witness.accesses)

    if len(seeds) > 1:
        assert beliefs > 10 * len(seeds)
        assert refused > 0, "no stale holder came by: the guards had nothing to do"


def test_seed_repeats_its_history() -> None:
    """To the last digit of the last time."""
    for use in (use_rwlock, use_permits, use_slots):
        one, other = (next(played(use, range(2, 3)))[0].witness for _ in range(2))
        assert one.beliefs == other.beliefs
        assert one.accesses == other.accesses


# -- broken states -------------------------------------------------------------------------------------------------


class WriterBesideReaders(State):
    """A writer waits for writers only."""

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        return (claim.mode == "exclusive" and self.alone is None) or super()._fits_beside(claim)

    def _offer(self, now: float) -> Claims:
        return () if self.alone is not None else super()._offer(now)


class LastOfAny(State):
    """The release of one reader or permit ends all the others."""

    def release(self, owner: str, now: float) -> tuple[bool, Claims]:
        """Free all."""
        outcome = super().release(owner, now)
        if outcome[0] and self.leases:
            self.leases.clear()
            return True, self._offer(now)
        return outcome


class DowngradeFrees(State):
    """A downgrade frees the lock, without the share that is to stay."""

    def downgrade(self, owner: str, now: float) -> tuple[bool, Claims]:
        """Free it."""
        held, _ = super().downgrade(owner, now)
        self.leases.pop(owner, None)
        return held, self._offer(now)


class EndsEarly(State):
    """A share is taken for over before its end."""

    def _end_leases(self, claim: ProcessClaim, now: float, dead: Callable[[ProcessClaim], bool]) -> Claims:
        return super()._end_leases(claim, now if self.alone is not None else now + 1.0, dead)


class OneEnd(State):
    """One end for all shares, as a key with one ttl has: a new reader who asks for less shortens that of the others."""

    def renew(self, owner: str, ttl: float, now: float) -> Renewal:
        """Renew one, and forget the renewals of the others."""
        outcome = super().renew(owner, ttl, now)
        for lease in self.leases.values():
            if lease.mode != "exclusive":
                lease.until = min(lease.until, now + ttl / 2)
        return outcome


class ExpiredLives(State):
    """A share counts as held after its end, as if a living one kept it alive."""

    def _end_leases(self, claim: ProcessClaim, now: float, dead: Callable[[ProcessClaim], bool]) -> Claims:
        return () if self.alone is None else super()._end_leases(claim, now, dead)


class ReadersOvertake(State):
    """A reader does not look who waits."""

    def _is_next(self, claim: ProcessClaim) -> bool:
        return claim.mode == "shared" or super()._is_next(claim)


class LastReaderWakesNobody(State):
    """The release of a share wakes nobody."""

    def release(self, owner: str, now: float) -> tuple[bool, Claims]:
        """Free it in silence."""
        shared = owner in self.leases and self.alone is None
        held, notify = super().release(owner, now)
        return held, () if shared else notify


class ReadersTakeNoToken(State):
    """A reader gets the token of the writer before."""

    def _take(self, claim: ProcessClaim, now: float, token_min: int) -> Claims:
        before = self.token
        notify = super()._take(claim, now, token_min)
        if claim.mode == "shared" and before:
            self.token = self.leases[claim.owner].token = before
        return notify


class TokenOfTheHighestHeld(State):
    """A token above all that are held, not above all that there were."""

    def _take(self, claim: ProcessClaim, now: float, token_min: int) -> Claims:
        self.token = max((lease.token for lease in self.leases.values()), default=0)
        return super()._take(claim, now, 0 if claim.mode == "permit" else token_min)


class OneMore(State):
    """The limit is off by one."""

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        return len(self.leases) <= claim.limit


class LargestLimit(State):
    """The largest limit that was asked for counts for all."""

    limit = 0

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        self.limit = max(self.limit, claim.limit)
        return len(self.leases) < self.limit


class QueueNotCounted(State):
    """The claims of a run take what is free without counting those before them in the run."""

    def _fits_beside(self, claim: ProcessClaim) -> bool:
        return super()._fits_beside(claim) or (self.queue[:1] != [] and self.queue[0].owner == claim.owner)


class SlotOfTheExpired(State):
    """Slots are given out by who renewed since, so one whose renewal is due is given twice."""

    def _free_slot(self) -> int:
        latest = max((lease.until for lease in self.leases.values()), default=0.0)
        taken = {lease.slot for lease in self.leases.values() if lease.until > latest - 0.5}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


class FirstSlot(State):
    """A permit is a count, without a place."""

    def _free_slot(self) -> int:
        return 0


# -- broken guards -------------------------------------------------------------------------------------------------


class OneMark(TokenGuard):
    """Readers move the same mark as writers."""

    def _accept(self, token: int, *, shared: bool = False) -> None:
        del shared
        super()._accept(token)


class ReadsLeaveNoMark(TokenGuard):
    """A writer is compared with writers only."""

    def _accept(self, token: int, *, shared: bool = False) -> None:
        super()._accept(token, shared=shared)
        self._read_mark = None


class ReadsAreFree(TokenGuard):
    """Readers are not compared."""

    def _accept(self, token: int, *, shared: bool = False) -> None:
        if not shared:
            super()._accept(token)


class LastComer(TokenGuard):
    """The mark is that of the last who came, refused or not, not the newest."""

    def _accept(self, token: int, *, shared: bool = False) -> None:
        if self._write_mark is not None and token < self._write_mark and not shared:
            last, self._write_mark = self._write_mark, token
            raise stale_token("the write", token, last, name=self._name)
        self._write_mark = token


# -- broken slots --------------------------------------------------------------------------------------------------


def search_one_more(self: SlotSearch[Any], real: Callable[..., Any] = SlotSearch.run) -> Any:  # noqa: ANN401 - a coroutine
    """Look for one more slot than there are."""
    self.settings = replace(self.settings, limit=self.settings.limit + 1)
    return real(self)


async def forget_slot(
    self: SlotSearch[Any], slot: int, timeout: float, real: Callable[..., Any] = SlotSearch._try
) -> Any:  # noqa: ANN401 - a lease
    """Do not take down which slot it was."""
    lease = await real(self, slot, timeout)
    if lease is not None:
        lease._record.grant.slot = 0
    return lease


def two_of_five(
    self: RedlockBackend, *arguments: Any, real: Callable[..., None] = RedlockBackend.__init__, **options: Any
) -> None:
    """Take two votes for a majority."""
    real(self, *arguments, **options)
    self._quorum = 2


def half_of_the_ttl(
    self: VotingNode, lock: str, value: str, ttl_ms: int, *rest: str, real: Callable[..., Any] = VotingNode.acquire
) -> Any:  # noqa: ANN401 - an answer
    """Grant for half of the ttl."""
    return real(self, lock, value, ttl_ms // 2, *rest)


@dataclass(frozen=True)
class Mutant:
    """One mistake, and the check that must notice it."""

    use: Use
    found_by: str
    state: type[State] = LockState
    guard: type[TokenGuard] = TokenGuard
    patch: tuple[type, str, object] | None = None


MUTANTS = {
    "writer beside readers": Mutant(use_rwlock, "overlap", WriterBesideReaders),
    "release of one reader frees all": Mutant(use_rwlock, "overlap", LastOfAny),
    "downgrade frees": Mutant(use_rwlock, "overlap", DowngradeFrees),
    "reader's lease ended early": Mutant(use_rwlock, "overlap", EndsEarly),
    "one end for all readers": Mutant(use_rwlock, "overlap", OneEnd),
    "readers take no token": Mutant(use_rwlock, "tokens", ReadersTakeNoToken),
    "token above those that are held": Mutant(use_permits, "tokens", TokenOfTheHighestHeld),
    "one mark": Mutant(use_rwlock, "guard", guard=OneMark),
    "reads leave no mark": Mutant(use_rwlock, "guard", guard=ReadsLeaveNoMark),
    "reads are not compared": Mutant(use_rwlock, "guard", guard=ReadsAreFree),
    "the mark is the last comer's": Mutant(use_permits, "guard", guard=LastComer),
    "readers overtake a waiting writer": Mutant(use_rwlock, "progress", ReadersOvertake),
    "last reader wakes nobody": Mutant(use_rwlock, "progress", LastReaderWakesNobody),
    "expired reader counts as living": Mutant(use_rwlock, "progress", ExpiredLives),
    "expired permit counts as living": Mutant(use_permits, "progress", ExpiredLives),
    "permit released in silence": Mutant(use_permits, "progress", LastReaderWakesNobody),
    "limit off by one": Mutant(use_permits, "limit", OneMore),
    "largest limit for all": Mutant(use_permits, "own_limits", LargestLimit),
    "queue not counted": Mutant(use_permits, "limit", QueueNotCounted),
    "release of one permit frees all": Mutant(use_permits, "limit", LastOfAny),
    "permit ended early": Mutant(use_permits, "limit", EndsEarly),
    "slot of a late renewal given again": Mutant(use_permits, "slots", SlotOfTheExpired),
    "always the first slot": Mutant(use_permits, "slots", FirstSlot),
    "one slot more": Mutant(use_slots, "limit", patch=(SlotSearch, "run", search_one_more)),
    "slot not taken down": Mutant(use_slots, "slots", patch=(SlotSearch, "_try", forget_slot)),
    "two votes of five": Mutant(use_slots, "slots", patch=(RedlockBackend, "__init__", two_of_five)),
    "slot ended early": Mutant(use_slots, "slots", patch=(VotingNode, "acquire", half_of_the_ttl)),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check that is for it, in one of the seeds that run without the mistake too."""
    if mutant.patch is not None:
        monkeypatch.setattr(*mutant.patch)
    first, last = SEEDS.split("-")
    seeds = range(int(first), int(last) + 1, SLOTS_STEP if mutant.use is use_slots else 1)

    assert any(
        problem.check == mutant.found_by
        for _, problems in played(mutant.use, seeds, Parts(mutant.state, mutant.guard))
        for problem in problems
    )
