"""A holder that makes no progress loses its lock, on simulated time; the other APIs in memory."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

import lockkit
from lockkit.errors import ConfigurationError, LockError, LockLost
from lockkit.testing.face_driver import FaceDriver
from lockkit_tools.simulation import Process
from tests.engine.scripted import Gate, MovableClock, pass_time, scripted
from tests.faces import both_faces, scripted_for
from tests.primitives.test_election import TTL, play
from tests.simulation.support import Stage, sleep
from tests.test_observers import Recorder, observed
from tests.tries import until, wait_for_observers

STALL = 10.0


def test_holder_without_a_beat_loses_the_lock_at_most_stall_and_ttl_later(caplog: pytest.LogCaptureFixture) -> None:
    """A waiter has it then; the reason is told in one warning, to the callback and in the error."""
    told: list[str] = []

    async def story(stage: Stage, alice: Process) -> None:
        bob = stage.client(alice)
        client = stage.client(alice)
        lease: Any = await client.lock(
            "x", ttl=TTL, stall=STALL, on_lost=lambda _, reason: told.append(reason)
        ).acquire()
        granted = alice.now()
        await sleep(alice, STALL - 0.1)
        assert lease.held
        assert not lease.stalled
        await sleep(alice, 0.2)
        assert lease.held
        assert lease.stalled
        after = await bob.lock("x", ttl=TTL).acquire(60)
        assert STALL <= alice.now() - granted <= STALL + TTL + 0.1
        assert after.token > lease.token
        with pytest.raises(LockLost, match="made no progress"):
            lease.beat()
        assert lease.stalled
        await after.release()

    with caplog.at_level(logging.WARNING, "lockkit"):
        play(story)
    assert told == ["stalled"]
    assert sum("has made no progress for 10 s, since 2" in line for line in caplog.messages) == 1


def test_hanging_log_handler_keeps_nothing_from_being_renewed() -> None:
    """The warning about one holder is not written by the thread that watches all leases."""
    hangs = Gate()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no progress" in record.getMessage():
                hangs()

    log, handler = logging.getLogger("lockkit"), Handler()
    log.addHandler(handler)
    try:
        client, backend = scripted()
        with client.lock("held", ttl=1), client.lock("x", ttl=1, stall=0.1, raise_on_lost=False):
            hangs.reached()
            before = backend.calls.count("renew")
            until(lambda: backend.calls.count("renew") >= before + 2)
            hangs.open.set()
    finally:
        log.removeHandler(handler)


def test_stall_is_told_before_the_watch_has_seen_it() -> None:
    """As with `lost`, a look asks the clock; who has released has not stalled."""
    client, _ = scripted(MovableClock())
    leases: list[Any] = [client.lock(name, ttl=60, stall=STALL).acquire() for name in "xy"]
    leases[1].release()
    client._engine.runtime.added += STALL + 1  # without a word to the watch
    assert [lease.stalled for lease in leases] == [True, False]
    client.close()


def test_beats_and_extend_keep_it_and_nothing_else_does() -> None:
    """`check`, `held` and `remaining` are looks, and a look is no progress."""

    async def story(stage: Stage, alice: Process) -> None:
        lease: Any = await stage.client(alice).lock("x", ttl=TTL, stall=timedelta(seconds=STALL)).acquire()
        for _ in range(3):
            await sleep(alice, STALL - 1)
            lease.beat()
        await sleep(alice, STALL - 1)
        await lease.extend()
        await sleep(alice, STALL - 1)
        lease.check()
        assert lease.held
        assert lease.remaining() > 0
        assert not lease.stalled
        await sleep(alice, 2)
        assert lease.stalled
        await lease.wait_lost(None)

    play(story)


def test_beat_before_the_deadline_renews_at_once() -> None:
    """Work that went on after all keeps its lock."""

    async def story(stage: Stage, alice: Process) -> None:
        lease: Any = await stage.client(alice).lock("x", ttl=TTL, stall=STALL).acquire()
        await sleep(alice, STALL)
        while lease.remaining() > 0.5:
            await sleep(alice, 0.1)
        assert lease.stalled
        lease.beat()
        assert not lease.stalled
        await sleep(alice, 0.1)
        assert lease.remaining() > TTL * 0.9
        await sleep(alice, STALL - 1)
        assert lease.held
        await lease.release()
        assert not lease.lost

    play(story)


def test_stall_shorter_than_the_ttl_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch does not wait for the next renewal to look."""
    wait_for_observers(monkeypatch)

    async def story(stage: Stage, alice: Process) -> None:
        lease: Any = await stage.client(alice).lock("x", ttl=300.0, stall=1.0).acquire()
        await sleep(alice, 1.01)
        lease.beat()
        await sleep(alice, 0.9)
        lease.beat()
        await sleep(alice, 1.01)
        await lease.release()

    recorder = Recorder()
    with observed(recorder):
        play(story)
    stalls = [event for call, event in recorder.events if call == "stalled"]
    assert [event.name for event in stalls] == ["x", "x"]
    assert [event.held for event in stalls] == pytest.approx([1.0, 2.91], abs=0.01)


