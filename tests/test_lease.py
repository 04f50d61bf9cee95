"""Which lease belongs to which block: with generators, and with the other API."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.faces import both_faces, scripted_for
from tests.tries import beside, until

pytestmark = [
    pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning"),
]

SHARED: dict[str, Callable[[lockkit.Client], AbstractContextManager[Any]]] = {
    "semaphore": lambda client: client.semaphore("x", limit=2),
    "attempt": lambda client: client.semaphore("x", limit=2).attempt(),
    "reader": lambda client: client.rwlock("x").read(),
    "set": lambda client: lockkit.locks([client.semaphore("x", limit=2)]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_generator_leaves_its_own_block_in_whichever_thread_it_ends(kind: str) -> None:
    """A web framework runs dependencies so. The thread that leaves a block may be inside another one itself."""
    with lockkit.connect(f"memory://generators-{kind}") as client:
        shared = SHARED[kind](client)

        def hold() -> Generator[Any]:
            with shared as entered:
                yield entered

        first, second = hold(), hold()
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            held = [one.submit(next, first).result(PATIENCE), other.submit(next, second).result(PATIENCE)]

            other.submit(first.close).result(PATIENCE)
            assert [entered.held for entered in held] == [False, True]

            one.submit(second.close).result(PATIENCE)
            assert [entered.held for entered in held] == [False, False]


def test_reentrant_lease_that_was_handed_over_counts_for_its_new_thread_alone() -> None:
    """Else its former thread would enter it, too, and two bodies would run under one lock."""
    with lockkit.connect("memory://handed-over") as client:
        lock = client.lock("x", reentrant=True)
        lease = lock.acquire()
        entered, tried = threading.Event(), threading.Event()

        def work() -> bool:
            with lease, lock as again:
                entered.set()
                return tried.wait(PATIENCE) and again is lease

        working = beside(work)
        assert entered.wait(PATIENCE)
        assert lock.try_acquire() is None
        tried.set()
        assert working.result(PATIENCE)
        assert not client._engine.leases.reentrant


def test_reentrant_lease_that_was_lent_stays_that_of_the_block_around_it() -> None:
    """Its thread enters it again, and no other thread does."""
    with lockkit.connect("memory://lent") as client:
        lock = client.lock("x", reentrant=True)

        def work(lease: lockkit.Lease) -> bool:
            with lease:
                return lock.try_acquire() is None

        with lock as outer:
            assert beside(work, lock.acquire()).result(PATIENCE)
            with lock as again:
                assert again is outer


@both_faces
async def test_inner_block_that_releases_early_leaves_the_outer_one_its_lock(driver: FaceDriver) -> None:
    """A function may do so that knows nothing of the block around it; its end and its release count once together."""
    client, _ = scripted_for(driver)
    lock, other = client.lock("x", reentrant=True), client.lock("x")
    async with lock as outer:
        async with lock as inner:
            await inner.release()
            await inner.release()
        assert outer.held

        explicit = await lock.acquire()
        async with lock:
            await explicit.release()
        assert outer.held
        await outer.release()
        assert not outer.held
        await (await other.acquire(0)).release()
    await client.close()


@both_faces
async def test_write_lease_with_blocks_inside_is_not_downgraded(driver: FaceDriver) -> None:
    """An outer block that writes would go on beside readers. One that was downgraded is not entered for writing."""
    client, _ = scripted_for(driver)
    lock = client.rwlock("x", reentrant=True)
    async with lock.write() as outer:
        async with lock.write() as inner:
            with pytest.raises(lockkit.LockError, match="an outer block relies on it"):
                await inner.downgrade()
        assert outer.mode == "exclusive"
        await outer.downgrade()
        with pytest.raises(lockkit.LockError, match="release the read lease first"):
            await lock.write().acquire()
    await client.close()


def test_block_that_a_thread_begins_with_is_entered() -> None:
    """Nothing in Python has called the method."""
    with lockkit.connect("memory://first-frame") as client:
        semaphore = client.semaphore("x", limit=1)
        _thread.start_new_thread(semaphore.__enter__, ())
        until(lambda: semaphore._blocks._stacks)
        semaphore.__exit__(None, None, None)
        assert not semaphore.locked()


def objects_for_with(client: Any) -> list[Any]:  # noqa: ANN401 - of either API
    """What a client makes that has a ``with``, and the client."""
    rwlock, lock = client.rwlock("rw"), client.lock("a")
    made = [lock, lock.attempt(), client.semaphore("s", 2), client.locks(["a", "b"]), rwlock.read(), rwlock.write()]
    return [client, *made, rwlock, client.election("e"), client.once("k", keep=60)]


def test_async_with_on_an_object_of_the_sync_api_says_so() -> None:
    """The words of Python alone name neither API."""

    async def enter(one: Any) -> None:  # noqa: ANN401 - wrong on purpose
        async with one:
            pass

    with lockkit.connect("memory://") as client:
        lease = client.lock("held").acquire()
        for one in [*objects_for_with(client), lease]:
            with pytest.raises(TypeError, match="of the sync API: use `with"):
                asyncio.run(enter(one))
            assert not hasattr(one, "__aenter__")
        lease.release()


@pytest.mark.asyncio
async def test_with_on_an_object_of_the_async_api_says_so() -> None:
    """Such as ``with`` on what was made for ``async with``."""
    async with lockkit.aio.connect("memory://") as client:
        lease = await client.lock("held").acquire()
        for one in [*objects_for_with(client), client.election("e").campaign(), lease]:
            with pytest.raises(TypeError, match="of the async API: use `async with"), one:
                pass
            assert not hasattr(one, "__enter__")
        await lease.release()
