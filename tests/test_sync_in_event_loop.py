"""The sync API in a thread that runs an event loop: it works, except for waits that nothing could end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

import lockkit
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.testing.timing import PATIENCE
from tests.tries import begin_to_wait, beside, until


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A sync client."""
    with lockkit.connect("memory://sync-in-event-loop") as client:
        yield client


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an event loop in a thread of its own, so that a deadlock fails the test and does not hang it."""
    beside(asyncio.run, main()).result(2 * PATIENCE)


async def while_held(lock: lockkit.Lock | lockkit.Semaphore, body: Callable[[], Awaitable[None]]) -> None:
    """Run a body while another task holds the lock, which leaves only when the loop runs on."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        with lock:
            entered.set()
            await leave.wait()

    holder = asyncio.create_task(hold(), name="A")
    await entered.wait()
    try:
        await body()
    finally:
        leave.set()
        await holder


def test_wait_for_a_task_of_the_same_loop_is_refused(client: lockkit.Client) -> None:
    """A holds and awaits; B would block the loop, and A could never leave."""
    lock = client.lock("seat")

    async def body() -> None:
        for wait in (lock.acquire, lock.__enter__, lambda: lock.try_acquire(None), lock.as_threading_lock().acquire):
            with pytest.raises(lockkit.LockError, match=r"the task 'A' of this thread.*lockkit\.aio") as caught:
                wait()
            assert (caught.value.name, caught.value.backend) == ("seat", client.url)

    run(lambda: while_held(lock, body))
    assert not lock.locked()


@pytest.mark.parametrize("kind", ["native", "slots"])
def test_wait_for_permits_of_tasks_of_the_same_loop_is_refused(
    client: lockkit.Client, monkeypatch: pytest.MonkeyPatch, kind: Literal["native", "slots"]
) -> None:
    """No other thread could release one; also where each wait for a slot is a short one."""
    monkeypatch.setattr(MemoryBackend, "capabilities", replace(MemoryBackend.capabilities, permits=kind))
    semaphore = client.semaphore("seats", limit=2)

    async def body() -> None:
        with semaphore, pytest.raises(lockkit.LockError, match=r"'seats' \(semaphore\).*this (same task|thread)"):
            semaphore.acquire()

    run(lambda: while_held(semaphore, body))


def test_timed_wait_for_a_task_of_the_same_loop_names_what_helps(
    client: lockkit.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task holds the lock: `reentrant=True` would not let this one in, the async API would."""
    begin_to_wait(monkeypatch)
    lock = client.lock("timed")

    async def body() -> None:
        for timeout in (0, 0.01):
            with pytest.raises(lockkit.LockTimeout, match=r"the task 'A' of this thread.*lockkit\.aio") as caught:
                lock.acquire(timeout)
            assert "reentrant" not in str(caught.value)

    with caplog.at_level(logging.WARNING, "lockkit"):
        run(lambda: while_held(lock, body))

    (message,) = [record.getMessage() for record in caplog.records if "the task 'A'" in record.getMessage()]
    assert "lockkit.aio" in message
    assert "reentrant" not in message


def test_task_that_would_wait_for_itself_is_told_of_reentrant(
    client: lockkit.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error, and as a warning at the beginning of a wait that ends; a thread without a loop is not refused."""
    begin_to_wait(monkeypatch)

    def timed_waits(who: str) -> None:
        for timeout in (0, 0.01):
            with pytest.raises(lockkit.LockTimeout, match=rf"{who}.*reentrant=True"):
                client.lock("twice").acquire(timeout)

    async def main() -> None:
        with client.lock("twice"):
            timed_waits("this same task")
            with pytest.raises(lockkit.LockError, match=r"this same task, which would wait for itself.*reentrant=True"):
                client.lock("twice").acquire()

    run(main)
    with client.lock("twice"):
        timed_waits("this same thread")
        assert "this same thread holds" in caplog.text
        caplog.clear()
        assert beside(client.lock("twice").try_acquire, 0.1).result(PATIENCE) is None
        assert "same thread" not in caplog.text


def test_reentrant_lock_does_not_let_another_task_of_the_thread_in(client: lockkit.Client) -> None:
    """Both are in the thread that holds the lock: without a check two bodies would run at once."""
    lock = client.lock("counted", reentrant=True)

    async def body() -> None:
        with pytest.raises(lockkit.LockError, match=r"the task 'A' of this thread"):
            lock.acquire()
        with pytest.raises(lockkit.LockError, match=r"the task 'A' of this thread"):
            lock.acquire(timeout=0.05)
        assert lock.try_acquire() is None

    run(lambda: while_held(lock, body))

    async def again() -> None:
        with lock as outer, lock as inner:
            assert inner is outer

    run(again)


@pytest.mark.parametrize("use", ["enters", "releases"])
def test_wait_for_a_thread_that_was_handed_the_lease_works_in_a_loop(client: lockkit.Client, use: str) -> None:
    """The task that acquired it does not wait for itself."""
    lock = client.lock("handed over")
    waiting = threading.Event()

    def work(lease: lockkit.Lease) -> None:
        assert waiting.wait(PATIENCE)
        if use == "enters":
            with lease:
                until(lambda: client._engine.acquisitions.waiting)
        else:
            lease.release()

    async def main() -> None:
        thread = threading.Thread(target=work, args=(lock.acquire(),))
        thread.start()
        asyncio.get_running_loop().call_soon(waiting.set)
        await asyncio.sleep(0)
        with lock:
            pass
        thread.join()

    run(main)


def test_wait_for_a_lease_that_another_task_left_behind_is_not_refused(client: lockkit.Client) -> None:
    """It has ended, so it is not in the way: whoever has its lease may release it."""
    lock = client.lock("left behind")

    async def main() -> None:
        lease = await asyncio.create_task(acquire())
        thread = threading.Thread(target=release, args=(lease,))
        thread.start()
        with lock:
            pass
        thread.join()

    def release(lease: lockkit.Lease) -> None:
        until(lambda: client._engine.acquisitions.waiting)
        lease.release()

    async def acquire() -> lockkit.Lease:
        return lock.acquire()

    run(main)


BLOCKS: dict[str, Callable[[lockkit.Client], Any]] = {
    "lock": lambda client: client.semaphore("permits", 2),
    "attempt": lambda client: client.semaphore("permits", 2).attempt(),
    "threading": lambda client: client.semaphore("permits", 2).as_threading_lock(),
    "locks": lambda client: lockkit.locks([client.semaphore("permits", 2)]),
    "read": lambda client: client.rwlock("permits").read(),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_task_that_leaves_its_block_releases_its_own_lease(client: lockkit.Client, kind: str) -> None:
    """Tasks share their thread: the first to leave must not release what the one that came last still works under."""
    block = BLOCKS[kind](client)
    records = client._engine.leases.records

    async def main() -> None:
        entered, last_is_in = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with block:
                entered.set()
                await last_is_in.wait()

        leaving = asyncio.create_task(first())
        await entered.wait()
        others = set(records)
        with block:
            (own,) = set(records) - others
            last_is_in.set()
            await leaving
            assert set(records) == {own}

    run(main)
    assert not records
