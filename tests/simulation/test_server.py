"""The simulated lock service and its client."""

from __future__ import annotations

import pytest

import lockkit
from lockkit.backend import Busy, Gone, Grant, Renewed, Request
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.url import parse
from lockkit_tools.simulation import Conditions, SimulatedBackend, SimulatedRuntime
from lockkit_tools.simulation.history import Freed
from lockkit_tools.simulation.server import Refusal
from tests.simulation.support import Stage, sleep


def ask(stage: Stage, owner: str, ttl: float = 10.0, woken: list[str] | None = None) -> int | Refusal:
    """Ask for lock "x" at the server, without network; wake-ups go to a list."""
    process = next(process for process in stage.world.processes if process.name == "alice")
    wake = None if woken is None else lambda: woken.append(owner)
    return stage.server.acquire(process, "x", owner, ttl, wake=wake)


@pytest.fixture
def stage() -> Stage:
    """A server, and alice."""
    stage = Stage()
    stage.process()
    return stage


def test_token_is_the_wall_clock_or_one_more_than_the_last(stage: Stage) -> None:
    """It increases also when the clock was set back."""
    first = ask(stage, "A")
    stage.server.release("x", "A")
    stage.node.wall_clock.jump(-1000.0)
    second = ask(stage, "B")

    assert first == stage.node.wall_us() + 1000e6
    assert second == first + 1


def test_token_after_lost_data_is_still_higher(stage: Stage) -> None:
    """Thanks to the clock: the counter is gone."""
    first = ask(stage, "A")
    stage.node.stop(lose_data=True)
    stage.world.run(until=0.5)
    stage.node.start()

    second = ask(stage, "B")

    assert isinstance(first, int)
    assert isinstance(second, int)
    assert second > first


def test_lease_ends_by_the_node_s_clock(stage: Stage) -> None:
    """Not before, and then for anybody."""
    assert isinstance(ask(stage, "A", ttl=10.0), int)

    stage.world.run(until=9.999)
    refusal = ask(stage, "B")
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after == pytest.approx(0.001)
    assert refusal.owner == "A"
    stage.world.run(until=10.0)
    assert isinstance(ask(stage, "B"), int)
    assert stage.server.renew("x", "A", 10.0) == "taken"
    assert stage.server.release("x", "A") is False


def test_fair_queue_keeps_a_free_lock_for_its_head(stage: Stage) -> None:
    """For a while: a head that does not come has lost its turn."""
    woken: list[str] = []
    ask(stage, "A")
    assert isinstance(ask(stage, "B", woken=woken), Refusal)
    assert isinstance(ask(stage, "C", woken=woken), Refusal)

    stage.server.release("x", "A")
    stage.world.run(until=0.5)

    assert sorted(woken) == ["B", "C"]
    refusal = ask(stage, "C", woken=woken)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after == pytest.approx(0.5)
    assert refusal.owner is None
    stage.world.run(until=1.1)
    assert isinstance(ask(stage, "C", woken=woken), int)


def test_abandoned_head_passes_its_turn_on(stage: Stage) -> None:
    """And what it was granted, if it was."""
    woken: list[str] = []
    ask(stage, "A")
    ask(stage, "B", woken=woken)
    ask(stage, "C", woken=woken)
    stage.server.release("x", "A")

    stage.server.abandon("x", "B")
    assert isinstance(ask(stage, "C", woken=woken), int)
    stage.server.abandon("x", "C")

    freed = [event for event in stage.history if isinstance(event, Freed)]
    assert [(event.owner, event.how) for event in freed] == [("A", "released"), ("C", "undone")]
    quiet = stage.server.left(final=True)
    assert quiet.holders == quiet.waiters == ()


@pytest.mark.parametrize(("wakeup", "expected"), [("all", ["B", "C"]), ("none", [])])
def test_other_ways_to_wake(wakeup: str, expected: list[str]) -> None:
    """All waiters, whoever comes first; or none, who poll."""
    stage = Stage(wakeup=wakeup)  # type: ignore[arg-type]
    stage.process()
    woken: list[str] = []
    for owner in "ABC":
        ask(stage, owner, woken=woken)

    stage.server.release("x", "A")
    stage.world.run(until=0.1)

    assert sorted(woken) == expected
    assert isinstance(ask(stage, "C", woken=woken), int)


def test_restart_forgets_who_waited_and_keeps_who_held(stage: Stage) -> None:
    """Connections end; records are on disk."""
    woken: list[str] = []
    ask(stage, "A")
    ask(stage, "B", woken=woken)

    stage.node.stop()
    stage.node.start()

    assert stage.server.left(final=False).holders == (("alice", "A"),)
    assert stage.server.left(final=False).waiters == ()


def test_backend_answers_as_the_contract_says() -> None:
    """Grant, busy, renewed, gone, holders, broken."""
    stage = Stage()
    alice = stage.process()
    backend = SimulatedBackend(alice, stage.server, stage.network, 1.0)
    runtime = SimulatedRuntime(alice)

    def request(owner: str) -> Request:
        return Request("x", owner, 10.0, '{"pid": 1}', queue=True, runtime=runtime)

    async def story() -> None:
        grant = await backend.try_acquire(request("A"))
        assert isinstance(grant, Grant)
        waiting = request("B")
        busy = await backend.try_acquire(waiting)
        assert isinstance(busy, Busy)
        assert busy.owner == "A"
        assert await backend.renew([grant]) == [Renewed()]
        (holder,) = await backend.holders("x")
        assert (holder.owner, holder.token, holder.metadata, holder.waiters) == ("A", grant.token, {"pid": 1}, 1)
        await backend.abandon(waiting)
        assert await backend.break_lock("x")
        assert not await backend.break_lock("x")
        assert await backend.renew([grant]) == [Gone()]
        assert await backend.release(grant) is False
        await backend.ping()
        await backend.close()

    stage.play(alice, story())


def test_no_answer_is_backend_unavailable() -> None:
    """After the time that a call may take."""
    stage = Stage(conditions=Conditions(requests_lost=1.0))
    alice = stage.process()
    backend = SimulatedBackend(alice, stage.server, stage.network, 0.5)

    async def story() -> None:
        with pytest.raises(BackendUnavailable, match=r"no answer from server within 0\.5 s"):
            await backend.ping()
        assert alice.now() == pytest.approx(0.5)

    stage.play(alice, story())


def test_backend_has_no_url() -> None:
    """It is made from objects."""
    with pytest.raises(ConfigurationError, match=r"simulation\.connect"):
        SimulatedBackend.open(parse("simulated://x"), {}, None)  # type: ignore[arg-type]


def test_client_is_the_asyncio_face_on_virtual_time() -> None:
    """The engine is the real one: renewed for an hour, waited for by another, given back."""
    stage = Stage()
    alice, bob = stage.process("alice", rate=1.001, offset=50.0), stage.process("bob")
    first, second = stage.client(alice), stage.client(bob, ttl=5.0)
    times = []

    async def hold() -> None:
        lease = await first.lock("seat", ttl=10.0).acquire()
        await sleep(alice, 3600.0)
        lease.check()
        await lease.release()
        await first.close()

    async def wait() -> None:
        await sleep(bob, 1.0)
        with pytest.raises(lockkit.LockTimeout):
            await second.lock("seat").acquire(timeout=60.0)
        times.append(bob.now())
        lease = await second.lock("seat").acquire()
        times.append(bob.now())
        assert lease.ttl == 5.0
        await lease.release()
        await second.close()

    alice.start(hold(), "hold")
    stage.play(bob, wait())
    stage.end()

    assert times == pytest.approx([61.0, 3596.4], abs=0.1)
