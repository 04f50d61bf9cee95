"""The state machine that the memory and the file backend share, against what holders may believe."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from lockkit.backends.lock_state import GRACE_MAX, Ledger, grace


@dataclass(frozen=True)
class Asker:
    """One acquisition of one client."""

    owner: str
    ttl: float = 10.0
    client: str = ""


def nobody_dies(claim: Asker) -> bool:
    """Every client lives."""
    del claim
    return False


def take(ledger: Ledger[Asker], asker: Asker, now: float) -> bool:
    """Ask with a place in the queue; the token floor does not matter."""
    granted, _ = ledger.acquire(asker, now, 0, queue=True, dead=nobody_dies)
    return granted


class LedgerMachine(RuleBasedStateMachine):
    """
    Random clients acquire, wait, renew, release, give up, die and oversleep.

    The model knows only what a holder may believe: from its grant or last renewal on, for its ttl, while its client
    lives, unless it was told otherwise.
    """

    askers = Bundle("askers")
    holds = Bundle("holds")

    @initialize()
    def begin(self) -> None:
        """Start with a free lock at a time that is not 0."""
        self.ledger: Ledger[Asker] = Ledger()
        self.now = 100.0
        self.count = 0
        self.tokens = [0]
        self.dead: set[str] = set()
        self.believed: dict[str, float] = {}
        self.broken: set[str] = set()

    def is_dead(self, claim: Asker) -> bool:
        """Tell what the kernel would tell."""
        return claim.client in self.dead

    def believers(self) -> set[str]:
        """Owners that may work under the lock now."""
        return {owner for owner, until in self.believed.items() if self.now < until}

    @rule(target=askers, client=st.sampled_from("abcd"), ttl=st.sampled_from([0.01, 1.0, 3.0, 30.0]))
    def come(self, client: str, ttl: float) -> Asker:
        """A client wants the lock."""
        self.count += 1
        self.dead.discard(client)
        return Asker(f"owner-{self.count}", ttl, f"{client}{self.count}")

    @rule(target=holds, asker=askers, queue=st.booleans(), floor=st.integers(0, 5))
    def look(self, asker: Asker, queue: bool, floor: int) -> Asker:  # noqa: FBT001 - drawn by hypothesis
        """It asks, for the first time or again."""
        if asker.owner in self.believed or self.is_dead(asker):
            return asker
        before = list(self.ledger.queue)
        offered = self.ledger.holder is None and bool(before)
        until = self.ledger.until

        granted, wake = self.ledger.acquire(asker, self.now, self.tokens[-1] + floor, queue=queue, dead=self.is_dead)

        assert asker not in wake
        if granted:
            assert not self.believers(), "two holders"
            assert self.ledger.token > self.tokens[-1], "the token did not grow"
            self.tokens.append(self.ledger.token)
            self.believed[asker.owner] = self.now + asker.ttl
            first = next((waiter for waiter in before if not self.is_dead(waiter)), None)
            if offered and self.now < until and first is not None:
                assert asker == first, "overtook a waiter to whom the lock was offered"
        else:
            assert self.believers() or self.ledger.queue, "refused though nobody holds it or waits"
            assert not queue or asker in self.ledger.queue
        return asker

    @rule(asker=holds, ttl=st.sampled_from([0.5, 2.0]))
    def renew(self, asker: Asker, ttl: float) -> None:
        """A holder renews, or one that was a holder."""
        if self.is_dead(asker):
            return
        reason = self.ledger.renew(asker.owner, ttl, self.now)
        if reason is None:
            assert asker.owner in self.believers(), "renewed what had ended"
            self.believed[asker.owner] = self.now + ttl
        else:
            assert asker.owner not in self.believers(), "lost in silence"
            assert (reason == "broken") == (self.ledger.broken == asker.owner)

    @rule(asker=consumes(holds))
    def release(self, asker: Asker) -> None:
        """A holder releases, possibly too late."""
        if self.is_dead(asker):
            return
        others = self.believers() - {asker.owner}
        ours, _ = self.ledger.release(asker.owner, self.now)
        assert ours == (asker.owner in self.believers())
        assert not others or self.ledger.holder is not None, "freed somebody else's lock"
        self.believed.pop(asker.owner, None)

    @rule(asker=consumes(askers))
    def give_up(self, asker: Asker) -> None:
        """A waiter is cancelled (or a grant whose answer was lost is undone)."""
        self.ledger.abandon(asker.owner, self.now)
        self.believed.pop(asker.owner, None)
        assert asker not in self.ledger.queue
        assert self.ledger.holder != asker

    @rule()
    def break_lock(self) -> None:
        """Somebody frees it by force."""
        believers = self.believers()
        broken, _ = self.ledger.break_lock(self.now, self.is_dead)
        assert broken == bool(believers)
        for owner in believers:
            del self.believed[owner]

    @rule(asker=askers)
    def kill(self, asker: Asker) -> None:
        """Its process is killed: it works no more."""
        self.dead.add(asker.client)
        self.believed.pop(asker.owner, None)

    @rule(seconds=st.sampled_from([0.001, 0.4, 1.0, 5.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on."""
        self.now += seconds

    @rule(asker=askers)
    def get_it_in_the_end(self, asker: Asker) -> None:
        """Nobody is in the way for longer than the lease and one offer."""
        if asker.owner in self.believed or self.is_dead(asker):
            return
        copy: Ledger[Asker] = Ledger(self.ledger.token)
        copy.holder, copy.until, copy.queue = self.ledger.holder, self.ledger.until, list(self.ledger.queue)
        later = max(self.now, copy.until) + GRACE_MAX + 0.001
        granted, _ = copy.acquire(asker, later, 0, queue=True, dead=self.is_dead)
        assert granted

    @invariant()
    def agrees_with_the_model(self) -> None:
        """The ledger never knows less than a believer, and holds nobody twice."""
        if not hasattr(self, "ledger"):
            return
        for owner in self.believers():
            assert self.ledger.holder is not None
            assert self.ledger.holder.owner == owner
        owners = [waiter.owner for waiter in self.ledger.queue]
        assert len(owners) == len(set(owners))
        assert self.ledger.holder is None or self.ledger.holder not in self.ledger.queue


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_releaser_that_returns_does_not_overtake_the_waiter() -> None:
    """A released lock is offered to the first waiter."""
    ledger: Ledger[Asker] = Ledger()
    first, second, third = Asker("1"), Asker("2"), Asker("3")
    assert take(ledger, first, 0.0)
    assert not take(ledger, second, 0.1)
    assert not take(ledger, third, 0.2)

    assert ledger.release("1", 1.0) == (True, [second, third])

    assert not take(ledger, Asker("1 again"), 1.001)
    assert not take(ledger, third, 1.002)
    assert take(ledger, second, 1.003)


