"""The state machine that the memory and the file backend share, against what holders may believe."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from lockkit.backend import Busy, Gone, Grant, Mode, Renewed
from lockkit.backends.lock_state import OFFER_SECONDS_MAX, LockState


@dataclass(frozen=True)
class Asker:
    """One acquisition of one client."""

    owner: str
    ttl: float = 10.0
    client: str = ""
    metadata: str = ""
    mode: Mode = "exclusive"
    limit: int = 1


def reader(owner: str, ttl: float = 10.0) -> Asker:
    """Make a claim of the read side."""
    return Asker(owner, ttl, mode="shared")


def permit(owner: str, limit: int) -> Asker:
    """Make a claim for a permit."""
    return Asker(owner, mode="permit", limit=limit)


def take(state: LockState[Asker], asker: Asker, now: float) -> bool:
    """Ask, and queue up if the lock is busy; the lower bound of the token does not matter."""
    return isinstance(state.acquire("x", asker, now, 0, queue=True)[0], Grant)


class LockStateMachine(RuleBasedStateMachine):
    """
    Random clients acquire, read, write, wait, renew, downgrade, take over, release, give up, die and oversleep.

    The model knows only what a holder may believe: from its grant or last renewal on, for its ttl, while its client
    lives, unless the lock was broken.
    """

    askers = Bundle("askers")

    @initialize(kind=st.sampled_from(["lock", "rwlock", "semaphore"]))
    def begin(self, kind: Literal["lock", "rwlock", "semaphore"]) -> None:
        """Start with a free lock at a time that is not 0."""
        self.kind = kind
        self.state: LockState[Asker] = LockState()
        self.now = 100.0
        self.count = 0
        self.token = 0
        self.dead: set[str] = set()
        self.believed: dict[str, tuple[float, Asker, int | None]] = {}
        self.slept: set[str] = set()

    def is_dead(self, claim: Asker) -> bool:
        """Tell what the kernel would tell."""
        return claim.client in self.dead

    def believers(self) -> list[tuple[Asker, int | None]]:
        """Who may work under the lock now, and with which slots."""
        return [(asker, slot) for until, asker, slot in self.believed.values() if self.now < until]

    @rule(
        target=askers,
        read=st.booleans(),
        limit=st.integers(1, 3),
        ttl=st.sampled_from([0.01, 0.5, 3.0, 30.0]),
        queue=st.booleans(),
    )
    def come(self, read: bool, limit: int, ttl: float, queue: bool) -> Asker:  # noqa: FBT001 - drawn by hypothesis
        """A client wants it."""
        self.count += 1
        modes: dict[str, Mode] = {"lock": "exclusive", "rwlock": "shared" if read else "exclusive"}
        mode = modes.get(self.kind, "permit")
        asker = Asker(f"owner-{self.count}", ttl, f"client-{self.count}", mode=mode, limit=limit)
        self.look(asker, 0, queue=queue)
        return asker

    @rule(asker=askers, ahead=st.integers(0, 5))
    def look_again(self, asker: Asker, ahead: int) -> None:
        """One that waits asks again, or one that had given up."""
        self.look(asker, ahead, queue=True)

    def look(self, asker: Asker, ahead: int, *, queue: bool) -> None:
        """Ask, and compare the answer with what others believe."""
        if asker.owner in self.believed or self.is_dead(asker):
            return
        before = [waiter for waiter in self.state.queue if not self.is_dead(waiter)]
        offered = not self.state.leases and self.now < self.state.until
        outcome, notify = self.state.acquire("x", asker, self.now, self.token + ahead, queue, self.is_dead)
        assert asker not in notify
        if isinstance(outcome, Grant):
            assert outcome == Grant("x", asker.owner, self.state.token, asker.ttl, slot=outcome.slot)
            assert outcome.token >= self.token + ahead, "the token is below its lower bound"
            if self.kind == "lock" and offered and before:
                assert asker == before[0], "overtook a waiter to whom the lock was offered"
            self._granted(asker, outcome, before)
        else:
            assert self.believers() or self.state.queue, "refused though nobody holds it or waits"
            assert not queue or asker in self.state.queue

    def _granted(self, asker: Asker, grant: Grant, before: list[Asker]) -> None:
        assert grant.token > self.token, "the token did not grow"
        self.token = grant.token
        others = self.believers()
        if asker.mode == "exclusive":
            assert not others, "a writer beside somebody"
        elif asker.mode == "shared":
            assert all(other.mode == "shared" for other, _ in others), "a reader beside a writer"
            if others and asker not in before:
                assert all(waiter.mode == "shared" for waiter in before if waiter.owner not in self.slept), (
                    "a new reader overtook a waiting writer"
                )
        else:
            assert len(others) < asker.limit, "more permits than the limit"
            assert grant.slot not in [slot for _, slot in others], "a slot given twice"
            assert grant.slot is not None
            assert 0 <= grant.slot < asker.limit
        self.believed[asker.owner] = (self.now + asker.ttl, asker, grant.slot)

    @rule(asker=askers, ttl=st.sampled_from([0.5, 2.0]))
    def renew(self, asker: Asker, ttl: float) -> None:
        """A holder renews, or one that was a holder."""
        if self.is_dead(asker):
            return
        until, held, slot = self.believed.get(asker.owner, (0.0, asker, None))
        renewal = self.state.renew(asker.owner, ttl, self.now)
        if renewal == Renewed():
            assert self.now < until, "renewed what had ended"
            self.believed[asker.owner] = (self.now + ttl, held, slot)
        else:
            assert self.now >= until, "lost in silence"
            assert (renewal == Gone("broken")) == (asker.owner in self.state.broken)

    @rule(asker=askers)
    def downgrade(self, asker: Asker) -> None:
        """A writer becomes a reader."""
        known = self.believed.get(asker.owner)
        if self.kind != "rwlock" or known is None or known[1].mode != "exclusive" or self.is_dead(asker):
            return
        done, _ = self.state.downgrade(asker.owner, self.now)
        assert done == (self.now < known[0])
        if done:
            self.believed[asker.owner] = (known[0], reader(asker.owner), None)

    @rule(target=askers, asker=askers, ahead=st.integers(0, 5))
    def take_over(self, asker: Asker, ahead: int) -> Asker:
        """Another owner takes over from a writer, twice: the first answer was lost."""
        self.count += 1
        taker = Asker(f"owner-{self.count}", asker.ttl, f"client-{self.count}")
        until, held, _ = self.believed.get(asker.owner, (0.0, asker, None))
        if held.mode == "exclusive" and not self.is_dead(asker):
            lower = self.token + 1 - ahead
            taken, again = [self.state.take_over("x", asker.owner, taker, self.now, lower) for _ in range(2)]
            assert taken == again
            assert (taken is not None) == (self.now < until)
            if taken is not None:
                assert taken.token == self.token + 1
                del self.believed[asker.owner]
                self._granted(taker, taken, [])
        return taker

    @rule(asker=consumes(askers))
    def release(self, asker: Asker) -> None:
        """A holder releases, possibly too late."""
        if self.is_dead(asker):
            return
        until, _, _ = self.believed.pop(asker.owner, (0.0, asker, None))
        ours, _ = self.state.release(asker.owner, self.now)
        assert ours == (self.now < until)

    @rule(asker=consumes(askers))
    def give_up(self, asker: Asker) -> None:
        """A waiter is cancelled (or a grant whose answer was lost is undone)."""
        self.state.abandon(asker.owner, self.now)
        self.believed.pop(asker.owner, None)
        assert asker not in self.state.queue
        assert asker.owner not in self.state.leases

    @rule(really=st.integers(0, 5))
    def break_lock(self, really: int) -> None:
        """Somebody frees it by force, seldom."""
        if really:
            return
        broken, _ = self.state.break_lock(self.now, self.is_dead)
        assert broken == bool(self.believers())
        self.believed.clear()

    @rule(asker=askers, really=st.integers(0, 3))
    def kill(self, asker: Asker, really: int) -> None:
        """Its process is killed, seldom: it works no more."""
        if really:
            return
        self.dead.add(asker.client)
        self.believed.pop(asker.owner, None)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.4, 1.0, 5.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on; who waits may miss an offer."""
        self.now += seconds
        self.slept.update(waiter.owner for waiter in self.state.queue)

    @rule(asker=askers)
    def get_it_in_the_end(self, asker: Asker) -> None:
        """Nobody is in the way for longer than the lease and one offer."""
        if self.kind != "lock" or asker.owner in self.believed or self.is_dead(asker):
            return
        ends = [self.now, *(lease.until for lease in self.state.leases.values())]
        later = max(self.state.until, *ends) if self.state.until != inf else max(ends)
        later += OFFER_SECONDS_MAX + 0.001
        outcome, _ = deepcopy(self.state).acquire("x", asker, later, 0, queue=True, dead=self.is_dead)
        assert isinstance(outcome, Grant)

    @invariant()
    def state_is_sound(self) -> None:
        """Held exclusively or by shares, each once, and what is said of the holders is what they believe."""
        if not hasattr(self, "state"):
            return
        assert self.state.alone is None or len(self.state.leases) == 1
        owners = [waiter.owner for waiter in self.state.queue]
        assert len(owners) == len(set(owners))
        assert not self.state.leases.keys() & set(owners)
        found = {holder.owner: holder for holder in self.state.holders(self.now, self.is_dead)}
        assert found.keys() == {asker.owner for asker, _ in self.believers()}
        for asker, slot in self.believers():
            assert (found[asker.owner].mode, found[asker.owner].slot) == (asker.mode, slot)


