"""Which lease belongs to which block: after Ctrl-C while one is entered, and with generators."""

from __future__ import annotations

import _thread
import asyncio
import gc
import itertools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.lease import SharedWithStack, WithStack
from lockkit.sync.lock import Attempt, Lock, ThreadingLock
from lockkit.sync.once import Attempt as OnceAttempt
from lockkit.sync.once import Once
from lockkit.testing.timing import PATIENCE
from tests.interrupts import CallStrike
from tests.tries import until

pytestmark = [
    pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

ENTERING = [
    WithStack.push,
    SharedWithStack.push,
    Attempt.__enter__,
    Lock.__enter__,
    Once.__enter__,
    OnceAttempt.__init__,
    ThreadingLock.__enter__,
    ThreadingLock.acquire,
]

BLOCKS: dict[str, Callable[[lockkit.Client], AbstractContextManager[Any]]] = {
    "lock": lambda client: client.lock("x"),
    "reentrant": lambda client: client.lock("x", reentrant=True),
    "attempt": lambda client: client.lock("x").attempt(),
    "threading": lambda client: client.lock("x").as_threading_lock(),
    "once": lambda client: client.once("x", keep=60),
    "semaphore": lambda client: client.semaphore("x", limit=2),
}


spaces = itertools.count()


def entered_until_struck(make: Callable[[lockkit.Client], Any], enter: str) -> int:
    """Interrupt at each instant in turn; tell at how many the call that was interrupted has left nothing held."""
    number = 0
    while True:
        # A lease that is dropped keeps its lock until its ttl is over.
        with lockkit.connect(f"memory://lease-{next(spaces)}") as client:
            strike = CallStrike(number, *(function.__code__ for function in ENTERING))
            kept = make(client)
            strike.during(getattr(kept, enter))
            if not strike.struck:
                return number
            gc.collect()
            assert client._engine.leases.records == {}, f"instant {number} of {kept!r}"
        number += 1


@pytest.mark.parametrize("kind", BLOCKS)
def test_interrupted_entry_leaves_nothing_held(kind: str) -> None:
    """No block was entered, so nobody would leave it, and its lease would be renewed for ever."""
    assert entered_until_struck(BLOCKS[kind], "__enter__") > 1


def test_interrupted_acquire_of_a_threading_lock_leaves_nothing_held() -> None:
    """The same without a block."""
    assert entered_until_struck(BLOCKS["threading"], "acquire") > 1


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
