"""The rules of the engine, each with the world behaving badly in its own way."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Grant, LockBackend, Renewed
from lockkit.engine import renewal
from lockkit.engine.lease_record import LeaseRecord
from lockkit.errors import BackendUnavailable, LockLost, LockTimeout
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, monotonic
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import Gate, MovableClock, fail, once, pass_time, scripted
from tests.tries import begin_to_wait, beside, until, until_async, until_renewed

DOWN = BackendUnavailable("connection refused")


def waiting(client: Any, count: int) -> bool:  # noqa: ANN401 - a client of either face
    """Tell whether `count` stand in the client's line for ``x`` behind its head."""
    return bool(client._engine.acquisitions.queues.behind("x") == count)


# -- rule 1 and 7: the clock -----------------------------------------------------------------------------------------


def test_deadline_counts_from_before_the_request() -> None:
    """A slow answer shortens the time left: the server's ttl began when the request arrived."""
    client, backend = scripted(MovableClock())
    backend.after["try_acquire"] = takes(client, 30.0)

    with client.lock("x", ttl=100, renew=False) as lease:
        assert 50 < lease.remaining() <= 100 - 30 - 1.002


def takes(client: Any, seconds: float, error: BaseException | None = None) -> Callable[[], None]:  # noqa: ANN401 - on a `MovableClock`
    """Make a hook that takes so long, in a test that takes no time."""

    def hook() -> None:
        client._engine.runtime.added += seconds
        if error is not None:
            raise error

    return hook


def test_grant_that_came_too_late_is_never_returned() -> None:
    """An answer that took longer than the ttl is undone and asked for again."""
    client, backend = scripted(MovableClock())
    backend.after["try_acquire"] = once(takes(client, 110.0))

    with client.lock("x", ttl=100, timeout=600) as lease:
        assert backend.calls == ["try_acquire", "abandon", "try_acquire"]
        assert lease.remaining() > 50


