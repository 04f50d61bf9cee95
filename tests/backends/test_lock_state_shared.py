"""The state machine of memory and file with readers, writers and permits, against what holders may believe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from lockkit.backend import Busy, Grant, Mode, Renewed
from lockkit.backends.lock_state import LockState
from tests.interrupts import CallStrike


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


def writer(owner: str, ttl: float = 10.0) -> Asker:
    """Make a claim of the write side."""
    return Asker(owner, ttl)


def permit(owner: str, limit: int) -> Asker:
    """Make a claim for a permit."""
    return Asker(owner, mode="permit", limit=limit)


def ask(state: LockState[Asker], asker: Asker, now: float) -> Grant | Busy:
    """Ask, and queue up if it has to wait."""
    return state.acquire("x", asker, now, 0, queue=True)[0]


class SharedStateMachine(RuleBasedStateMachine):
    """Random clients read, write, wait, renew, downgrade, release, give up, die and oversleep."""

    askers = Bundle("askers")

    @initialize(permits=st.booleans())
    def begin(self, permits: bool) -> None:  # noqa: FBT001 - drawn by hypothesis
        """Start free. A name is a read/write lock or a semaphore, never both."""
        self.permits = permits
        self.state: LockState[Asker] = LockState()
        self.now = 100.0
        self.count = 0
        self.tokens: set[int] = {0}
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
        ttl=st.sampled_from([0.5, 3.0, 30.0]),
        queue=st.booleans(),
    )
    def come(self, read: bool, limit: int, ttl: float, queue: bool) -> Asker:  # noqa: FBT001
        """A client wants it."""
        self.count += 1
        mode: Mode = "permit" if self.permits else "shared" if read else "exclusive"
        asker = Asker(f"owner-{self.count}", ttl, f"client-{self.count}", mode=mode, limit=limit)
        self.look(asker, queue)
        return asker

    @rule(asker=askers)
    def look_again(self, asker: Asker) -> None:
        """One that waits asks again, or one that had given up."""
        self.look(asker, queue=True)

    def look(self, asker: Asker, queue: bool) -> None:  # noqa: FBT001
        """Ask, and compare the answer with what others believe."""
        if asker.owner in self.believed or self.is_dead(asker):
            return
        before = [waiter for waiter in self.state.queue if not self.is_dead(waiter)]
        outcome, notify = self.state.acquire("x", asker, self.now, 0, queue=queue, dead=self.is_dead)
        assert asker not in notify
        if isinstance(outcome, Grant):
            self._granted(asker, outcome, before)
        else:
            assert self.believers() or self.state.queue, "refused though nobody holds it or waits"
            assert not queue or asker in self.state.queue

    def _granted(self, asker: Asker, grant: Grant, before: list[Asker]) -> None:
        assert grant.token > max(self.tokens), "the token did not grow"
        self.tokens.add(grant.token)
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

    @rule(asker=askers)
    def renew(self, asker: Asker) -> None:
        """A holder renews, or one that was a holder."""
        if self.is_dead(asker) or asker.owner not in self.believed:
            return
        until, held, slot = self.believed[asker.owner]
        renewed = self.state.renew(asker.owner, 2.0, self.now) == Renewed()
        assert renewed == (self.now < until)
        if renewed:
            self.believed[asker.owner] = (self.now + 2.0, held, slot)

    @rule(asker=askers)
    def downgrade(self, asker: Asker) -> None:
        """A writer becomes a reader."""
        known = self.believed.get(asker.owner)
        if known is None or known[1].mode != "exclusive" or self.is_dead(asker):
            return
        done, _ = self.state.downgrade(asker.owner, self.now)
        assert done == (self.now < known[0])
        if done:
            self.believed[asker.owner] = (known[0], reader(asker.owner), None)

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
        assert asker.owner not in self.state.shares

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

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.4, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on; who waits may miss an offer."""
        self.now += seconds
        self.slept.update(waiter.owner for waiter in self.state.queue)

    @invariant()
    def state_is_sound(self) -> None:
        """Held exclusively or by shares, and what is said of the holders is what they believe."""
        if not hasattr(self, "state"):
            return
        assert self.state.holder is None or not self.state.shares
        found = {holder.owner: holder for holder in self.state.holders(self.now, self.is_dead)}
        assert found.keys() == {asker.owner for asker, _ in self.believers()}
        for asker, slot in self.believers():
            assert found[asker.owner].mode == asker.mode
            assert found[asker.owner].slot == slot


TestSharedState = pytest.mark.timeout(600)(SharedStateMachine.TestCase)  # many examples for a busy machine
TestSharedState.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_waiting_writer_stops_new_readers_and_is_next() -> None:
    """First come, first served: r1 and r2 read, w waits, r3 comes later and waits behind it."""
    state: LockState[Asker] = LockState()
    assert isinstance(ask(state, reader("r1"), 0.0), Grant)
    assert isinstance(ask(state, reader("r2"), 0.0), Grant)
    assert isinstance(ask(state, writer("w"), 0.1), Busy)
    assert isinstance(ask(state, reader("r3"), 0.2), Busy)

    state.release("r1", 0.3)
    assert isinstance(ask(state, writer("w"), 0.3), Busy)
    _, notify = state.release("r2", 0.4)
    assert [claim.owner for claim in notify] == ["w", "r3"]
    assert isinstance(ask(state, reader("r3"), 0.4), Busy)
    assert isinstance(ask(state, writer("w"), 0.5), Grant)


