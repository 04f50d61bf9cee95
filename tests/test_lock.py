"""A lock: attempts, decorators that skip, the client's timeout, and parameters of other libraries."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.faces import both_faces
from tests.tries import until_async

URL = "memory://lock"


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A sync client of a space of its own."""
    with lockkit.connect(URL, ttl=PATIENCE) as client:
        yield client


# -- attempt -----------------------------------------------------------------------------------------------------------


@both_faces
async def test_attempt_holds_the_lock_inside_the_block(driver: FaceDriver) -> None:
    """None stands for "busy"; one attempt object in two threads or tasks keeps their leases apart."""
    client = await driver.connect()
    attempt = client.lock("a").attempt()

    async def other() -> object:
        async with attempt as lease:
            return lease

    async with attempt as held:
        assert held is not None
        assert [holder.owner for holder in await client.holders("a")] == [held.owner]
        assert await driver.spawn(other()).result() is None
        async with client.lock("a").attempt(timeout=0.01) as lease:
            assert lease is None
        assert await held.confirm()

    assert await client.holders("a") == []


@both_faces
async def test_attempt_raises_what_a_with_block_raises(driver: FaceDriver) -> None:
    """Loss, and what the body raises: only the attempt's own wait ends in None."""
    client = await driver.connect()
    with pytest.raises(lockkit.LockLost):
        async with client.lock("a").attempt():
            await client.break_lock("a")

    async with client.lock("b"):
        with pytest.raises(lockkit.LockTimeout, match="'b'"):
            async with client.lock("a").attempt():
                await client.lock("b").acquire(timeout=0)

    assert await client.holders("a") == []


@both_faces
async def test_attempt_checks_its_timeout_when_it_is_made(driver: FaceDriver) -> None:
    """Not when it is entered."""
    client = await driver.connect()
    with pytest.raises(lockkit.ConfigurationError, match="timeout"):
        client.lock("a").attempt(timeout=-1)


# -- on_busy ----------------------------------------------------------------------------------------------------------


@both_faces
async def test_skipping_function_returns_none_while_the_lock_is_busy(driver: FaceDriver) -> None:
    """It does not run then, whatever the client's timeout; a timeout of its body goes through."""
    client = await driver.connect(timeout=1000)

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


def test_skipping_plain_function(client: lockkit.Client) -> None:
    """In the sync API; without ``on_busy`` it raises."""
    job = client.lock("job", on_busy="skip")(lambda: "done")

    with client.lock("job"):
        assert job() is None
        for lock in (client.lock("job", timeout=0), client.lock("job", timeout=0, on_busy="raise")):
            with pytest.raises(lockkit.LockTimeout):
                lock(print)()
    assert job() == "done"


@both_faces
async def test_skipping_refuses_what_would_never_skip(driver: FaceDriver) -> None:
    """A wait without limit, and an unknown word."""
    client = await driver.connect()
    with pytest.raises(lockkit.ConfigurationError, match="needs a limit"):
        client.lock("job", timeout=None, on_busy="skip")
    with pytest.raises(lockkit.ConfigurationError, match=r"on_busy must be .*did you mean 'skip'") as caught:
        client.lock("job", on_busy="skipp")  # type: ignore[call-overload]
    assert (caught.value.name, caught.value.backend) == ("job", client.url)


def test_skipping_refuses_a_plain_wrapper(client: lockkit.Client) -> None:
    """Nobody knows what it returns."""

    async def body() -> None: ...

    @functools.wraps(body)
    def wrapper() -> Coroutine[Any, Any, None]:
        return body()

    with pytest.raises(lockkit.ConfigurationError, match="plain wrapper"):
        client.lock("job", on_busy="skip")(wrapper)


# -- the client's timeout ---------------------------------------------------------------------------------------------