def test_set_has_one_beat_which_begins_with_its_last_lock() -> None:
    """Waiting for a lock of the set is no stall of the others, and a beat counts for all."""

    async def story(stage: Stage, alice: Process) -> None:
        client, bob = stage.client(alice), stage.client(alice)
        busy = await bob.lock("b", ttl=TTL).acquire()
        waiting = alice.start(client.locks(["a", "b"], ttl=TTL, stall=STALL).acquire(), "set", awaited=True)
        await sleep(alice, 2 * STALL)
        await busy.release()
        assert await waiting.join(1)
        leases: Any = waiting.result()
        await sleep(alice, STALL - 1)
        assert not leases.stalled
        leases.beat()
        await sleep(alice, STALL - 1)
        assert leases.held
        await sleep(alice, 1 + TTL)
        assert leases.stalled
        assert all(lease.lost for lease in leases)

    play(story)


def test_term_must_stop_when_its_leader_makes_no_progress() -> None:
    """Asking is progress; a leader that does not ask is replaced, and told to stop when it asks again."""

    async def story(stage: Stage, alice: Process) -> None:
        bob = stage.client(alice)
        term = await stage.client(alice).election("x", ttl=TTL, stall=STALL).campaign()
        for _ in range(4):
            await sleep(alice, STALL - 1)
            assert not await term.must_stop()
        began = alice.now()
        async with bob.election("x", ttl=TTL).campaign() as after:
            assert STALL <= alice.now() - began <= STALL + TTL + 0.1
            assert await term.must_stop()
            assert after.token > term.token

    play(story)


def test_term_that_waits_in_must_stop_is_told_at_the_stall() -> None:
    """One thread that waits there does not speak for the work of another."""

    async def story(stage: Stage, alice: Process) -> None:
        term = await stage.client(alice).election("x", ttl=TTL, stall=STALL).campaign()
        began = alice.now()
        assert await term.must_stop(None)
        assert alice.now() - began == pytest.approx(STALL, abs=0.01)
        term_error = term._tenure.ended_error()
        assert "made no progress for 10 s" in str(term_error)
        await sleep(alice, TTL)
        with pytest.raises(LockLost):
            await term.resign()

    play(story)


@both_faces
async def test_reentry_and_once_share_the_beat_of_their_lease(driver: FaceDriver) -> None:
    """There is one lease, so there is one beat."""
    client, _ = scripted_for(driver)
    lock = client.lock("x", ttl=30, stall=5, reentrant=True)
    outer = await lock.acquire()
    inner = await lock.acquire()
    before = outer._record.renewal.stall_at
    inner.beat()
    assert outer._record.renewal.stall_at > before
    await inner.release()
    await outer.release()

    async with client.once("charge:1", keep=60, ttl=30, stall=5) as attempt:
        record = attempt._attempt.lease._record
        before = record.renewal.stall_at
        attempt.beat()
        assert record.renewal.stall_at > before
        await attempt.done("paid")
        attempt.beat()
    async with client.once("charge:1", keep=60, ttl=30, stall=5) as repeat:
        repeat.beat()
        assert not repeat.first
    await client.close()


