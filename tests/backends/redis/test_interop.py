"""On the same key redis-py's ``Lock`` and lockkit keep each other out, in both directions and on both faces."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest
import redis
import redis.asyncio
import redis.exceptions

import lockkit
import lockkit.aio
from lockkit.testing.servers import RedisServer, require, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.sync import Client, Lease

PATIENCE = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node for all tests of this module."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


@pytest.fixture
def ours(server: RedisServer) -> Iterator[Client]:
    """A client of lockkit's."""
    with lockkit.connect(server.url) as client:
        yield client


@pytest.fixture
def theirs(server: RedisServer) -> Iterator[redis.Redis]:
    """A client of redis-py's, on an empty server."""
    with redis.Redis(host=server.host, port=server.port) as client:
        client.flushall()
        yield client


def test_their_lock_keeps_us_out(ours: Client, theirs: redis.Redis) -> None:
    """While redis-py holds the key, lockkit polls, because redis-py notifies no waiter."""
    lock = theirs.lock("lockkit:x", timeout=30)
    assert lock.acquire()
    assert ours.lock("x").try_acquire() is None
    (holder,) = ours.holders("x")
    assert (holder.owner.encode(), holder.token) == (lock.local.token, None)
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(ours.lock("x").acquire(timeout=PATIENCE)))
    thread.start()
    time.sleep(0.3)
    assert got == []

    lock.release()

    thread.join(PATIENCE)
    got[0].release()


def test_our_lock_keeps_them_out(ours: Client, theirs: redis.Redis) -> None:
    """redis-py gets the key when lockkit has released it, and not before."""
    lease = ours.lock("x").acquire()
    lock = theirs.lock("lockkit:x", timeout=30, sleep=0.01)
    assert not lock.acquire(blocking=False)
    assert lock.locked()
    assert not lock.owned()

    lease.release()

    assert lock.acquire(blocking_timeout=PATIENCE)
    assert ours.lock("x").try_acquire() is None
    lock.release()


def test_they_cannot_overtake_a_waiter_of_ours(server: RedisServer, ours: Client, theirs: redis.Redis) -> None:
    """A lock that is offered to a waiter is taken for everybody else."""
    lease = ours.lock("x").acquire()
    with lockkit.connect(server.url) as other:
        got: list[Lease] = []
        thread = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=PATIENCE)))
        thread.start()
        wait_until(lambda: None if [one.waiters for one in ours.holders("x")] == [1] else "nobody waits")

        lease.release()

        assert not theirs.lock("lockkit:x", timeout=30).acquire(blocking=False)
        thread.join(PATIENCE)
        got[0].release()


def test_their_release_and_extension_do_not_touch_our_lease(ours: Client, theirs: redis.Redis) -> None:
    """An expired holder of redis-py's finds our lease, and leaves it alone; and the other way round."""
    lock = theirs.lock("lockkit:x", timeout=0.1)
    assert lock.acquire()
    lease = ours.lock("x").acquire(timeout=PATIENCE)
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.extend(10)
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()
    assert lease.confirm()

    theirs.delete("lockkit:x")
    again = theirs.lock("lockkit:x", timeout=30)
    assert again.acquire(blocking=False)
    with pytest.raises(lockkit.LockLost):
        lease.release()
    assert again.owned()
    again.release()


def test_their_lock_is_broken_by_us(ours: Client, theirs: redis.Redis) -> None:
    """`break_lock` frees a key that another client forgot, also one without an expiry."""
    theirs.set("lockkit:x", "forgotten")

    assert ours.break_lock("x")

    ours.lock("x").acquire(timeout=PATIENCE).release()


def test_both_contend_for_one_key(server: RedisServer, theirs: redis.Redis) -> None:
    """Threads of both libraries: never two inside, and each has its rounds."""
    inside = 0
    overlaps = 0
    rounds = 25

    def work() -> None:
        nonlocal inside, overlaps
        inside += 1
        overlaps += inside != 1
        time.sleep(0.001)
        inside -= 1

    def with_lockkit() -> None:
        with lockkit.connect(server.url) as client:
            for _ in range(rounds):
                with client.lock("x", timeout=PATIENCE):
                    work()

    def with_redis_py() -> None:
        for _ in range(rounds):
            with theirs.lock("lockkit:x", timeout=30, sleep=0.002, blocking_timeout=PATIENCE):
                work()
                # It would be there again before anybody has looked.
                time.sleep(0.002)
            time.sleep(0.002)

    threads = [threading.Thread(target=target) for target in (with_lockkit, with_lockkit, with_redis_py, with_redis_py)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)

    assert not any(thread.is_alive() for thread in threads)
    assert overlaps == 0


def test_asyncio_forms_keep_each_other_out(server: RedisServer, theirs: redis.Redis) -> None:
    """The same with tasks."""

    async def scenario() -> None:
        async with (
            lockkit.aio.connect(server.url) as client,
            redis.asyncio.Redis(host=server.host, port=server.port) as driver,
        ):
            lock = driver.lock("lockkit:x", timeout=30, sleep=0.01)
            assert await lock.acquire()
            assert await client.lock("x").try_acquire() is None
            waiting = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
            await asyncio.sleep(0.2)
            assert not waiting.done()

            await lock.release()

            lease = await waiting
            assert not await lock.acquire(blocking=False)
            theirs_next = asyncio.create_task(lock.acquire(blocking_timeout=PATIENCE))
            await lease.release()
            assert await theirs_next
            await lock.release()

    assert theirs.ping()
    asyncio.run(scenario())
