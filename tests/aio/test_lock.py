"""A lock in the async API: attempts, decorators that skip, the client's timeout, and other libraries' parameters."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.timing import PATIENCE
from tests.tries import until_async

pytestmark = pytest.mark.asyncio

URL = "memory://aio-lock"


async def test_attempt_gives_the_lease_and_releases_it() -> None:
    """A free lock is held inside the block, and free after it."""
    async with lockkit.aio.connect(URL) as client:
        async with client.lock("a").attempt() as lease:
            assert lease is not None
            assert [holder.owner for holder in await client.holders("a")] == [lease.owner]

        assert await client.holders("a") == []


async def test_attempt_on_a_busy_lock_runs_the_body_without_a_lease() -> None:
    """None stands for "busy"; one attempt object in two tasks keeps their leases apart."""
    async with lockkit.aio.connect(URL) as client:
        attempt = client.lock("a").attempt()

        async def other() -> object:
            async with attempt as lease:
                return lease

        async with attempt as held:
            assert held is not None
            assert await asyncio.create_task(other()) is None
            async with client.lock("a").attempt(timeout=0.01) as lease:
                assert lease is None

            assert await held.confirm()
        assert await client.holders("a") == []


async def test_attempt_raises_the_loss_as_a_with_block_does() -> None:
    """Also where ``cancel_on_lost`` has cancelled the body."""
    async with lockkit.aio.connect(URL) as client:
        with pytest.raises(lockkit.LockLost):
            async with client.lock("a").attempt():
                await client.break_lock("a")

        async def lose_and_go_on() -> None:
            async with client.lock("a", cancel_on_lost=True).attempt():
                await client.break_lock("a")
                await asyncio.sleep(PATIENCE)

        with pytest.raises(lockkit.LockLost):
            await asyncio.wait_for(lose_and_go_on(), PATIENCE / 2)


async def test_async_generator_leaves_its_own_block_in_whichever_task_it_ends() -> None:
    """The event loop closes one that was not read to its end in a task of its own, while others are inside."""
    async with lockkit.aio.connect(URL) as client:
        semaphore = client.semaphore("a", limit=2)

        async def hold() -> AsyncIterator[lockkit.aio.Lease]:
            async with semaphore as permit:
                yield permit

        async def enter(generator: AsyncIterator[lockkit.aio.Lease]) -> lockkit.aio.Lease:
            return await anext(generator)

        first, second = hold(), hold()
        permits = [await asyncio.create_task(enter(generator)) for generator in (first, second)]

        del first
        gc.collect()
        await until_async(lambda: not permits[0].held)
        assert permits[1].held

        del second
        gc.collect()
        await until_async(lambda: not permits[1].held)
        assert await semaphore.available() == 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio.eager_task_factory is new in Python 3.12")
async def test_loss_that_the_body_notices_first_cancels_nothing_behind_the_block() -> None:
    """An eager task that calls back begins within the body: the body was cancelled at an await behind the block."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    async with lockkit.aio.connect(URL) as client:
        with pytest.raises(lockkit.LockLost):  # noqa: PT012 - the block is what is tested
            async with client.lock("a", ttl=0.05, renew=False, cancel_on_lost=True) as lease:
                while lease.held:  # the watch, a task, cannot run meanwhile
                    pass
                lease.check()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_task_acquires_anew_after_a_loss_that_cancelled_its_block() -> None:
    """Leaving the block ends the lease for re-entry too, while the task still refers to it."""
    async with lockkit.aio.connect(URL) as client:
        locks = [
            client.lock("a", reentrant=True, cancel_on_lost=True, timeout=PATIENCE),
            client.rwlock("b", cancel_on_lost=True, timeout=PATIENCE).read(),
        ]
        for lock in locks:

            async def lose_and_go_on(lock: lockkit.aio.Lock, leases: list[lockkit.aio.Lease]) -> None:
                async with lock as lease:
                    leases.append(lease)
                    await client.break_lock(lock.name)
                    await lease.confirm()
                    await asyncio.sleep(PATIENCE)

            lost: list[lockkit.aio.Lease] = []
            with pytest.raises(lockkit.LockLost):
                await lose_and_go_on(lock, lost)

            async with lock as lease:
                assert lease.owner != lost[0].owner


async def test_attempt_checks_its_timeout_when_it_is_made() -> None:
    """Not when it is entered."""
    async with lockkit.aio.connect(URL) as client:
        with pytest.raises(lockkit.ConfigurationError, match="timeout"):
            client.lock("a").attempt(timeout=-1)


async def test_skipping_function_returns_none_while_the_lock_is_busy() -> None:
    """It does not run then; a timeout of its body goes through."""
    async with lockkit.aio.connect(URL) as client:

        @client.lock("job:{number}", on_busy="skip")
        async def job(number: int) -> str:
            if number == 0:
                await client.lock("inner").acquire(timeout=0)
            return f"did {number}"

        async with client.lock("job:1"), client.lock("inner"):
            assert await job(1) is None
            assert await job(2) == "did 2"
            with pytest.raises(lockkit.LockTimeout, match="'inner'"):
                await job(0)
        assert await job(1) == "did 1"

        with pytest.raises(lockkit.ConfigurationError, match="needs a limit"):
            client.lock("job", timeout=None, on_busy="skip")
        with pytest.raises(lockkit.ConfigurationError, match="on_busy must be"):
            client.lock("job", on_busy="wait")  # type: ignore[call-overload]


async def test_timeout_of_the_client_is_the_default_of_its_locks() -> None:
    """What a lock says wins, and None there means without limit."""
    async with lockkit.aio.connect(URL, timeout=0) as client:
        held = await client.lock("a").acquire()
        with pytest.raises(lockkit.LockTimeout):
            await client.lock("a").acquire()
        with pytest.raises(lockkit.LockTimeout):
            async with client.lock("a"):
                pass
        waiter = asyncio.create_task(client.lock("a", timeout=None).acquire())
        while not client._engine.acquisitions.waiting_count("a"):  # noqa: ASYNC110 - no event tells that it waits
            await asyncio.sleep(0)
        await held.release()
        await (await asyncio.wait_for(waiter, PATIENCE)).release()


async def test_parameters_of_other_libraries_are_refused_with_ours() -> None:
    """Before anything is sent."""
    async with lockkit.aio.connect(URL) as client:
        lock = client.lock("a")
        methods: list[Callable[..., Any]] = [lock.acquire, lock.try_acquire]
        for method in methods:
            with pytest.raises(TypeError, match="'blocking': use timeout=0"):
                await method(blocking=False)
        attempt: Callable[..., Any] = lock.attempt
        with pytest.raises(TypeError, match="'blocking': use timeout=0"):
            attempt(blocking=False)
        assert not await lock.locked()
        keywords: dict[str, Any] = {"lease_time": 5}
        with pytest.raises(TypeError, match="use ttl="):
            client.lock("a", **keywords)
