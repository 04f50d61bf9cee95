"""Caps of semaphores, and limits of other clients."""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import pytest

import lockkit
from lockkit.backend import Busy, Grant, Request
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.engine.semaphore import CAPS_NAME, LOOK_SECONDS
from lockkit.runtime import drive
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import MovableClock, scripted
from tests.tries import beside, until

URL = "memory://permits"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about limits."""
    return [record.getMessage() for record in caplog.records if "uses limit" in record.getMessage()]


def test_waiters_notice_that_the_cap_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0, where they have no place in the queue, and from 1, where nobody wakes them."""
    monkeypatch.setattr("lockkit.engine.semaphore.LOOK_SECONDS", 0.05)
    with lockkit.connect(URL) as client, lockkit.connect(URL) as other:
        semaphore = client.semaphore("raised", limit=2)
        semaphore.set_cap(0)
        got: list[lockkit.Lease] = []
        for cap in (1, 2):
            waiting = beside(other.semaphore("raised", limit=2).acquire, PATIENCE)
            time.sleep(0.1)
            assert not waiting.done()
            semaphore.set_cap(cap)
            got.append(waiting.result(PATIENCE))
        assert {lease.slot for lease in got} == {0, 1}
        for lease in got:
            lease.release()
        semaphore.set_cap(None)


@pytest.mark.parametrize("cap", [0, 1])
def test_waiter_looks_once_its_knowledge_is_too_old(monkeypatch: pytest.MonkeyPatch, cap: int) -> None:
    """Not so long after it began to wait: what it knew then was 3 s old, and the cap was raised right after that."""
    clock = MovableClock()
    client, backend = scripted(clock, ttl=60)
    other, _ = scripted(space=backend.space, ttl=60)
    semaphore = client.semaphore("x", limit=2)
    semaphore.set_cap(cap)
    other.semaphore("x", limit=2).set_cap(None)

    async def sleep(seconds: float) -> None:
        clock.added += max(0.0, seconds)

    async def wait(_: Request, __: Busy, until: float) -> None:
        await sleep(until - clock.now())

    monkeypatch.setattr(client._engine.client, "sleep", sleep)
    monkeypatch.setattr(backend, "wait", wait)
    with other.semaphore("x", limit=1) if cap else nullcontext():
        clock.added = 3.0
        semaphore.acquire(PATIENCE).release()

    assert clock.added < LOOK_SECONDS + 0.1


