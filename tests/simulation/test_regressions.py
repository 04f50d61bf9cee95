"""
Bugs that random schedules found, each told again as a story of a few lines.

A seed repeats a bug only until the next change of what is drawn from it; a story stays. What the schedules reported:

=================================================== ===========================================================
story                                               first reported
=================================================== ===========================================================
shorter extend, believed only when answered         cover: the server had ended the lease 0.1 s before the deadline
renewal answered past the deadline                  deadlines: the lease came back after its deadline
unanswered extend, run after a later renewal        cover: the deadline was 0.7 s after the server's end
deadline counted from the start of the line         leftovers: a lease of 25 s, given up by its client after 5
lost lease whose extend was never answered          leftovers: it was left at the server
renewer spins while something is to be undone       unknown: too many steps, the next would be the renewer's
undoing repeated three times a second for each try  a schedule that took 264 ms, where others take 3
renewals wait for everything that is to be undone   the same
lease forgotten when another one expires            loss: nobody noticed that the lease passed its deadline
=================================================== ===========================================================
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockkit import BackendUnavailable, LockLost
from lockkit.aio import Lease
from lockkit_tools.simulation import CALM, Conditions, Node, Process
from tests.simulation.support import Stage, sleep


def assert_server_keeps(stage: Stage, alice: Process, lease: Lease) -> None:
    """What the holder believes is not more than the server has promised."""
    until = stage.node.clock.true_time(stage.server.records["x"].until)
    believed = alice.clock.true_time(alice.now() + lease.remaining())
    assert believed <= until


def test_shorter_extend_is_believed_before_it_is_sent() -> None:
    """Its answer is lost, and the server counts the shorter ttl all the same: the holder must not outlive it."""
    stage = Stage()
    alice, bob = stage.process("alice"), stage.process("bob")
    client, other = stage.client(alice, call_timeout=5.0), stage.client(bob)

    async def extend(lease: Lease) -> None:
        with pytest.raises((BackendUnavailable, LockLost)):
            await lease.extend(1.0)

    async def story() -> None:
        lease = await client.lock("x", ttl=30.0, renew=False).acquire()
        stage.network.cut(alice, stage.node, requests=False)
        extending = alice.start(extend(lease), "extend")
        await sleep(alice, 1.5)
        assert not lease.held, "the server has ended the lease, the call is still waiting for its answer"
        stage.network.heal(alice, stage.node)
        await extending.join()

    async def take() -> None:
        lease = await other.lock("x").acquire(timeout=40.0)
        assert bob.now() < 31.0
        await lease.release()

    bob.start(take(), "take")
    stage.play(alice, story())
    stage.end()


@pytest.mark.parametrize("seed", range(10))
def test_renewal_answered_past_the_deadline_is_a_loss(seed: int) -> None:
    """After a pause the renewer may run before the watch; in either order the clock comes first."""
    stage = Stage(seed)
    alice = stage.process()
    client = stage.client(alice, call_timeout=5.0)
    told: list[str] = []

    async def story() -> None:
        lock = client.lock("x", ttl=1.0, on_lost=lambda _, reason: told.append(reason))
        lease = await lock.acquire()
        # The renewal of 0.33 is run at 0.9, while it still counts, and its answer is there when alice goes on at 1.2.
        stage.world.call_at(0.2, stage.node.pause)
        stage.world.call_at(0.9, stage.node.resume)
        stage.world.call_at(0.8, alice.pause)
        stage.world.call_at(1.2, alice.resume)
        await sleep(alice, 1.3)
        assert not lease.held
        assert lease.lost
        assert told == ["expired"]
        await sleep(alice, 0.1)
        assert "x" not in stage.server.records, "the lock is free at once, not after the ttl that was renewed"

    stage.play(alice, story())
    stage.end()


def test_unanswered_extend_may_still_be_run() -> None:
    """Its request hangs in a connection that was given up, and is run after a later renewal was answered."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice, call_timeout=1.0)

    async def story() -> None:
        lease = await client.lock("x", ttl=10.0).acquire()
        stage.network.conditions = Conditions(slow=1.0, slow_max=3.0, latency=(3.0, 3.0))
        with pytest.raises(BackendUnavailable):
            await lease.extend(2.0)
        stage.network.conditions = CALM
        for _ in range(100):
            await sleep(alice, 0.05)
            assert_server_keeps(stage, alice, lease)
        assert lease.held, "it is renewed all the while"
        await lease.release()

    stage.play(alice, story())
    stage.end()