def test_all_readers_before_the_next_writer_enter_together() -> None:
    """A release of the writer wakes r1, r2 and r3 at once, in whatever order they come; the writer behind waits."""
    state: LockState[Asker] = LockState()
    ask(state, writer("w1"), 0.0)
    for asker in (reader("r1"), reader("r2"), reader("r3"), writer("w2"), reader("r4")):
        assert isinstance(ask(state, asker, 0.1), Busy)

    _, notify = state.release("w1", 1.0)
    assert [claim.owner for claim in notify] == ["r1", "r2", "r3"]
    for owner in ("r3", "r1", "r2"):
        assert isinstance(ask(state, reader(owner), 1.1), Grant)
    assert isinstance(ask(state, reader("r4"), 1.2), Busy)


def test_writer_overtaken_by_nobody_when_readers_before_it_sleep() -> None:
    """A reader that misses its offer loses its place to the writer behind it, not to a reader that comes later."""
    state: LockState[Asker] = LockState()
    ask(state, writer("w1"), 0.0)
    for asker in (reader("r1"), reader("asleep"), writer("w2")):
        ask(state, asker, 0.1)
    state.release("w1", 1.0)
    assert isinstance(ask(state, reader("r1"), 1.0), Grant)

    assert isinstance(ask(state, reader("late"), 9.0), Busy)
    state.release("r1", 9.5)
    assert isinstance(ask(state, writer("w2"), 9.5), Grant)


def test_downgrade_lets_readers_in_and_no_writer() -> None:
    """A waiting writer does not get in between, whatever the order of the queue."""
    state: LockState[Asker] = LockState()
    ask(state, writer("w1"), 0.0)
    for asker in (reader("r1"), writer("w2")):
        ask(state, asker, 0.1)

    held, notify = state.downgrade("w1", 1.0)
    assert held
    assert [claim.owner for claim in notify][:1] == ["r1"]
    assert isinstance(ask(state, writer("w2"), 1.1), Busy)
    assert isinstance(ask(state, reader("r1"), 1.1), Grant)
    assert {holder.mode for holder in state.holders(1.2)} == {"shared"}


def test_interrupted_downgrade_leaves_a_writer_or_a_reader() -> None:
    """Never both, wherever Ctrl-C strikes: the release of one would leave the other."""
    functions = [LockState.downgrade, LockState._free, LockState._offer]
    number = 0
    while True:
        state: LockState[Asker] = LockState()
        ask(state, writer("w1"), 0.0)
        ask(state, writer("w2"), 0.1)
        strike = CallStrike(number, *(function.__code__ for function in functions))
        strike.during(partial(state.downgrade, "w1", 1.0))

        assert state.release("w1", 1.1)[0]
        assert isinstance(ask(state, writer("w2"), 1.2), Grant), f"instant {number}"
        if not strike.struck:
            break
        number += 1
    assert number > 1


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_permits_of_different_limits(order: tuple[int, int]) -> None:
    """Each is granted while fewer than its own limit are held; slots are the lowest that are free."""
    state: LockState[Asker] = LockState()
    grants = [ask(state, permit(f"p{limit}", limit), 0.0) for limit in order]
    assert [grant.slot for grant in grants if isinstance(grant, Grant)] == [0, 1]

    assert isinstance(ask(state, permit("small", 2), 0.1), Busy)
    state.abandon("small", 0.1)
    third = ask(state, permit("large", 3), 0.2)
    assert isinstance(third, Grant)
    assert third.slot == 2
    state.release(f"p{order[0]}", 0.3)
    assert isinstance(ask(state, permit("small again", 2), 0.4), Busy), "two others are still held"


def test_waiter_for_a_smaller_limit_is_not_overtaken() -> None:
    """Those with a larger limit, who would fit beside it, come and go while it waits for ever."""
    state: LockState[Asker] = LockState()
    for owner in ("first", "second"):
        assert isinstance(ask(state, permit(owner, 3), 0.0), Grant)
    assert isinstance(ask(state, permit("small", 1), 0.1), Busy)
    state.release("first", 0.2)

    assert isinstance(ask(state, permit("large", 3), 0.3), Busy), "it would be the third of three, but came later"
    assert state.release("second", 0.4)[1][0].owner == "small"
    assert isinstance(ask(state, permit("large", 3), 0.4), Busy), "beside it, the other one would have no place"
    assert isinstance(ask(state, permit("small", 1), 0.5), Grant)
    assert isinstance(ask(state, permit("large", 3), 0.6), Grant)


def test_waiter_that_finds_the_lease_over_is_not_notified_itself() -> None:
    """It has looked; the head of the queue, and nobody else, is to be told of the offer."""
    state: LockState[Asker] = LockState()
    for number in range(3):
        ask(state, Asker(f"{number}", 3.0), 0.0)

    outcome, notify = state.acquire("x", Asker("2", 3.0), 3.01, 0, queue=True)

    assert isinstance(outcome, Busy)
    assert [waiter.owner for waiter in notify] == ["1"]


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