TestLockState = pytest.mark.timeout(600)(LockStateMachine.TestCase)  # many examples for a busy machine
TestLockState.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_waiter_that_misses_its_offer_blocks_nobody_longer() -> None:
    """After the offer the first request takes the lock, and the sleeper loses its place."""
    state: LockState[Asker] = LockState()
    sleeper, other, later = Asker("sleeper", ttl=0.6), Asker("other"), Asker("later")
    assert take(state, Asker("holder"), 0.0)
    for asker in (sleeper, other, later):
        assert not take(state, asker, 0.1)
    assert state.release("holder", 1.0) == (True, [sleeper, other])

    assert not take(state, Asker("holder again"), 1.001)
    assert not take(state, later, 1.0 + sleeper.ttl / 2 - 0.001)
    state.abandon("holder again", 1.0)
    outcome, notify = state.acquire("x", later, 1.0 + sleeper.ttl / 2, 0, queue=True)
    assert (type(outcome), notify) == (Grant, [other])

    assert state.queue == [other]
    assert not take(state, sleeper, 1.5)
    assert state.queue == [other, sleeper]


@pytest.mark.parametrize("holder", [Asker("holder"), reader("holder")], ids=["writer", "reader"])
def test_expiry_is_an_offer_from_the_end_of_the_lease_on(holder: Asker) -> None:
    """A lease that ran out is offered to the head; hours later the offer is long over."""
    state: LockState[Asker] = LockState()
    assert take(state, holder, 0.0)
    for name in ("head", "second", "third"):
        assert not take(state, Asker(name), 0.1)

    # The head and the one behind it are notified, unless it is looking already.
    assert state.acquire("x", Asker("second"), 10.5, 0, queue=True) == (Busy(0.5), [Asker("head")])
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