def test_decorated_function_finds_its_lease() -> None:
    """Of several the innermost; also a plain wrapper around a coroutine function, and one with a permit or once."""
    with lockkit.connect("memory://") as client:

        @client.lock("inner:{n}", stall=60)
        def inner(n: int) -> str:
            lockkit.current_lease().beat()
            return f"{lockkit.current_lease().name} {n}"

        @client.lock("outer", stall=60)
        def outer() -> list[str]:
            return [lockkit.current_lease().name, inner(1), lockkit.current_lease().name]

        @client.lock("coroutine", stall=60)
        async def coroutine() -> str:
            await asyncio.sleep(0)
            return lockkit.current_lease().name

        @client.lock("wrapper", stall=60)
        @functools.wraps(coroutine)
        def wrapper() -> Coroutine[Any, Any, str]:
            assert lockkit.current_lease().name == "wrapper"
            return name_later()

        async def name_later() -> str:
            await asyncio.sleep(0)
            return lockkit.current_lease().name

        @client.semaphore("permits", limit=2, stall=60)
        def permit() -> bool:
            return lockkit.current_lease().held

        @client.once("once", keep=60, stall=60)
        def once() -> bool:
            lockkit.current_lease().beat()
            return lockkit.current_lease().held

        assert outer() == ["outer", "inner:1 1", "outer"]
        assert asyncio.run(coroutine()) == "coroutine"
        assert asyncio.run(wrapper()) == "wrapper"
        assert [permit(), once()] == [True, True]
    with pytest.raises(LockError, match="outside a function"):
        lockkit.current_lease()


def test_decorated_coroutine_function_finds_its_lease() -> None:
    """So do tasks that it starts; two calls at once have each their own, and the sync API has none."""

    async def child() -> str:
        lockkit.aio.current_lease().beat()
        return lockkit.aio.current_lease().name

    async def main() -> None:
        async with lockkit.aio.connect("memory://") as client:

            @client.lock("x:{n}", stall=60)
            async def work(n: str) -> bool:
                await asyncio.sleep(0)
                with pytest.raises(LockError, match=r"of lockkit was called"):
                    lockkit.current_lease()
                return await asyncio.create_task(child()) == f"x:{n}"

            @client.once("once", keep=60, stall=60)
            async def once() -> bool:
                return lockkit.aio.current_lease().held

            assert tuple(await asyncio.gather(work("a"), work("b"), once())) == (True, True, True)
        with pytest.raises(LockError, match=r"of lockkit\.aio was called"):
            lockkit.aio.current_lease()

    asyncio.run(main())


@both_faces
async def test_lease_without_stall_only_checks(driver: FaceDriver) -> None:
    """So that a library may beat whatever lease it is given."""
    client, _ = scripted_for(driver)
    lease = await client.lock("x", ttl=30).acquire()
    lease.beat()
    assert not lease.stalled
    await lease.release()
    with pytest.raises(LockLost, match="was released"):
        lease.beat()
    await client.close()


@pytest.mark.parametrize("stall", [0, -1, float("nan"), "soon", True])
@both_faces
async def test_stall_that_is_no_time_is_refused(driver: FaceDriver, stall: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """By each call that takes it, with nothing sent."""
    client, backend = scripted_for(driver)
    makers: tuple[Callable[[], object], ...] = (
        lambda: client.lock("x", stall=stall),
        lambda: client.rwlock("x", stall=stall),
        lambda: client.semaphore("x", 2, stall=stall),
        lambda: client.locks(["x", "y"], stall=stall),
        lambda: client.election("x", stall=stall),
        lambda: client.once("x", keep=1, stall=stall),
    )
    for make in makers:
        with pytest.raises(ConfigurationError, match="stall"):
            make()
    assert backend.calls == []
    await client.close()


@both_faces
async def test_stall_without_renewal_is_refused(driver: FaceDriver) -> None:
    """It would do nothing."""
    client, _ = scripted_for(driver)
    with pytest.raises(ConfigurationError, match=r"renew=False renews none") as error:
        client.lock("x", renew=False, stall=5)
    assert error.value.name == "x"
    await client.close()


def test_paused_holder_is_told_of_the_pause() -> None:
    """A process that stood still could not beat: that is why it lost the lock, not its work."""
    told: list[str] = []
    client, _ = scripted(MovableClock())
    lease = client.lock("x", ttl=2, stall=3, on_lost=lambda _, reason: told.append(reason)).acquire()

    pass_time(client, 60)

    assert lease.wait_lost(30)
    client.close()
    assert told == ["paused"]