@both_faces
async def test_timeout_of_the_client_is_the_default_of_its_locks(driver: FaceDriver) -> None:
    """What a lock or a call says wins, and None there means without limit."""
    client = await driver.connect(timeout=0)
    lock = client.lock("a")
    for acquire in (client.lock("a", timeout=None).acquire, functools.partial(lock.acquire, timeout=None)):
        held = await lock.acquire()
        with pytest.raises(lockkit.LockTimeout):
            await lock.acquire()
        with pytest.raises(lockkit.LockTimeout):
            async with lock:
                pass
        waiter = driver.spawn(acquire())
        await driver.until_waiting(client, "a")
        await held.release()
        await (await waiter.result()).release()


# -- parameters of other libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "advice"),
    [
        ({"blocking": False}, "use timeout=0"),
        ({"blocking": True}, "leave it out"),
        ({"blocking_timeout": 5}, "use timeout="),
        ({"expire": 5}, "use ttl="),
        ({"expire_in": 5}, "use ttl="),
        ({"lease_time": 5}, "use ttl="),
        ({"auto_renewal": True}, "use renew="),
        ({"sleep": 0.1}, "leave it out"),
        ({"thread_local": False}, "leave it out"),
        ({"id": "me"}, "use metadata="),
        ({"tttl": 5}, "did you mean 'ttl'"),
    ],
)
def test_lock_names_its_parameter_for_that_of_another_library(
    client: lockkit.Client, keywords: dict[str, Any], advice: str
) -> None:
    """A `TypeError`, as Python raises for any unknown keyword, that says what to write instead."""
    for one in (client, lockkit.aio.connect(URL)):
        with pytest.raises(TypeError, match=rf"Client.lock\(\) got an unexpected keyword argument .*{advice}"):
            one.lock("a", **keywords)


@both_faces
async def test_methods_of_a_lock_name_their_parameter_too(driver: FaceDriver) -> None:
    """Nothing is acquired, and other type errors stay what they are."""
    client = await driver.connect()
    lock: Any = client.lock("a")

    async def attempt(*arguments: object, **keywords: object) -> None:
        lock.attempt(*arguments, **keywords)

    for name, method in (("acquire", lock.acquire), ("try_acquire", lock.try_acquire), ("attempt", attempt)):
        with pytest.raises(TypeError, match=rf"Lock.{name}\(\) got .*'blocking': use timeout=0") as caught:
            await method(blocking=False)
        assert caught.value.__cause__ is None
        with pytest.raises(TypeError, match=r"positional argument"):
            await method(1, 2, 3)
        with pytest.raises(lockkit.ConfigurationError, match="use timeout=0"):
            await method(False)  # noqa: FBT003 - as redis-py's acquire(False)

    assert await client.holders("a") == []


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [
    lambda client, _: client.lock("a", ttl=0),
    lambda client, _: client.lock("a", timeout=-1),
    lambda client, _: client.lock("a", renew="no"),
    lambda client, _: client.lock("a", reentrant=1),
    lambda client, _: client.lock("a", raise_on_lost=None),
    lambda client, _: client.lock("a", metadata=3),
    lambda client, _: client.lock("a", max_hold=0),
    lambda _, lease: lease.extend(-1),
    lambda _, lease: lease.wait_lost(-1),
    lambda _, lease: lease.on_lost(3),
    lambda _, lease: lease.update(3),
    lambda client, _: client.holders("a" * 300),
    lambda client, _: client.break_lock("a" * 300),
    lambda client, _: client.once("a", keep=-1),
    lambda client, _: client.election("a", grace=-1),
    lambda client, _: client.lock("{name}")(identity)("a" * 300),
    lambda client, _: client.semaphore("{name}", 3)(identity)("a" * 300),
    lambda client, _: client.once("{name}", keep=1)(identity)("a" * 300),
    lambda client, _: client.locks(["{name}"])(identity)("a" * 300),
])  # fmt: skip
def test_error_names_lock_and_backend(
    client: lockkit.Client, call: Callable[[lockkit.Client, lockkit.Lease], object]
) -> None:
    """Whichever argument is wrong."""
    with client.lock("a") as lease, pytest.raises(lockkit.ConfigurationError) as caught:
        call(client, lease)

    assert caught.value.name is not None
    assert caught.value.name.startswith("a")
    assert caught.value.backend == client.url
    with pytest.raises(lockkit.ConfigurationError) as caught:
        client.lock(7)  # type: ignore[call-overload]
    assert (caught.value.name, caught.value.backend) == (None, client.url)