@pytest.mark.parametrize("ending", ["closed", "raised"])
def test_wait_at_a_cap_of_0_ends_at_once(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """With the client, or when the same client raises the cap: it does not sleep until its next look."""
    monkeypatch.setattr("lockkit.engine.semaphore.LOOK_SECONDS", 3600.0)
    client = lockkit.connect(f"memory://paused-{ending}")
    semaphore = client.semaphore("x", limit=2)
    semaphore.set_cap(0)
    waiting = beside(semaphore.acquire)
    until(lambda: bool(client._engine.client.sleeping))

    if ending == "raised":
        semaphore.set_cap(1)
        waiting.result(PATIENCE).release()
    client.close()

    if ending == "closed":
        with pytest.raises(lockkit.LockError, match="is closed"):
            waiting.result(PATIENCE)


def test_wait_that_ends_at_a_cap_of_0_leaves_no_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has had one since before the cap, which would keep the others waiting."""
    monkeypatch.setattr("lockkit.engine.semaphore.LOOK_SECONDS", 0.05)
    with lockkit.connect("memory://queued") as client, lockkit.connect("memory://queued") as other:
        semaphore = client.semaphore("x", limit=1)
        with semaphore:
            waiting = beside(other.semaphore("x", limit=1).try_acquire, 1)
            until(lambda: semaphore.holders()[0].waiters == 1)
            semaphore.set_cap(0)
            assert waiting.result(PATIENCE) is None
            assert semaphore.holders()[0].waiters == 0
        semaphore.set_cap(None)


def test_call_behind_another_one_at_a_cap_of_0_is_told_of_the_cap() -> None:
    """Nobody holds a permit, and a higher limit of its own would change nothing."""
    with lockkit.connect("memory://two-at-0") as client:
        semaphore = client.semaphore("x", limit=5)
        semaphore.set_cap(0)
        first = beside(semaphore.acquire, PATIENCE)
        until(lambda: bool(client._engine.client.sleeping))
        with pytest.raises(lockkit.LockTimeout, match="an operator set its limit to 0"):
            semaphore.acquire(0.05)
        semaphore.set_cap(None)
        first.result(PATIENCE).release()


def test_single_tries_for_a_permit_do_not_refuse_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one client ask at the same moment: the backend has a permit for each of them."""
    asking = threading.Barrier(3)
    try_acquire = MemoryBackend.try_acquire

    async def ask_together(backend: MemoryBackend, request: Request) -> Grant | Busy:
        asking.wait(PATIENCE)
        return await try_acquire(backend, request)

    monkeypatch.setattr(MemoryBackend, "try_acquire", ask_together)
    with lockkit.connect("memory://tries") as client:
        tries = [beside(client.semaphore("x", limit=3).acquire, 0) for _ in range(3)]
        got = [each.result(2 * PATIENCE) for each in tries]

        assert {permit.slot for permit in got} == {0, 1, 2}
        for permit in got:
            permit.release()


@pytest.mark.parametrize("timeout", [0.0, 1.0])
@pytest.mark.parametrize("seconds", [(0.1,), (0.1, 0.1, 0.3)], ids=["slow", "uneven"])
def test_time_of_a_call_bounds_its_tries_of_slots(
    monkeypatch: pytest.MonkeyPatch, timeout: float, seconds: tuple[float, ...]
) -> None:
    """On a slow server it tries as many as there is time for; the next call tries others."""
    monkeypatch.setattr(MemoryBackend, "capabilities", replace(MemoryBackend.capabilities, permits="slots"))
    clock, limit = MovableClock(), 20
    clock.random = random.Random(1)
    client, backend = scripted(clock, ttl=600)
    other, _ = scripted(space=backend.space, ttl=600)
    held = [other.semaphore("x", limit=limit).acquire() for _ in range(limit)]
    tried: list[str] = []
    takes, try_acquire = itertools.cycle(seconds), backend.try_acquire

    async def answer_slowly(request: Request) -> Grant | Busy:
        tried.append(request.name)
        answer_at = clock.now() + next(takes)
        clock.added += min(answer_at, request.answer_by) - clock.now()
        if answer_at > request.answer_by:
            raise lockkit.BackendUnavailable("no answer in time")
        return await try_acquire(request)

    async def wait(_: Request, __: Busy, until: float) -> None:
        clock.added += max(0.0, until - clock.now())

    monkeypatch.setattr(backend, "try_acquire", answer_slowly)
    monkeypatch.setattr(backend, "wait", wait)
    for _ in range(100):
        before, takes = clock.added, itertools.cycle(seconds)
        with pytest.raises(lockkit.LockTimeout, match=r"there was time to try \d+ of its 20: waited"):
            client.semaphore("x", limit=limit).acquire(timeout)
        assert clock.added - before <= timeout + 0.5

    assert len(set(tried)) == limit
    for permit in held:
        permit.release()


@pytest.mark.parametrize("kind", ["native", "slots"])
def test_another_limit_elsewhere_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: Literal["native", "slots"]
) -> None:
    """With both limits, and who has the other; the same limit is none."""
    monkeypatch.setattr(MemoryBackend, "capabilities", replace(MemoryBackend.capabilities, permits=kind))
    with lockkit.connect(URL) as client, lockkit.connect(URL) as other, lockkit.connect(URL) as same:
        held = client.semaphore("mixed", limit=5, timeout=PATIENCE).acquire()
        for _ in range(3):
            other.semaphore("mixed", limit=8, timeout=PATIENCE).acquire().release()
        same.semaphore("mixed", limit=5, timeout=PATIENCE).acquire().release()
        until(lambda: warnings(caplog))
        held.release()

    (warning,) = warnings(caplog)
    assert "this client uses limit 8" in warning
    assert "uses 5" in warning