@pytest.mark.parametrize("holder", [Asker("h"), reader("h"), permit("h", 1)], ids=lambda one: one.mode)
@pytest.mark.parametrize("queue", [False, True])
def test_refusal_names_a_holder_and_when_it_ends(holder: Asker, queue: bool) -> None:  # noqa: FBT001 - a parameter
    """Also to who does not wait."""
    state: LockState[Asker] = LockState()
    assert take(state, holder, 0.0)
    other = permit("o", 1) if holder.mode == "permit" else Asker("o")

    assert state.acquire("x", other, 1.0, 0, queue=queue)[0] == Busy(9.0, owner="h", metadata="")


def test_dead_head_of_the_queue_delays_nobody() -> None:
    """The lock that was offered to it goes to the live waiter behind it, before the offer is over."""
    state: LockState[Asker] = LockState()
    second = Asker("second", client="s")
    assert take(state, Asker("holder"), 0.0)
    for asker in (Asker("head", client="h"), second):
        assert not take(state, asker, 0.1)
    state.release("holder", 1.0)

    outcome, _ = state.acquire("x", second, 1.1, 0, queue=True, dead=lambda claim: claim.client == "h")

    assert isinstance(outcome, Grant)


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


def test_all_readers_before_the_next_writer_enter_together() -> None:
    """A release of the writer wakes r1, r2 and r3 at once, in whatever order they come; the writer behind waits."""
    state: LockState[Asker] = LockState()
    assert take(state, Asker("w1"), 0.0)
    for asker in (reader("r1"), reader("r2"), reader("r3"), Asker("w2"), reader("r4")):
        assert not take(state, asker, 0.1)

    _, notify = state.release("w1", 1.0)
    assert [claim.owner for claim in notify] == ["r1", "r2", "r3"]
    for owner in ("r3", "r1", "r2"):
        assert take(state, reader(owner), 1.1)
    assert not take(state, reader("r4"), 1.2)


def test_writer_is_overtaken_by_nobody_when_readers_before_it_sleep() -> None:
    """A reader that misses its offer loses its place to the writer behind it, not to a reader that comes later."""
    state: LockState[Asker] = LockState()
    assert take(state, Asker("w1"), 0.0)
    for asker in (reader("r1"), reader("asleep"), Asker("w2")):
        assert not take(state, asker, 0.1)
    state.release("w1", 1.0)
    assert take(state, reader("r1"), 1.0)

    assert not take(state, reader("late"), 9.0)
    assert [claim.owner for claim in state.release("r1", 9.5)[1]] == ["w2", "late"]
    assert take(state, Asker("w2"), 9.5)


class Counted:
    """A claim that counts how often its mode is read."""

    ttl, metadata, limit = 10.0, "", 1
    reads = 0

    def __init__(self, owner: str, mode: Mode) -> None:
        self.owner = owner
        self._mode: Mode = mode

    @property
    def mode(self) -> Mode:
        """Beside whom it fits."""
        Counted.reads += 1
        return self._mode


def test_release_to_many_readers_looks_at_each_of_them_a_few_times() -> None:
    """Each that enters offers the lock to the rest. Looking at all in front of each took 15 s for 1,000 of them."""
    state: LockState[Counted] = LockState()
    writer, *readers = Counted("w", "exclusive"), *(Counted(f"r{number}", "shared") for number in range(100))
    for claim in (writer, *readers):
        state.acquire("x", claim, 100.0, 0, queue=True)
    Counted.reads = 0

    _, notified = state.release("w", 101.0)

    assert [claim.owner for claim in notified] == [claim.owner for claim in readers]
    assert Counted.reads < 5 * len(readers)
