"""The state machine that the memory and the file backend share, against what holders may believe."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from lockkit.backend import Busy, Gone, Grant, Mode, Renewed
from lockkit.backends.lock_state import OFFER_SECONDS_MAX, LockState, offer_seconds


@dataclass(frozen=True)
class Asker:
    """One acquisition of one client."""

    owner: str
    ttl: float = 10.0
    client: str = ""
    metadata: str = ""
    mode: Mode = "exclusive"
    limit: int = 1


def take(state: LockState[Asker], asker: Asker, now: float) -> bool:
    """Ask, and queue up if the lock is busy; the lower bound of the token does not matter."""
    outcome, _ = state.acquire("x", asker, now, 0, queue=True)
    return isinstance(outcome, Grant)


class LockStateMachine(RuleBasedStateMachine):
    """
    Random clients acquire, wait, renew, release, give up, die and oversleep.

    The model knows only what a holder may believe: from its grant or last renewal on, for its ttl, while its client
    lives, unless the lock was broken.
    """

    askers = Bundle("askers")
    holds = Bundle("holds")

    @initialize()
    def begin(self) -> None:
        """Start with a free lock at a time that is not 0."""
        self.state: LockState[Asker] = LockState()
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

    @rule(target=holds, asker=askers, queue=st.booleans(), ahead=st.integers(0, 5))
    def look(self, asker: Asker, queue: bool, ahead: int) -> Asker:  # noqa: FBT001 - drawn by hypothesis
        """It asks, for the first time or again."""
        if asker.owner in self.believed or self.is_dead(asker):
            return asker
        before = list(self.state.queue)
        offered = self.state.holder is None and bool(before)
        until = self.state.until

        outcome, notify = self.state.acquire(
            "x", asker, self.now, self.tokens[-1] + ahead, queue=queue, dead=self.is_dead
        )

        assert asker not in notify
        if isinstance(outcome, Grant):
            assert outcome == Grant("x", asker.owner, self.state.token, asker.ttl)
            assert not self.believers(), "two holders"
            assert self.state.token > self.tokens[-1], "the token did not grow"
            self.tokens.append(self.state.token)
            self.believed[asker.owner] = self.now + asker.ttl
            first = next((waiter for waiter in before if not self.is_dead(waiter)), None)
            if offered and self.now < until and first is not None:
                assert asker == first, "overtook a waiter to whom the lock was offered"
        else:
            assert self.believers() or self.state.queue, "refused though nobody holds it or waits"
            assert not queue or asker in self.state.queue
        return asker

    @rule(asker=holds, ttl=st.sampled_from([0.5, 2.0]))
    def renew(self, asker: Asker, ttl: float) -> None:
        """A holder renews, or one that was a holder."""
        if self.is_dead(asker):
            return
        renewal = self.state.renew(asker.owner, ttl, self.now)
        if renewal == Renewed():
            assert asker.owner in self.believers(), "renewed what had ended"
            self.believed[asker.owner] = self.now + ttl
        else:
            assert asker.owner not in self.believers(), "lost in silence"
            assert (renewal == Gone("broken")) == (asker.owner in self.state.broken)

    @rule(asker=consumes(holds))
    def release(self, asker: Asker) -> None:
        """A holder releases, possibly too late."""
        if self.is_dead(asker):
            return
        others = self.believers() - {asker.owner}
        ours, _ = self.state.release(asker.owner, self.now)
        assert ours == (asker.owner in self.believers())
        assert not others or self.state.holder is not None, "freed another lock"
        self.believed.pop(asker.owner, None)

    @rule(asker=consumes(askers))
    def give_up(self, asker: Asker) -> None:
        """A waiter is cancelled (or a grant whose answer was lost is undone)."""
        self.state.abandon(asker.owner, self.now)
        self.believed.pop(asker.owner, None)
        assert asker not in self.state.queue
        assert self.state.holder != asker

    @rule()
    def break_lock(self) -> None:
        """Somebody frees it by force."""
        believers = self.believers()
        broken, _ = self.state.break_lock(self.now, self.is_dead)
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
        copy: LockState[Asker] = LockState(self.state.token)
        copy.holder, copy.until, copy.queue = self.state.holder, self.state.until, list(self.state.queue)
        later = max(self.now, copy.until) + OFFER_SECONDS_MAX + 0.001
        outcome, _ = copy.acquire("x", asker, later, 0, queue=True, dead=self.is_dead)
        assert isinstance(outcome, Grant)

    @invariant()
    def agrees_with_the_model(self) -> None:
        """The state agrees with every holder that may believe in its lease, and has no owner twice."""
        if not hasattr(self, "ledger"):
            return
        for owner in self.believers():
            assert self.state.holder is not None
            assert self.state.holder.owner == owner
        owners = [waiter.owner for waiter in self.state.queue]
        assert len(owners) == len(set(owners))
        assert self.state.holder is None or self.state.holder not in self.state.queue


TestLockStateMachine = pytest.mark.timeout(600)(LockStateMachine.TestCase)  # many examples for a busy machine
TestLockStateMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_releaser_that_returns_does_not_overtake_the_waiter() -> None:
    """A released lock is offered to the first waiter."""
    state: LockState[Asker] = LockState()
    first, second, third = Asker("1"), Asker("2"), Asker("3")
    assert take(state, first, 0.0)
    assert not take(state, second, 0.1)
    assert not take(state, third, 0.2)

    assert state.release("1", 1.0) == (True, [second, third])

    assert not take(state, Asker("1 again"), 1.001)
    assert not take(state, third, 1.002)
    assert take(state, second, 1.003)


def test_waiter_that_misses_its_offer_blocks_nobody_longer() -> None:
    """After the offer the first request takes the lock, and the sleeper loses its place."""
    state: LockState[Asker] = LockState()
    sleeper, other, later = Asker("sleeper", ttl=0.6), Asker("other"), Asker("later")
    assert take(state, Asker("holder"), 0.0)
    for asker in (sleeper, other, later):
        assert not take(state, asker, 0.1)
    state.release("holder", 1.0)

    assert not take(state, later, 1.0 + offer_seconds(sleeper) - 0.001)
    outcome, notify = state.acquire("x", later, 1.0 + offer_seconds(sleeper), 0, queue=True)
    assert (type(outcome), notify) == (Grant, [other])

    assert state.queue == [other]
    assert not take(state, sleeper, 1.5)
    assert state.queue == [other, sleeper]


def test_expiry_is_an_offer_from_the_end_of_the_lease_on() -> None:
    """A lease that ran out is offered to the head; hours later the offer is long over."""
    state: LockState[Asker] = LockState()
    assert take(state, Asker("holder", ttl=10), 0.0)
    assert not take(state, Asker("head"), 0.1)

    outcome, _ = state.acquire("x", Asker("late"), 10.5, 0, queue=True)
    assert outcome == Busy(0.5)
    assert take(state, Asker("later"), 3600.0)


def test_dead_claims_are_skipped() -> None:
    """Dead holders and waiters are replaced at once, and the next waiters are notified."""
    state: LockState[Asker] = LockState()
    dead = {"b", "c"}
    assert take(state, Asker("holder", client="a"), 0.0)
    for name in "bcde":
        assert not take(state, Asker(name, client=name), 0.1)

    assert not take(state, Asker("late", client="late"), 0.1)
    for first_or_second in "de":
        before = state.predecessor(first_or_second, lambda claim: claim.client in dead)
        assert before == Asker("holder", client="a")
    assert state.predecessor("late", lambda claim: claim.client in dead) == Asker("e", client="e")
    dead.add("a")
    outcome, notify = state.acquire(
        "x", Asker("f", client="f"), 0.2, 0, queue=False, dead=lambda claim: claim.client in dead
    )

    assert isinstance(outcome, Busy)
    assert notify == [Asker("d", client="d"), Asker("e", client="e")]
    assert state.predecessor("e", lambda claim: claim.client in dead) == Asker("d", client="d")
    assert take(state, Asker("d", client="d"), 0.3)


def test_abandoning_an_offer_passes_it_on() -> None:
    """A waiter that is cancelled just when it is its turn loses nothing for the others."""
    state: LockState[Asker] = LockState()
    assert take(state, Asker("holder"), 0.0)
    for name in "abc":
        assert not take(state, Asker(name), 0.1)
    state.release("holder", 1.0)

    assert state.abandon("a", 1.5) == [Asker("b"), Asker("c")]

    assert state.until == 1.5 + OFFER_SECONDS_MAX
    assert state.abandon("a", 1.5) == ()


def test_renewal_reports_a_broken_lease() -> None:
    """After a break renewal says so, also when another client holds the lock by then."""
    state: LockState[Asker] = LockState()
    assert take(state, Asker("a"), 0.0)
    token = state.token

    assert state.break_lock(1.0) == (True, ())
    assert state.break_lock(1.0) == (False, ())

    assert take(state, Asker("b"), 2.0)
    assert state.token > token
    assert state.renew("a", 10.0, 3.0) == Gone("broken")
    assert state.renew("c", 10.0, 3.0) == Gone("taken")
    assert state.renew("b", 10.0, 3.0) == Renewed()
    assert state.renew("b", 10.0, 13.0) == Gone("expired")