def test_caps_that_may_not_be_read_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator's cap does not apply then, which somebody should know; and not each acquisition asks for it."""
    asked: list[None] = []

    async def refuse() -> dict[str, int]:
        asked.append(None)
        raise lockkit.ConfigurationError("it denies this user a right")

    with lockkit.connect("memory://refused-caps") as client:
        monkeypatch.setattr(client._engine.caps, "read", refuse)
        for _ in range(3):
            client.semaphore("x", limit=2).acquire(PATIENCE).release()
        assert len(asked) == 1

        monkeypatch.setattr("lockkit.engine.semaphore.LOOK_SECONDS", 0.0)
        client.semaphore("x", limit=2).acquire(PATIENCE).release()
        assert len(asked) == 2

    # Of this kind: a client of another test may write late.
    (warning,) = [record for record in caplog.records if "lockkit limit" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "denies this user a right" in warning.getMessage()


def test_caps_that_cannot_be_read_do_not_delay_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that hangs is waited for as long as the caller waits; what was known last counts."""
    with lockkit.connect(URL) as client:
        answer = threading.Event()

        async def hang() -> dict[str, int]:
            answer.wait(PATIENCE)
            return {}

        monkeypatch.setattr(client._engine.caps, "read", hang)
        began = time.monotonic()
        with client.semaphore("slow", limit=1, timeout=0.1):
            waited = time.monotonic() - began
        answer.set()
    assert waited < PATIENCE / 2


def test_timeout_says_how_many_permits_are_held_and_by_whom() -> None:
    """In the words of a semaphore; a thread that holds one itself is told so."""
    with lockkit.connect("memory://") as client:
        semaphore = client.semaphore("api", limit=2)
        with semaphore, semaphore, pytest.raises(lockkit.LockTimeout) as caught:
            semaphore.acquire(timeout=0)
    first, _, rest = str(caught.value).partition(": waited ")
    assert first == "semaphore 'api' at memory:// has no free permit, all 2 are held (one by this same thread)"
    assert rest.endswith(
        " s. Release that permit first, or pass reentrant=True to semaphore(), here and there, to get it again."
    )
    assert "e-" not in rest.partition(" s. ")[0]


@pytest.mark.parametrize("kind", ["native", "slots"])
def test_long_wait_for_a_permit_says_each_thing_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: Literal["native", "slots"]
) -> None:
    """Also where it consists of many short waits, each for another slot."""
    monkeypatch.setattr(MemoryBackend, "capabilities", replace(MemoryBackend.capabilities, permits=kind))
    monkeypatch.setattr("lockkit.engine.semaphore.SLICE_SECONDS", 0.05)
    with lockkit.connect("memory://") as client, client.semaphore("x", limit=1):
        assert client.semaphore("x", limit=1, ttl=0.5).try_acquire(1.5) is None
        until(lambda: "longer than its ttl" in caplog.text)

    own, long = (record.getMessage() for record in caplog.records if record.getMessage().startswith("waiting for"))
    assert "this same thread holds. Release that permit first, or pass reentrant=True to semaphore()" in own
    assert "longer than its ttl" in long


@pytest.mark.parametrize(
    "text", ["[" * 4000, '{"a":' * 2000, "5", "[]", '{"pool":"3"}', '{"pool":1e999}', '{"pool":-1}']
)
def test_malformed_caps_are_ignored_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has written them: permits are granted, and the next `set_cap` writes good ones."""
    with lockkit.connect(f"memory://caps-{text[:9].encode().hex()}-{len(text)}") as client:
        backend = client._engine.client.ready()
        request = Request(CAPS_NAME, "0" * 32, 30.0, "{}", queue=False, runtime=client._engine.runtime)
        grant = drive(backend.try_acquire(request))
        assert isinstance(grant, Grant)
        assert drive(backend.write_note(grant, text, 60.0))
        assert drive(backend.release(grant))

        with client.semaphore("pool", limit=2, timeout=PATIENCE):
            assert client.semaphore("pool", limit=2).cap() is None
        assert "not all caps" in caplog.text
        client.semaphore("pool", limit=2).set_cap(1)
        assert client.semaphore("pool", limit=2).cap() == 1
