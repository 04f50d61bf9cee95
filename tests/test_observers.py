"""Observers: which events they see, and that nothing they do reaches a lock."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import lockkit
from lockkit import LockEvent, observers
from lockkit.errors import BackendUnavailable
from lockkit.observers import CALLS
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import fail, once, scripted
from tests.faces import both_faces, scripted_for
from tests.tries import begin_to_wait, beside, until, until_async, wait_for_observers


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an observer that does not hang may take longer than a call waits for it."""
    if "stuck" not in request.fixturenames:
        wait_for_observers(monkeypatch)


class Recorder:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, LockEvent]] = []
        self._more = threading.Condition()

    def __getattr__(self, call: str) -> Any:  # noqa: ANN401 - any call
        if call not in CALLS:
            raise AttributeError(call)

        def record(event: LockEvent) -> None:
            with self._more:
                self.events.append((call, event))
                self._more.notify_all()

        return record

    @property
    def calls(self) -> list[str]:
        """Names of the calls so far."""
        return [call for call, _ in self.events]

    def await_call(self, call: str) -> LockEvent:
        """Wait for a call; returns the event of the last one."""
        with self._more:
            assert self._more.wait_for(lambda: call in self.calls, PATIENCE), self.calls
        return [event for name, event in self.events if name == call][-1]


@contextmanager
def observed(observer: object) -> Iterator[None]:
    """Observe inside the block."""
    lockkit.add_observer(observer)
    try:
        yield
    finally:
        lockkit.remove_observer(observer)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """An observer that keeps all events."""
    recorder = Recorder()
    with observed(recorder):
        yield recorder


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://observers", ttl=PATIENCE) as client:
        yield client


# -- which events there are ------------------------------------------------------------------------------------------


@both_faces
async def test_acquire_and_release_are_seen_before_the_calls_return(driver: FaceDriver, recorder: Recorder) -> None:
    """What an observer has counted is up to date when the call returns; all get the same object, so it is frozen."""
    client = await driver.connect(ttl=PATIENCE)
    before = time.time()

    lease = await client.lock("a", label="letters").acquire()
    assert recorder.calls == ["granted"]
    await lease.extend()
    await lease.release()
    assert recorder.calls == ["granted", "renewed", "released"]

    granted, _, released = (event for _, event in recorder.events)
    assert (granted.name, granted.template, granted.backend) == ("a", "letters", client.url)
    assert (granted.mode, granted.token, granted.owner) == ("exclusive", lease.token, lease.owner)
    assert granted.waited is not None
    assert 0 <= granted.waited < PATIENCE
    assert (granted.held, granted.reason) == (None, None)
    assert (released.token, released.owner, released.waited) == (lease.token, lease.owner, None)
    assert released.held is not None
    assert 0 < released.held < PATIENCE
    assert before <= granted.at <= released.at <= time.time()
    with pytest.raises(dataclasses.FrozenInstanceError):
        granted.name = "b"  # type: ignore[misc]


@both_faces
async def test_waiter_that_waits_twice_tells_it_once(driver: FaceDriver, recorder: Recorder) -> None:
    """First behind another call of its client, then at the backend."""
    client = await driver.connect(ttl=PATIENCE)
    held = await client.lock("a").acquire()
    calls = []
    for number in (1, 2):
        calls.append(driver.spawn(client.lock("a").acquire()))
        await driver.eventually(partial(_count, recorder, "waiting", number), "it waits")
    await held.release()
    await driver.eventually(lambda: bool(client._engine.acquisitions.waiting), "the second is at the backend")
    for call in calls:
        await (await call.result()).release()

    assert sorted(recorder.calls) == ["granted"] * 3 + ["released"] * 3 + ["waiting"] * 2


def _count(recorder: Recorder, call: str, number: int) -> bool:
    return recorder.calls.count(call) == number