def test_address_of_an_object_in_a_name_is_refused(client: lockkit.Client) -> None:
    """Two objects of one order would be two locks; and once the address is used again, an order counts as done."""

    class Order:
        id = 7

    charge = client.once("charge:{order}", keep=60)(lambda order: order.id)
    ship = client.lock("ship:{order}")(lambda order: order.id)
    for attempt in (charge, ship, lambda order: client.lock(f"pack:{order}")):
        with pytest.raises(lockkit.ConfigurationError, match=r"has the address of an object.* such as \{order.id\}"):
            attempt(Order())

    assert client.lock("ship:{order.id}")(lambda order: order.id)(Order()) == 7
    assert client.holders(f"pack:{Order()}") == []


def test_nul_in_the_name_of_a_decorated_call_is_refused(client: lockkit.Client) -> None:
    """Also of a semaphore, whose name lockkit keeps behind NUL characters."""
    for decorate in (client.lock("{name}"), client.semaphore("{name}", 3), client.locks(["{name}"])):
        with pytest.raises(lockkit.ConfigurationError, match="NUL"):
            decorate(identity)("a\0b")


def identity(name: str) -> str:
    """Return the name."""
    return name


# -- asyncio alone -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
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
@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_task_acquires_anew_after_a_loss_that_cancelled_its_block() -> None:
    """Leaving the block ends the lease for re-entry too, while the task still refers to it; an attempt as a lock."""
    async with lockkit.aio.connect(URL) as client:
        lock = client.lock("a", reentrant=True, cancel_on_lost=True, timeout=PATIENCE)
        for block in (lock, lock.attempt(), client.rwlock("a", cancel_on_lost=True, timeout=PATIENCE).read()):
            lost: list[Any] = []
            with pytest.raises(lockkit.LockLost):  # noqa: PT012 - the block is what is tested
                async with block as lease:
                    lost.append(lease)
                    await client.break_lock("a")
                    await lost[0].confirm()
                    await asyncio.sleep(PATIENCE)

            async with block as lease:
                assert lease is not None
                assert lease.owner != lost[0].owner


@pytest.mark.asyncio
async def test_loss_cancels_a_block_of_leases_too() -> None:
    """``async with await lock.acquire(5)`` is how to give a block a timeout of its own."""
    async with lockkit.aio.connect(URL) as client:
        lock, readers = client.lock("a", cancel_on_lost=True), client.rwlock("a", cancel_on_lost=True).read()
        every = client.locks(["a", "b"], cancel_on_lost=True)
        for acquire in (lock.acquire, lock.try_acquire, readers.acquire, every.acquire, every.try_acquire):
            with pytest.raises(lockkit.LockLost):  # noqa: PT012 - the block is what is tested
                async with await acquire(PATIENCE) as held:  # type: ignore[union-attr] # the lock is free
                    await client.break_lock("a")
                    await held.confirm()
                    await asyncio.sleep(2 * PATIENCE)


@pytest.mark.asyncio
async def test_loss_cancels_the_blocks_that_are_left_of_a_lease() -> None:
    """Two tasks are in blocks of one lease; the one that leaves first takes no other's cancellation with it."""
    async with lockkit.aio.connect(URL) as client:
        lock = client.lock("a", cancel_on_lost=True, reentrant=True)
        entered, left = asyncio.Event(), asyncio.Event()

        async def work(lease: lockkit.aio.Lease) -> None:
            async with lease:
                entered.set()
                await left.wait()
                await client.break_lock("a")
                await lease.wait_lost(PATIENCE)
                await asyncio.sleep(2 * PATIENCE)

        lease = await lock.acquire()
        again = await lock.acquire()
        working = asyncio.create_task(work(lease))
        async with lease:
            await entered.wait()
        left.set()

        with pytest.raises(lockkit.LockLost):
            await asyncio.wait_for(working, PATIENCE)
        assert again.lost