def test_failed_shorter_extend_is_followed_by_a_renewal() -> None:
    """The next planned renewal is later than the earlier deadline: without one before, the lease would be lost."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice, call_timeout=0.5)

    async def story() -> None:
        lease = await client.lock("x", ttl=30.0).acquire()
        await sleep(alice, 1.0)
        stage.network.cut(alice, stage.node, requests=False)
        with pytest.raises(BackendUnavailable):
            await lease.extend(2.0)
        stage.network.heal(alice, stage.node)
        for _ in range(40):
            await sleep(alice, 0.25)
            lease.check()
            assert_server_keeps(stage, alice, lease)
        await lease.release()

    stage.play(alice, story())
    stage.end()


def test_deadline_does_not_count_from_the_start_of_the_line() -> None:
    """Who has stood in its client's line for 8 s still gets a lease of 10 s."""
    stage = Stage()
    alice, bob = stage.process("alice"), stage.process("bob")
    client, other = stage.client(alice), stage.client(bob)

    async def hold() -> None:
        await sleep(bob, 8.0)
        await lease.release()

    async def wait() -> None:
        lease = await client.lock("x", ttl=10.0, renew=False).acquire()
        assert lease.remaining() > 9.8
        await lease.release()

    bob_acquires = bob.start(other.lock("x", ttl=10.0).acquire(), "acquire")
    stage.world.run(task=bob_acquires)
    lease = bob_acquires.result()
    bob.start(hold(), "hold")
    first = alice.start(client.lock("x").acquire(), "first in line", awaited=True)
    stage.world.run(until=1.0)
    # The first in line gives up in the instant in which the lock becomes free: the second asks for the first time.
    stage.world.call_at(8.0, first.cancel)
    stage.play(alice, wait())
    stage.end()


def test_lost_lease_is_undone_if_its_extend_was_never_answered() -> None:
    """The request was lost, so the server keeps the long lease, while the holder believes in the short one."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice, call_timeout=0.5)

    async def story() -> None:
        lease = await client.lock("x", ttl=60.0, renew=False).acquire()
        stage.network.cut(alice, stage.node)
        with pytest.raises(BackendUnavailable):
            await lease.extend(2.0)
        stage.network.heal(alice, stage.node)
        assert await lease.wait_lost(10.0)
        await sleep(alice, 1.0)
        assert "x" not in stage.server.records

    stage.play(alice, story())
    stage.end()


def test_lost_lease_is_undone_if_its_extend_is_still_unanswered() -> None:
    """The longer ttl counts at the server, the answer is lost, and the deadline passes before the call gives up."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice, call_timeout=5.0)

    async def extend(lease: Lease) -> None:
        with pytest.raises(BackendUnavailable):
            await lease.extend(60.0)

    async def story() -> None:
        lease = await client.lock("x", ttl=2.0, renew=False).acquire()
        stage.network.cut(alice, stage.node, requests=False)
        extending = alice.start(extend(lease), "extend")
        await sleep(alice, 1.0)
        stage.network.heal(alice, stage.node)
        assert await lease.wait_lost(10.0)
        await sleep(alice, 0.1)
        assert "x" not in stage.server.records
        await extending.join()

    stage.play(alice, story())
    stage.end()


def test_undoing_for_longer_than_the_linger_does_not_spin() -> None:
    """With the last work more than 10 s ago and something planned in 0.2 s, the renewer waits those 0.2 s."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice, call_timeout=15.0)

    async def story() -> None:
        stage.network.cut(alice, stage.node)
        with pytest.raises(BackendUnavailable):
            await client.lock("x", ttl=100.0).acquire(timeout=0.0)
        await sleep(alice, 60.0)

    # A spinning task takes the world's steps: `Overrun`.
    stage.play(alice, story())
    stage.end()


def test_waiting_through_an_outage_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try leaves something to undo; all of them together ask a few times a second, not a hundred."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice)
    requests: list[float] = []
    receive = stage.node.receive

    def count(operation: Callable[[], object], reply: Callable[..., object]) -> None:
        requests.append(stage.world.now)
        receive(operation, reply)

    async def story() -> None:
        stage.node.stop()
        with pytest.raises(BackendUnavailable):
            await client.lock("x", ttl=30.0).acquire(timeout=60.0)

    monkeypatch.setattr(Node, "receive", lambda _, *request: count(*request))
    stage.play(alice, story())
    stage.end()

    assert 60 < len(requests) < 60 * 18


def test_renewals_do_not_wait_for_what_is_to_be_undone() -> None:
    """Twenty undoings that hang for longer than the ttl, and fail; a lease of 3 s lives on."""
    stage = Stage()
    alice = stage.process()
    client = stage.client(alice)

    async def undo() -> None:
        await sleep(alice, 5.0)
        raise BackendUnavailable("no answer")

    async def story() -> None:
        lease = await client.lock("x", ttl=3.0).acquire()
        for _ in range(20):
            client._engine.cleanups.add(30.0, undo)
        for _ in range(60):
            await sleep(alice, 0.5)
            lease.check()
        await lease.release()

    stage.play(alice, story())
    stage.end()


def test_lease_is_watched_on_when_another_one_expires() -> None:
    """
    The other one was on the watch's agenda twice when it expired, and counted as two.

    It was extended to a shorter ttl, so that its former entry came while the last renewal was in flight.
    """
    stage = Stage()
    alice = stage.process("alice")
    client = stage.client(alice, call_timeout=30.0)
    lost: dict[str, float] = {}

    def note(lease: Lease, reason: str) -> None:
        assert reason == "expired"
        lost[lease.name] = alice.now()

    async def story() -> None:
        began = alice.now()
        other = await client.lock("other", ttl=33.0, on_lost=note).acquire()
        watched = await client.lock("watched", ttl=20.0, renew=False, on_lost=note).acquire()
        await sleep(alice, 1.0)
        await other.extend(10.0)
        stage.network.cut(alice, stage.node)
        await sleep(alice, 30.0)
        assert sorted(lost) == ["other", "watched"]
        assert lost["other"] - began < 12.0
        assert lost["watched"] - began < 21.0
        del other, watched

    stage.play(alice, story())