@both_faces
async def test_busy_lock_refuses(driver: FaceDriver, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single try does not wait; a timed wait does, and both are refused as busy."""
    begin_to_wait(monkeypatch)
    client = await driver.connect(ttl=PATIENCE)
    async with client.lock("a"):
        assert await client.lock("a").try_acquire() is None
        assert await client.lock("a").try_acquire(0.01) is None

    assert recorder.calls == ["granted", "refused", "waiting", "refused", "released"]
    refused = [event for call, event in recorder.events if call == "refused"]
    assert [event.reason for event in refused] == ["busy", "busy"]
    assert refused[1].waited is not None
    assert refused[1].waited >= 0.01


@pytest.mark.parametrize(
    ("error", "reason"), [(BackendUnavailable("gone"), "unavailable"), (asyncio.CancelledError(), "cancelled")]
)
@both_faces
async def test_request_without_an_answer_is_undone_and_refused(
    driver: FaceDriver, recorder: Recorder, error: BaseException, reason: str
) -> None:
    """Each call that was begun has an end."""
    client, backend = scripted_for(driver)
    backend.after["try_acquire"] = fail(error)

    async with client:
        with pytest.raises(type(error)):
            await client.lock("a").acquire(timeout=0)

        assert recorder.await_call("refused").reason == reason
        assert recorder.calls == ["undone", "refused"]
        assert recorder.events[0][1].owner is not None


def test_renewals_jeopardy_and_recovery(recorder: Recorder) -> None:
    """A renewal without an answer is jeopardy once, then lockkit renews again."""
    client, backend = scripted()
    backend.before["renew"] = once(fail(BackendUnavailable("gone")))

    with client.lock("a", ttl=10 * PATIENCE) as lease:
        client._engine.confirm_soon()
        recorder.await_call("jeopardy")
        client._engine.confirm_soon()
        recorder.await_call("renewed")

    assert recorder.calls[:3] == ["granted", "jeopardy", "renewed"]
    event = recorder.await_call("jeopardy")
    assert (event.token, event.reason) == (lease.token, "unavailable")
    assert event.held is not None


def test_loss_has_its_reason_and_no_release(client: lockkit.Client, recorder: Recorder) -> None:
    """After `granted` comes `released` or `lost`, never both."""
    lease = client.lock("a").acquire()
    client.break_lock("a")

    event = recorder.await_call("lost")
    with pytest.raises(lockkit.LockLost):
        lease.release()

    assert (event.reason, event.token) == ("broken", lease.token)
    assert event.held is not None
    assert recorder.calls == ["granted", "lost"]


def test_loss_that_the_release_discovers(recorder: Recorder) -> None:
    """The backend does not hold it any more: that is a loss, and no release."""
    client, backend = scripted()
    lease = client.lock("a").acquire()
    backend._space.locks.clear()

    with pytest.raises(lockkit.LockLost):
        lease.release()

    assert recorder.await_call("lost").reason == "gone"
    assert recorder.calls == ["granted", "lost"]


def test_release_without_an_answer_is_told_once(recorder: Recorder) -> None:
    """Releasing again after a failure is no second release."""
    client, backend = scripted()
    lease = client.lock("a").acquire()
    backend.before["release"] = fail(BackendUnavailable("gone"))

    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            lease.release()
    del backend.before["release"]
    lease.release()

    assert recorder.await_call("released").reason == "unconfirmed"
    with client.lock("b"):
        pass
    assert recorder.calls == ["granted", "released", "granted", "released"]


def test_leases_that_are_closed_and_dropped(recorder: Recorder) -> None:
    """A lease is released with its client, or by the garbage collector; one under which a body runs is lost."""
    client = lockkit.connect("memory://observers-close", ttl=PATIENCE)
    with pytest.warns(ResourceWarning, match="dropped without release"):
        client.lock("dropped").acquire()
    assert recorder.await_call("released").reason == "dropped"
    recorder.events.clear()
    lease = client.lock("a").acquire()
    with pytest.raises(lockkit.LockLost), client.lock("b"):
        client.close()

    assert recorder.await_call("released").reason == "closed"
    assert recorder.await_call("lost").reason == "session"
    assert not lease.held


def test_modes_and_names_of_readers_and_permits(client: lockkit.Client, recorder: Recorder) -> None:
    """A name is the application's own, whatever the backend calls it."""
    with client.rwlock("a").read(), client.semaphore("b", limit=2, label="calls"):
        pass

    events = [(call, event.name, event.template, event.mode) for call, event in recorder.events]
    assert events == [
        ("granted", "a", "a", "shared"),
        ("granted", "b", "calls", "permit"),
        ("released", "b", "calls", "permit"),
        ("released", "a", "a", "shared"),
    ]


def test_permits_that_are_locks_of_slots(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each slot is a lock, one call is one event all the same, with the semaphore's name and mode."""
    begin_to_wait(monkeypatch)
    client, backend = scripted()
    backend.capabilities = dataclasses.replace(backend.capabilities, permits="slots")
    semaphore = client.semaphore("b", limit=2)
    with semaphore, semaphore:
        assert semaphore.try_acquire(0.01) is None

    assert recorder.calls == ["granted", "granted", "waiting", "refused", "released", "released"]
    assert {(event.name, event.mode) for _, event in recorder.events} == {("b", "permit")}
    # Entering again acquires nothing: what counts leases would count it twice, and its end once.
    for reentrant in (client.semaphore("b", limit=2, reentrant=True), client.lock("a", reentrant=True)):
        recorder.events.clear()
        with reentrant as outer, reentrant as inner:
            assert inner is outer
        assert recorder.calls == ["granted", "released"]


# -- templates -------------------------------------------------------------------------------------------------------


def test_template_is_the_decorators_name_with_its_fields(client: lockkit.Client, recorder: Recorder) -> None:
    """All seats count under one label."""

    @client.lock("seat:{seat}")
    def book(seat: str) -> str:
        return seat

    @client.semaphore("hall:{hall}", limit=3)
    def enter(hall: str) -> str:
        return hall

    @client.locks(["from:{one}", "to:{other}"])
    def move(one: str, other: str) -> str:
        return one + other

    @client.once("charge:{order}", keep=PATIENCE)
    def charge(order: int) -> int:
        return order

    @client.lock("plain", label="given")
    @client.once("plain:{n}", keep=PATIENCE, label="once given")
    def plain(n: int) -> None:
        pass

    book("12A")
    enter("big")
    move("x", "y")
    charge(17)
    plain(1)

    granted = [(event.name, event.template, event.label) for call, event in recorder.events if call == "granted"]
    assert granted == [
        ("seat:12A", "seat:{seat}", "seat:{seat}"),
        ("hall:big", "hall:{hall}", "hall:{hall}"),
        ("from:x", "from:{one}", "from:{one}"),
        ("to:y", "to:{other}", "to:{other}"),
        ("charge:17", "charge:{order}", "charge:{order}"),
        ("plain", "given", "given"),
        ("plain:1", "once given", "once given"),
    ]


def test_labels(client: lockkit.Client, recorder: Recorder) -> None:
    """Elections and once take one; without, `template` falls back to the name; it is a short text."""
    with client.election("boss", label="bosses").campaign(timeout=PATIENCE), client.lock("seat"):
        pass
    with client.once("charge:18", keep=PATIENCE, label="charges") as attempt:
        attempt.done(None)

    granted = [(event.name, event.template, event.label) for call, event in recorder.events if call == "granted"]
    assert granted == [
        ("boss", "bosses", "bosses"),
        ("seat", "seat", None),
        ("charge:18", "charges", "charges"),
    ]
    wrongs: list[Any] = ["", 7, "x" * 256]
    for wrong in wrongs:
        with pytest.raises(lockkit.ConfigurationError, match="label"):
            client.lock("a", label=wrong)


# -- asyncio ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_cancellation_while_observers_are_told_leaves_nothing_held() -> None:
    """The lock is granted, but its caller never gets the lease."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def granted(self, event: LockEvent) -> None:
            del event
            inside.set()
            go_on.wait(PATIENCE)

    async with await lockkit.aio.connect("memory://observers-cancel", ttl=PATIENCE) as client:
        with observed(Slow()):
            task = asyncio.create_task(client.lock("a").acquire())
            await until_async(inside.is_set)
            task.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

        assert await client.holders("a") == []


# -- nothing that an observer does reaches a lock --------------------------------------------------------------------


class Stuck:
    """Never returns, whatever it is called with, until the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.called = threading.Event()

    def __getattr__(self, call: str) -> Any:  # noqa: ANN401 - any call
        if call not in CALLS:
            raise AttributeError(call)

        def block(event: LockEvent) -> None:
            del event
            self.called.set()
            self.gate.wait()

        return block


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """An observer that blocks."""
    stuck = Stuck()
    with observed(stuck):
        yield stuck
        stuck.gate.set()


@both_faces
async def test_observer_that_blocks_for_ever_delays_no_renewal(
    driver: FaceDriver, stuck: Stuck, recorder: Recorder
) -> None:
    """A lease stays held; other observers see its renewals; no event loop stands still."""
    client = await driver.connect(ttl=10 * PATIENCE)
    async with client.lock("a") as lease:
        await driver.eventually(stuck.called.is_set, "the observer blocks")
        for _ in range(3):
            recorder.events.clear()
            client._engine.confirm_soon()
            await driver.eventually(lambda: "renewed" in recorder.calls, "it is renewed")
        lease.check()
        await (await client.lock("b").acquire()).release()


def test_only_the_first_call_waits_for_an_observer_that_blocks(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has caught up, nothing waits for it."""
    channel = _channel(stuck)
    with lockkit.connect("memory://stuck") as client:
        client.lock("a").acquire().release()
        assert channel.behind

        monkeypatch.setattr(observers, "WAIT_SECONDS", 1e9)
        client.lock("a").acquire().release()  # would wait for ever

    stuck.gate.set()
    channel.flush(PATIENCE)
    assert not channel.behind


def test_oldest_events_are_dropped_and_counted(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue of an observer that hangs does not grow without limit."""
    channel = _channel(stuck)
    with lockkit.connect("memory://stuck") as client:
        client.lock("a").acquire().release()
        assert stuck.called.wait(PATIENCE)  # with one of these two events; the other one waits
        monkeypatch.setattr(observers, "QUEUE_EVENTS", 3)
        for _ in range(5):
            client.lock("a").acquire().release()

    assert len(channel._events) == 3
    dropped = channel.dropped
    assert dropped == 7

    with caplog.at_level(logging.WARNING, "lockkit"):
        stuck.gate.set()
        channel.flush(PATIENCE)
        until(lambda: not channel.dropped)
    assert "7 events were dropped" in caplog.text


@pytest.mark.parametrize("end", ["released", "lost"])
def test_lease_whose_grant_was_seen_is_seen_to_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """However many events are dropped: what counts the leases that are held is right again in the end."""
    gate, inside = threading.Event(), threading.Event()
    held: set[str | None] = set()

    class Gauge:
        def granted(self, event: LockEvent) -> None:
            held.add(event.owner)
            inside.set()
            gate.wait()

        def released(self, event: LockEvent) -> None:
            held.discard(event.owner)

        lost = released

    monkeypatch.setattr(observers, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(observers, "QUEUE_EVENTS", 1)
    with lockkit.connect("memory://gauge") as client, observed(Gauge()):
        lease = client.lock("a").acquire()
        assert inside.wait(PATIENCE)
        if end == "released":
            lease.release()
        else:
            client.break_lock("a")
        for _ in range(3):
            client.lock("b").acquire().release()
        gate.set()

    assert held == set()


def test_nothing_waits_for_an_observer_whose_thread_is_the_parents(recorder: Recorder) -> None:
    """A forked child that uses no locks ended half a second late: it waited for that thread."""
    channel = _channel(recorder)
    thread = channel._thread
    assert thread is not None
    channel.close()
    thread.join(PATIENCE)
    channel.forked()

    beside(channel.flush, 1e9).result(PATIENCE)


def _channel(observer: object) -> observers.Channel:
    (channel,) = [channel for channel in observers.active or () if channel.observer is observer]
    return channel


def test_exceptions_are_logged_once_and_go_no_further(
    client: lockkit.Client, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that would end a thread; the observer is called again all the same."""
    calls: list[str] = []

    class Broken:
        def granted(self, event: LockEvent) -> None:
            calls.append(event.name)
            raise ZeroDivisionError

        def released(self, event: LockEvent) -> None:
            calls.append(event.name)
            raise SystemExit

    with observed(Broken()):
        for name in ("a", "b"):
            with client.lock(name):
                pass

    assert calls == ["a", "a", "b", "b"]
    assert recorder.calls == ["granted", "released"] * 2
    assert caplog.text.count("raised in granted()") == 1
    assert "raised in released()" not in caplog.text


def test_observer_may_use_locks_itself(client: lockkit.Client) -> None:
    """It does not wait for itself."""
    names: list[str] = []
    behind: list[bool] = []

    class Locking:
        def released(self, event: LockEvent) -> None:
            names.append(event.name)
            if event.name == "a":
                client.lock("b").acquire().release()
                behind.append(_channel(self).behind)

    locking = Locking()
    with observed(locking):
        client.lock("a").acquire().release()
        _channel(locking).flush(PATIENCE)

    assert names == ["a", "b"]
    assert behind == [False]


def test_all_calls_are_optional(client: lockkit.Client) -> None:
    """An observer has those that it needs, or derives from the protocol; added twice, it is called once."""
    seen: list[str] = []

    class OnlyReleased:
        def released(self, event: LockEvent) -> None:
            seen.append(event.name)

    class Derived(lockkit.Observer):
        def granted(self, event: LockEvent, /) -> None:
            seen.append(f"granted {event.name}")

    derived = Derived()
    with observed(OnlyReleased()), observed(object()), observed(derived):
        lockkit.add_observer(derived)
        with client.lock("a"):
            client.lock("a").try_acquire()

    assert seen == ["granted a", "a"]
    assert all(callable(getattr(derived, call)) for call in CALLS)


def test_context_is_that_of_the_caller(client: lockkit.Client) -> None:
    """So a trace finds the span in which the lock was acquired."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    seen: list[str] = []

    class Reads:
        def granted(self, event: LockEvent) -> None:
            del event
            seen.append(variable.get())

    variable.set("caller")
    with observed(Reads()):
        client.lock("a").acquire().release()

    assert seen == ["caller"]


# -- adding and removing ---------------------------------------------------------------------------------------------


def test_removed_observer_has_seen_everything(client: lockkit.Client) -> None:
    """Also what no call waits for; then its thread ends. Without observers a lock looks at one None."""
    seen: list[str | None] = []

    class Slow:
        def lost(self, event: LockEvent) -> None:
            time.sleep(0.05)
            seen.append(event.reason)

    slow = Slow()
    with observed(slow):
        thread = _channel(slow)._thread
        lease = client.lock("a").acquire()
        client.break_lock("a")
        assert lease.lost

    assert seen == ["broken"]
    assert observers.active is None
    assert thread is not None
    thread.join(PATIENCE)
    assert not thread.is_alive()


@both_faces
async def test_removing_an_observer_that_blocks_takes_no_longer(
    driver: FaceDriver, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an event loop nothing waits for it: that would keep renewals from being sent."""
    monkeypatch.setattr(observers, "LAST_SECONDS", 1e9 if driver.face == "asyncio" else 0.01)
    client = await driver.connect()
    await (await client.lock("a").acquire()).release()

    lockkit.remove_observer(stuck)

    assert observers.active is None
    assert not stuck.gate.is_set()


def test_what_cannot_observe_is_refused() -> None:
    """A class in place of an object, and coroutine functions, which nothing would await."""

    class Async:
        async def granted(self, event: LockEvent) -> None:
            del event

    with pytest.raises(lockkit.ConfigurationError, match=r"Recorder\(\)"):
        lockkit.add_observer(Recorder)
    with pytest.raises(lockkit.ConfigurationError, match="coroutine function"):
        lockkit.add_observer(Async())
    assert observers.active is None


def test_observers_see_the_locks_of_a_forked_child(recorder: Recorder) -> None:
    """Its thread is the parent's: the child starts one of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            with lockkit.connect("memory://") as client:
                client.lock("a").acquire().release()
            recorder.await_call("released")
            os._exit(0 if recorder.calls == ["granted", "released"] else 2)
        except BaseException:  # noqa: BLE001 - the parent reads the status
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    assert recorder.calls == []