def test_waiter_that_misses_its_offer_blocks_nobody_longer() -> None:
    """After the offer whoever asks first takes the lock, and the sleeper loses its place."""
    ledger: Ledger[Asker] = Ledger()
    sleeper, other, later = Asker("sleeper", ttl=0.6), Asker("other"), Asker("later")
    assert take(ledger, Asker("holder"), 0.0)
    for asker in (sleeper, other, later):
        assert not take(ledger, asker, 0.1)
    ledger.release("holder", 1.0)

    assert not take(ledger, later, 1.0 + grace(sleeper) - 0.001)
    assert ledger.acquire(later, 1.0 + grace(sleeper), 0, queue=True, dead=nobody_dies) == (True, [other])

    assert ledger.queue == [other]
    assert not take(ledger, sleeper, 1.5)
    assert ledger.queue == [other, sleeper]


def test_expiry_is_an_offer_from_the_end_of_the_lease_on() -> None:
    """A lease that ran out is offered to the head; hours later the offer is long over."""
    ledger: Ledger[Asker] = Ledger()
    assert take(ledger, Asker("holder", ttl=10), 0.0)
    assert not take(ledger, Asker("head"), 0.1)

    assert not take(ledger, Asker("late"), 10.5)
    assert ledger.retry_after(10.5) == 0.5
    assert take(ledger, Asker("later"), 3600.0)


def test_dead_claims_are_gone_over() -> None:
    """Dead holders and waiters are replaced at once, and who is next is told."""
    ledger: Ledger[Asker] = Ledger()
    dead = {"b", "c"}
    assert take(ledger, Asker("holder", client="a"), 0.0)
    for name in "bcde":
        assert not take(ledger, Asker(name, client=name), 0.1)

    assert ledger.predecessor("d", lambda claim: claim.client in dead) == Asker("holder", client="a")
    assert ledger.predecessor("e", lambda claim: claim.client in dead) == Asker("d", client="d")
    dead.add("a")
    newcomer = ledger.acquire(Asker("f", client="f"), 0.2, 0, queue=False, dead=lambda claim: claim.client in dead)

    assert newcomer == (False, [Asker("d", client="d"), Asker("e", client="e")])
    assert take(ledger, Asker("d", client="d"), 0.3)


def test_abandoning_an_offer_passes_it_on() -> None:
    """A waiter that is cancelled just when it is its turn loses nothing for the others."""
    ledger: Ledger[Asker] = Ledger()
    assert take(ledger, Asker("holder"), 0.0)
    for name in "abc":
        assert not take(ledger, Asker(name), 0.1)
    ledger.release("holder", 1.0)

    assert ledger.abandon("a", 1.5) == [Asker("b"), Asker("c")]

    assert ledger.retry_after(1.5) == GRACE_MAX
    assert ledger.abandon("a", 1.5) == ()


def test_broken_holder_is_told() -> None:
    """After a break renewal says so, also when somebody else holds the lock meanwhile."""
    ledger: Ledger[Asker] = Ledger()
    assert take(ledger, Asker("a"), 0.0)
    token = ledger.token

    assert ledger.break_lock(1.0, nobody_dies) == (True, ())
    assert ledger.break_lock(1.0, nobody_dies) == (False, ())

    assert take(ledger, Asker("b"), 2.0)
    assert ledger.token > token
    assert ledger.renew("a", 10.0, 3.0) == "broken"
    assert ledger.renew("c", 10.0, 3.0) == "taken"
    assert ledger.renew("b", 10.0, 3.0) is None
    assert ledger.renew("b", 10.0, 13.0) == "expired"