@pytest.mark.parametrize("kind", ["lock", "slots"])
def test_wait_whose_grants_all_come_too_late_ends(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It has no timeout, and would go on for ever with a server that is slower than the ttl."""
    client, backend = scripted(MovableClock(), unavailable_after=5)
    backend.after["try_acquire"] = takes(client, 2.0)
    if kind == "slots":
        monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, permits="slots"))
    wanted = client.lock("x", ttl=1) if kind == "lock" else client.semaphore("x", limit=2, ttl=1)

    with pytest.raises(LockTimeout if kind == "lock" else BackendUnavailable, match="took longer than its ttl of 1 s"):
        wanted.acquire()
    assert 2 <= backend.calls.count("abandon") == backend.calls.count("try_acquire") <= 4


def test_single_try_whose_grant_came_too_late_says_so() -> None:
    """Nobody else had the lock: "busy" would send its reader looking for a holder."""
    client, backend = scripted(MovableClock())
    backend.after["try_acquire"] = once(takes(client, 11.0))

    with pytest.raises(LockTimeout, match=r"'x'.*the answer took longer than its ttl of 10 s"):
        client.lock("x", ttl=10).acquire(timeout=0)

    assert client.holders("x") == []


def test_loss_is_noticed_soon_after_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch slept until a renewal that is due in 20 minutes, and its wait did not count the suspended time."""
    monkeypatch.setattr(renewal, "SLEEP_SECONDS_MAX", 0.05)
    clock = MovableClock()
    client, _ = scripted(clock)
    told: list[str] = []
    lease = client.lock("x", ttl=3600, on_lost=lambda _, reason: told.append(reason)).acquire()
    until(lambda: lease._record.look_at is not None)

    clock.added += 7200  # and nothing wakes the watch

    until(lambda: told == ["paused"])
    client.close()


def test_loss_that_another_thread_notices_is_told_in_the_event_loop() -> None:
    """The loop is busy beyond the deadline. In debug mode asyncio refuses what other threads start in a loop."""
    told: list[tuple[str, threading.Thread]] = []

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        lease = await client.lock("x", ttl=0.1, renew=False).acquire()
        lease.on_lost(lambda _, reason: told.append((reason, threading.current_thread())))
        beside(until, lambda: lease.lost).result()  # so long the watch, a task of this loop, cannot run
        await until_async(lambda: bool(told))
        await client.close()

    asyncio.run(main(), debug=True)

    assert told == [("expired", threading.main_thread())]


# -- rule 3: answers that never came ---------------------------------------------------------------------------------


def test_lost_answer_is_undone_by_owner_and_never_handed_out() -> None:
    """The first request was granted, but its answer was lost: the lease returned is another one."""
    client, backend = scripted()
    owners: list[str] = []

    def lose_answer() -> None:
        owners.extend(holder.owner for holder in client.holders("x"))
        raise DOWN

    backend.after["try_acquire"] = once(lose_answer)
    lease = client.lock("x").acquire(timeout=PATIENCE)

    assert len(owners) == 1
    assert lease.owner != owners[0]
    assert [holder.owner for holder in client.holders("x")] == [lease.owner]
    lease.release()


def test_undo_is_repeated_until_it_succeeds() -> None:
    """The backend is away when the request is to be undone: the renewer undoes it later, long before its ttl."""
    client, backend = scripted()
    backend.after["try_acquire"] = once(fail(DOWN))
    backend.before["abandon"] = once(fail(DOWN))

    with pytest.raises(BackendUnavailable):
        client.lock("x", ttl=300).acquire(timeout=0)

    until(lambda: not client.lock("x").locked())
    assert backend.calls.count("abandon") == 2
    until(lambda: not client._engine.cleanups._background.running)  # its thread does not stay


@pytest.mark.parametrize("first", ["works", "fails"])
def test_caller_that_is_cancelled_again_is_undone_by_one_call_at_a_time(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As anyio does until the task ends. A second call beside the first would find the request's connection in use."""
    monkeypatch.setattr("lockkit.engine.acquisition.CALL_SECONDS", 0.01)  # so that the second call gives up meanwhile
    client, backend = scripted(AsyncioRuntime())
    abandon, running, most, calls = backend.abandon, 0, 0, 0

    async def main() -> None:
        waiting, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        backend.before["wait"] = waiting.set

        async def slow_abandon(request: Any) -> None:  # noqa: ANN401 - a request
            nonlocal running, most, calls
            running, calls = running + 1, calls + 1
            most = max(most, running)
            begun.set()
            try:
                await go_on.wait()
                if first == "fails" and calls == 1:
                    raise DOWN
                await abandon(request)
            finally:
                running -= 1

        backend.abandon = slow_abandon  # type: ignore[method-assign]
        held = await client.lock("x", ttl=600).acquire()
        waiter = asyncio.create_task(client.lock("x", ttl=600).acquire())
        await waiting.wait()
        waiter.cancel()
        await begun.wait()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await asyncio.sleep(0.05)  # a second call would begin
        go_on.set()
        await asyncio.to_thread(until, lambda: not running and not client._engine.cleanups._pending)
        await held.release()
        await (await client.lock("x").acquire(timeout=0)).release()
        await client.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert (most, calls) == (1, 1 if first == "works" else 2)


# -- rule 4 and 5: waiting -------------------------------------------------------------------------------------------


def test_waiter_that_was_woken_for_another_pauses_between_its_polls() -> None:
    """The stop of an election wakes all calls of its name, also one that goes on waiting."""
    client, backend = scripted()
    backend.capabilities = dataclasses.replace(backend.capabilities, wakeup="poll")
    held = client.lock("x").acquire()
    waiter = beside(client.lock("x").acquire)
    (request,) = until(lambda: tuple(client._engine.acquisitions.waiting))

    request.wake.set()

    until(lambda: not request.wake.is_set())  # else each further pause would be over at once
    held.release()
    waiter.result(PATIENCE).release()


def test_long_wait_is_logged_once_with_the_holder(caplog: pytest.LogCaptureFixture) -> None:
    """A wait longer than the ttl says who holds the lock; also for a waiter that is not at the head of the line."""
    client, backend = scripted()
    other, _ = scripted(space=backend.space)

    def warnings() -> list[str]:
        # Of this client: the thread that asks for the holders on behalf of another test may be late.
        return [message for message in tuple(caplog.messages) if f"waiting for lock 'x' at {client.url} " in message]

    lock = client.lock("x", ttl=0.05, renew=False, raise_on_lost=False)
    with other.lock("x", metadata="nightly report"):
        waiters = [beside(lambda: lock.acquire(2 * PATIENCE).release()) for _ in range(2)]
        until(lambda: len(warnings()) == 2)
    for waiter in waiters:
        waiter.result()
    with client.lock("x", ttl=60):
        waiter = beside(lambda: lock.acquire(2 * PATIENCE).release())
        until(lambda: len(warnings()) == 3)
    waiter.result()

    *first, last = warnings()
    (about,) = [message for message in first if "nightly report" in message]
    assert "pid=" in about
    assert "this same client" not in about
    assert any("behind other waiters of this same client" in message for message in first)
    assert "(this same client)" in last


def test_timeout_is_one_deadline_for_the_call() -> None:
    """Woken again and again for nothing, the wait still ends at its timeout."""
    client, backend = scripted(MovableClock())
    other, _ = scripted(space=backend.space)

    async def wake_for_nothing(*_: object) -> None:
        client._engine.runtime.added += 10.0

    backend.wait = wake_for_nothing  # type: ignore[method-assign, assignment]
    with other.lock("x", ttl=600), pytest.raises(LockTimeout, match=r"holders\(\)") as caught:
        client.lock("x").acquire(timeout=60)

    assert 2 < backend.calls.count("try_acquire") <= 7
    assert (caught.value.name, caught.value.backend) == ("x", backend.url)


# -- rule 10: outages ------------------------------------------------------------------------------------------------


def test_outage_with_timeout_zero_is_told_at_once() -> None:
    """No retry, and not a timeout: nobody said that the lock is busy."""
    client, backend = scripted()
    backend.before["try_acquire"] = fail(DOWN)

    with pytest.raises(
        BackendUnavailable, match=r"could not acquire lock 'x' at memory://.*connection refused"
    ) as caught:
        client.lock("x").acquire(timeout=0)

    assert not isinstance(caught.value, LockTimeout)
    assert caught.value.name == "x"
    assert caught.value.__cause__ is DOWN


@pytest.mark.parametrize(
    ("unavailable_after", "timeout", "tries"),
    [(30.0, 60, 3), (60.0, None, 3), (0.0, None, 1)],
    ids=["timeout", "unavailable_after", "no retry"],
)
def test_outage_is_tried_until_its_end(unavailable_after: float, timeout: float | None, tries: int) -> None:
    """Of a timed wait, or of ``unavailable_after``, of which 0 is a time as any other: then `BackendUnavailable`."""
    client, backend = scripted(MovableClock(), unavailable_after=unavailable_after)
    backend.before["try_acquire"] = takes(client, 20.0, DOWN)

    with pytest.raises(BackendUnavailable):
        client.lock("x").acquire(timeout)

    assert backend.calls.count("try_acquire") == tries


def test_waiters_in_line_learn_of_the_outage_together() -> None:
    """They do not each wait ``unavailable_after`` anew once they get to the head."""
    client, backend = scripted(MovableClock(), unavailable_after=60)
    failure = takes(client, 20.0, DOWN)

    def down() -> None:
        if backend.calls.count("try_acquire") == 1:
            until(lambda: waiting(client, 19))  # before time passes
        failure()

    backend.before["try_acquire"] = down
    calls = [beside(client.lock("x").acquire) for _ in range(20)]

    assert [type(call.exception(PATIENCE)) for call in calls] == [BackendUnavailable] * 20
    assert backend.calls.count("try_acquire") == 3 + 19


# -- rule 6: renewal and loss ----------------------------------------------------------------------------------------


def test_hanging_renewal_does_not_hide_the_deadline() -> None:
    """The lease is lost at its deadline all the same; the late answer does not revive it, and what it kept is freed."""
    client, backend = scripted(MovableClock())
    hanging = backend.before["renew"] = Gate()
    told: list[str] = []
    lease = client.lock("x", ttl=60, on_lost=lambda _, reason: told.append(reason)).acquire()
    pass_time(client, 25.0)
    hanging.reached()
    pass_time(client, 36.0)
    assert lease.wait_lost(PATIENCE)
    until(lambda: len(told) == 1)

    hanging.open.set()
    until(lambda: "release" in backend.calls)

    assert lease.lost
    until(lambda: client.holders("x") == [])


@pytest.mark.parametrize("wrong", ["a driver's bug", "too few outcomes"])
def test_failing_renewal_is_retried_until_the_deadline(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails, also what no backend should do; lost once, at the deadline; one warning for the jeopardy."""
    client, backend = scripted(MovableClock())

    async def renew(grants: Any) -> list[Renewed]:  # noqa: ANN401 - a sequence
        backend.calls.append("renew")
        if wrong == "a driver's bug":
            raise RuntimeError(wrong)
        return [Renewed() for _ in grants][1:]  # nobody can tell of which leases they are

    backend.renew = renew  # type: ignore[method-assign]
    told: list[str] = []
    lease = client.lock("x", ttl=60, on_lost=lambda _, reason: told.append(reason)).acquire()
    plan = lease._record.renewal

    def is_done(count: int) -> bool:
        return backend.calls.count("renew") == count and not plan.in_flight

    for count, seconds in enumerate([25.0, 8.0, 8.0, 8.0], 1):
        pass_time(client, seconds)
        until(functools.partial(is_done, count))
        assert lease.held
    pass_time(client, 11.0)
    assert lease.wait_lost(PATIENCE)
    until(lambda: told == ["expired"])
    until(lambda: any(f"at {client.url}: " in text and "lost lock" in text for text in tuple(caplog.messages)))

    messages = [text for text in caplog.messages if f"(token {lease.token})" in text]
    assert sum("lockkit retries" in text for text in messages) == 1
    assert sum("lost lock" in text for text in messages) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_renewal_that_recovers_ends_the_jeopardy(when: str) -> None:
    """One failure does not end renewal, whether it was the request or its answer that got lost."""
    client, backend = scripted(MovableClock())
    (backend.before if when == "before" else backend.after)["renew"] = once(fail(DOWN))
    with client.lock("x", ttl=60) as lease:
        plan = lease._record.renewal
        pass_time(client, 25.0)
        until(lambda: plan.in_jeopardy)
        assert lease.remaining() < 36
        pass_time(client, 8.0)
        until(lambda: not plan.in_jeopardy)
        assert lease.remaining() > 40
        assert lease.held


def test_callback_that_finds_no_thread_is_called_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of leases may be lost at once, and each callback has a thread of its own."""
    monkeypatch.setattr("lockkit.engine.renewal.SLEEP_SECONDS_MAX", 0.05)
    client, _ = scripted()
    runtime, told, refusals = client._engine.runtime, [], [None] * 4

    def spawn(name: str, *arguments: Any) -> None:
        if name == "lockkit-on-lost" and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        BlockingRuntime.spawn(runtime, name, *arguments)

    monkeypatch.setattr(runtime, "spawn", spawn)
    leases = [client.lock(name, ttl=600, on_lost=lambda lease, _: told.append(lease.name)).acquire() for name in "xyz"]
    for lease in leases:
        client._engine.lost(lease.owner, "session")

    until(lambda: len(told) == len(leases))
    assert sorted(told) == ["x", "y", "z"]


# -- release ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_release_without_answer_can_be_called_again(when: str) -> None:
    """The owner is not forgotten: the second call frees the lock; or finds nothing, which is what was wanted."""
    client, backend = scripted()
    lease = client.lock("x", ttl=60).acquire()
    (backend.before if when == "before" else backend.after)["release"] = once(fail(DOWN))

    with pytest.raises(BackendUnavailable, match="could not release lock 'x'"):
        lease.release()
    assert client.lock("x").locked() is (when == "before")
    if when == "after":
        with client.lock("x") as newer:
            lease.release()
            assert newer.confirm()
    else:
        lease.release()

    assert not client.lock("x").locked()
    calls = backend.calls.count("release")
    lease.release()
    assert backend.calls.count("release") == calls
    assert not lease.lost


def test_release_whose_lease_runs_out_on_the_way_is_no_loss() -> None:
    """The work had ended in time; nobody else can have held the lock before the deadline."""
    client, backend = scripted(MovableClock())
    backend.before["release"] = takes(client, 61.0)
    lease = client.lock("x", ttl=60, renew=False).acquire()
    lease.release()

    assert not lease.lost


def test_unreachable_at_the_end_does_not_hide_the_error_of_the_body() -> None:
    """It goes on unchanged, with a note that says what happened at the end."""
    client, backend = scripted()
    with pytest.raises(KeyError, match="the body's") as caught, client.lock("x"):  # noqa: PT012 - the body is the point
        backend.before["release"] = fail(DOWN)
        raise KeyError("the body's")

    assert any("lockkit" in note for note in caught.value.__notes__)


# -- extend ----------------------------------------------------------------------------------------------------------


def test_extend_waits_for_the_renewal_in_flight() -> None:
    """Else the server could run the older, shorter renewal last."""
    client, backend = scripted()
    slow = Gate()
    backend.before["renew"] = once(slow)
    lease = client.lock("x", ttl=300).acquire()
    client._engine.confirm_soon()
    slow.reached()
    extending = beside(lease.extend, 500)
    until(lambda: backend.calls.count("renew") > 1 or lease._record.renewal.answered is not None)
    assert backend.calls.count("renew") == 1

    slow.open.set()
    extending.result(PATIENCE)

    assert lease.remaining() > 400
    assert lease.ttl == 500
    lease.release()


@pytest.mark.parametrize("ending", ["release", "loss"])
def test_extend_does_not_wait_for_a_renewal_that_has_become_pointless(ending: str) -> None:
    """The renewal of a lease is queued behind one that hangs; the lease ends: `LockLost`, and at once."""
    client, backend = scripted()
    hanging = backend.before["renew"] = Gate()
    first = client.lock("first", ttl=200).acquire()
    lease = client.lock("x", ttl=300).acquire()
    client._engine.confirm_soon()
    hanging.reached()
    lease._record.renewal.in_flight = True  # whichever of the two batches it is in
    extending = beside(lease.extend, 400)
    until(lambda: lease._record.renewal.answered is not None)
    if ending == "release":
        lease.release()
    else:
        client._engine.lost(lease.owner, "session")

    assert type(extending.exception(PATIENCE)) is LockLost
    hanging.open.set()
    first.release()


# -- rule 8 and 9: the process ---------------------------------------------------------------------------------------


def test_extend_without_answer_does_not_begin_to_renew() -> None:
    """A lease with `renew=False` ends when its holder says."""
    client, backend = scripted()
    lease = client.lock("x", ttl=600, renew=False).acquire()
    backend.before["renew"] = once(fail(DOWN))

    with pytest.raises(BackendUnavailable):
        lease.extend()

    assert lease._record.renewal.next_at == inf
    lease.release()


def test_extend_whose_answer_comes_after_the_loss_says_so() -> None:
    """Lost is final."""
    client, backend = scripted()
    lease = client.lock("x", ttl=600).acquire()
    backend.after["renew"] = once(lambda: client._engine.lost(lease.owner, "session"))

    with pytest.raises(LockLost, match="has ended"):
        lease.extend()

    assert lease.lost


def test_forked_child_is_named_as_the_holder() -> None:
    """Also by a lock that was described before the fork, as decorators do where workers are forked from a program."""
    client, _ = scripted()

    @client.lock("decorated", metadata="job")  # type: ignore[untyped-decorator]
    def held_by_decorator() -> object:
        return client.holders("decorated")[0].metadata

    plain, semaphore = client.lock("plain"), client.semaphore("semaphore", limit=2)
    election, several = client.election("election", value="here"), client.locks(["several"])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with plain as first, semaphore as second, election.campaign() as third, several as fourth:
                seen = [lease.metadata for lease in (first, second, third, fourth["several"])]
                os.write(writer, json.dumps([*map(dict, seen), held_by_decorator()]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)

    assert [about["pid"] for about in told] == [pid] * 5
    assert told[4]["text"] == "job"
    assert told[2]["value"] == "here"
    assert told[1]["semaphore_limit"] == 2


# -- several that use one lease --------------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [True, False])
def test_second_release_waits_for_the_first(answered: bool) -> None:  # noqa: FBT001 - a parameter
    """Were it to ask at once, it would be told that the lease is not its own; if the first gets no answer, it asks."""
    client, backend = scripted()
    lease = client.lock("x", ttl=30).acquire()
    gate = Gate(None if answered else DOWN)
    backend.before["release"] = once(gate)
    first = beside(lease.release)
    gate.reached()
    second = beside(lease.release)
    until(lambda: lease._record.release_done is not None)
    assert backend.calls.count("release") == 1
    gate.open.set()

    assert second.exception(PATIENCE) is None
    assert isinstance(first.exception(PATIENCE), type(None) if answered else BackendUnavailable)
    assert backend.calls.count("release") == (1 if answered else 2)
    assert client.holders("x") == []


def test_re_entry_never_gives_a_released_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was handed over, and is released there in the instant of the re-entry."""
    client, _ = scripted()
    lock = client.lock("x", ttl=30, reentrant=True)
    lease = lock.acquire()
    check = LeaseRecord.check

    def released_meanwhile(record: LeaseRecord) -> None:
        check(record)
        beside(lease.release).result(PATIENCE)

    with monkeypatch.context() as patch:
        patch.setattr(LeaseRecord, "check", released_meanwhile)
        again = lock.acquire()

    assert again is not lease
    assert again.held
    again.release()


# -- the time that a lease has ---------------------------------------------------------------------------------------


def test_renewal_after_an_outage_stays_within_max_hold() -> None:
    """Retries of a failed renewal do not go on past the end that was asked for."""
    client, backend = scripted(MovableClock())
    hanging = backend.before["renew"] = Gate(DOWN)
    lease = client.lock("x", ttl=300, max_hold=200).acquire()
    pass_time(client, 110.0)
    hanging.reached()
    client._engine.runtime.added = 250.0  # the renewal that failed may not be repeated
    hanging.open.set()
    del backend.before["renew"]

    plan = lease._record.renewal
    until(lambda: plan.in_jeopardy)
    assert plan.next_at == inf
    client._engine.runtime.added = 310.0
    assert lease.lost
    assert backend.calls.count("renew") == 1


def test_unanswered_short_extension_does_not_cap_the_lease_for_ever() -> None:
    """It does for as long as the request may still be on its way to the server."""
    runtime = MovableClock()
    client, backend = scripted(runtime)
    lease = client.lock("x", ttl=600).acquire()
    backend.before["renew"] = fail(DOWN)
    with pytest.raises(BackendUnavailable):
        lease.extend(60.0)
    del backend.before["renew"]

    lease.extend(600)
    assert lease.remaining() <= 60.0
    until(lambda: lease._record.renewal.next_at != 0.0)

    runtime.added += 0.1
    # As if so much time had passed that no server would still get the request.
    lease._record.renewal.unanswered_until = runtime.now()
    lease.extend(600)
    assert lease.remaining() > 500
    lease.release()


# -- who is told what --------------------------------------------------------------------------------------------------


def test_wrong_callback_is_refused_where_it_was_given() -> None:
    """Not when the lease is lost, in the background; a coroutine function nothing would await in the sync API."""

    async def tell(lease: object, reason: str) -> None:
        raise AssertionError(lease, reason)

    class Teller:
        async def __call__(self, lease: object, reason: str) -> None:
            raise AssertionError(lease, reason)

    wrongs: list[Any] = ["nothing", None, tell, functools.partial(tell), Teller()]
    with lockkit.connect("memory://callback") as client, client.lock("x") as lease, client.locks(["y"]) as leases:
        for number, wrong in enumerate(wrongs):
            ways: list[Callable[[Any], object]] = [lease.on_lost, leases.on_lost]
            if wrong is not None:
                ways.append(lambda wrong: client.lock("z", on_lost=wrong))
                ways.append(lambda wrong: client.locks(["z"], on_lost=wrong))
                ways.append(lambda wrong: lockkit.locks([client.lock("z")], on_lost=wrong))
            for way in ways:
                with pytest.raises(lockkit.ConfigurationError, match="on_lost" if number < 2 else "coroutine function"):
                    way(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda client, no: client.lock("x", cancel_on_lost=no),
        lambda client, no: client.rwlock("x", cancel_on_lost=no),
        lambda client, no: client.semaphore("x", limit=1, cancel_on_lost=no),
        lambda client, no: client.locks(["x"], cancel_on_lost=no),
        lambda client, no: lockkit.aio.locks([client.lock("x")], cancel_on_lost=no),
        lambda client, no: client.election("x").campaign(cancel_on_stop=no),
    ],
)
def test_switch_that_is_a_word_is_refused(make: Callable[[lockkit.aio.Client, Any], object]) -> None:
    """It would count as true."""

    async def scenario() -> None:
        async with await lockkit.aio.connect("memory://switches") as client:
            with pytest.raises(lockkit.ConfigurationError, match=r"cancel_on_\w+ must be True or False, not 'no'"):
                make(client, "no")

    asyncio.run(scenario())


# -- waits that cannot end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["dropped", "released"])
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_writer_that_acquired_anew_after_a_loss_may_still_read(ending: str) -> None:
    """Ending the lost lease concerns that one only; else the writer's own read() would wait for itself."""
    with lockkit.connect("memory://anew") as client:
        rwlock = client.rwlock("x")
        lease = rwlock.write().acquire()
        client.break_lock("x")
        assert not lease.confirm()

        again = rwlock.write().acquire(PATIENCE)
        if ending == "released":
            with pytest.raises(LockLost):
                lease.release()
        del lease
        gc.collect()

        with rwlock.read().acquire(timeout=0) as inside:
            assert inside is again
        again.release()


def test_blocking_wait_for_a_permit_that_a_thread_will_release_is_not_refused() -> None:
    """The event loop stands still meanwhile, but only one of the two holders runs in it."""

    async def run() -> int | None:
        with lockkit.connect("memory://loop3") as client, client.semaphore("x", limit=2) as own:
            semaphore = client.semaphore("x", limit=2)
            other = beside(semaphore.acquire).result(PATIENCE)
            assert own.slot == 0

            def release() -> None:
                until(lambda: client._engine.acquisitions.waiting)
                other.release()

            releasing = beside(release)
            with semaphore as permit:
                releasing.result(PATIENCE)
                return permit.slot

    assert asyncio.run(run()) == 1


def test_blocking_wait_in_an_event_loop_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program holds the lock: it will end, but nothing runs in the loop until then."""
    begin_to_wait(monkeypatch)

    async def run() -> None:
        with (
            lockkit.connect("memory://loop2") as client,
            lockkit.connect("memory://loop2") as other,
            other.lock("x", ttl=30),
            pytest.raises(LockTimeout),
        ):
            client.lock("x").acquire(0.1)

    with caplog.at_level(logging.WARNING, "lockkit"):
        asyncio.run(run())

    assert "lockkit.aio" in caplog.text


def test_warning_of_a_long_wait_does_not_make_it_longer() -> None:
    """Who holds the lock is asked in the background: that call may hang beyond the timeout."""
    client, backend = scripted(MovableClock())
    other, _ = scripted(space=backend.space)
    hanging = Gate()

    async def holders(name: str) -> list[Any]:
        del name
        hanging()
        return []

    backend.holders = holders  # type: ignore[method-assign]
    with other.lock("x", ttl=600):
        waiter = beside(client.lock("x", ttl=0.1).acquire, 60)
        hanging.reached()
        pass_time(client, 61.0)
        client._engine.acquisitions.wake("x")
        assert type(waiter.exception(PATIENCE)) is LockTimeout
    hanging.open.set()


# -- what a backend says, and what the engine makes of it --------------------------------------------------------------


def test_deadline_counts_from_the_anchor_of_the_grant() -> None:
    """A session's last heartbeat may be older than the request."""
    client, backend = scripted()
    real = backend.try_acquire

    async def anchored(request: Any) -> Any:  # noqa: ANN401 - of the backend
        grant = await real(request)
        assert isinstance(grant, Grant)
        grant.anchor = monotonic() - 5.0
        return grant

    backend.try_acquire = anchored  # type: ignore[method-assign]
    with client.lock("x", ttl=30, renew=False) as lease:
        assert lease.remaining() < 25.0


def test_deadline_counts_from_the_anchor_and_ttl_of_the_renewal() -> None:
    """A server may keep a lease for less than was asked for, and from earlier on."""
    client, backend = scripted()

    async def renew(grants: Any) -> list[Renewed]:  # noqa: ANN401 - a sequence
        return [Renewed(anchor=monotonic() - 5.0, ttl=15.0) for _ in grants]

    with client.lock("x", ttl=30) as lease:
        backend.renew = renew  # type: ignore[method-assign]
        lease.extend()
        assert lease.remaining() < 10.0
        client._engine.confirm_soon()
        until(lambda: lease.ttl == 15.0)
        assert lease.remaining() < 10.0


def test_loss_that_comes_before_the_grant_was_handed_out_is_told() -> None:
    """The session expired in the instant of the grant: without renewals nobody would notice until the deadline."""
    client, backend = scripted()
    owners: list[str] = []
    real = backend.try_acquire

    async def try_acquire(request: Any) -> Any:  # noqa: ANN401 - of the backend
        outcome = await real(request)
        owners.append(request.owner)
        for number in range(50):
            client._engine.lost(f"{number:032x}", "session")  # of nobody here
        client._engine.lost(request.owner, "session")
        return outcome

    backend.try_acquire = try_acquire  # type: ignore[method-assign]
    told: list[str] = []
    lease = client.lock("x", ttl=600, renew=False, on_lost=lambda _, reason: told.append(reason)).acquire()

    assert owners == [lease.owner]
    assert lease.lost
    until(lambda: told == ["session"])


def test_renewal_is_planned_at_a_third_of_the_ttl_or_little_earlier() -> None:
    """So that two may fail before the deadline comes near, and clients do not stay in step."""
    client, _ = scripted()
    before = monotonic()
    with client.lock("x", ttl=30) as lease:
        after = monotonic()
        assert before + 9.0 <= lease._record.renewal.next_at <= after + 10.0
        lease.extend(60)
        assert after + 18.0 <= lease._record.renewal.next_at <= monotonic() + 20.0


def test_released_lease_is_not_renewed() -> None:
    """Also if it was in the batch that waited behind a renewal that hung."""
    client, backend = scripted()
    renewed: list[str] = []
    hanging, real = Gate(), backend.renew
    hang_once = once(hanging)

    async def renew(grants: Any) -> Any:  # noqa: ANN401 - of the backend
        renewed.extend(grant.owner for grant in grants)
        hang_once()
        return await real(grants)

    backend.renew = renew  # type: ignore[method-assign]
    first = client.lock("first", ttl=600).acquire()
    client._engine.confirm_soon()
    hanging.reached()
    second = client.lock("second", ttl=600).acquire()
    client._engine.confirm_soon()
    until(lambda: second._record.renewal.in_flight)
    second.release()
    hanging.open.set()
    with client.lock("third", ttl=600) as third:
        until_renewed(third, begin=client._engine.confirm_soon)

    assert second.owner not in renewed
    first.release()
    client.close()


def test_threads_of_a_forked_child_share_one_backend(tmp_path: Path) -> None:
    """Those that use a client first, at the same time: a backend that was collected would free the locks it granted."""
    names = ["x", "y"]
    with lockkit.connect(f"file://{tmp_path}/locks") as client, lockkit.connect(f"file://{tmp_path}/locks") as other:
        engine = client._engine
        both, open_backend = threading.Barrier(len(names)), engine.client._open_backend

        def open_together() -> LockBackend:
            backend = open_backend()
            both.wait(PATIENCE)
            return backend

        engine.client._open_backend = open_together
        engine.forked()  # as in a child
        with ThreadPoolExecutor(len(names)) as threads:
            leases = list(threads.map(lambda name: client.lock(name).acquire(PATIENCE), names))
        gc.collect()

        assert [other.lock(name).try_acquire() for name in names] == [None, None]
        for lease in leases:
            lease.release()


def test_child_of_a_fork_renews_its_own_leases() -> None:
    """The parent's watch does not run there, whatever the copied flag says."""
    client = lockkit.connect("memory://child-renews")
    with client.lock("x", ttl=60) as lease:
        until_renewed(lease, begin=client._engine.confirm_soon)  # the watch and the renewer run
        pid = os.fork()
        if pid == 0:
            try:
                mine = client.lock("y", ttl=60).acquire()
                until_renewed(mine, begin=client._engine.confirm_soon)
                os._exit(0 if mine.held and not lease.held else 2)
            except BaseException:  # noqa: BLE001 - the parent reads the status
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert lease.held
