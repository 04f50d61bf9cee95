"""redis-py's Lock and lockkit keep each other out on the same key; on asyncio too, as the adapter shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis
import redis.asyncio

import lockkit
from lockkit_tools.servers import RedisServer, require
from tests.interop import redis_py_adapter
from tests.tries import busy


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node for all tests of this module."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


def test_blocking_locks_exclude_each_other(server: RedisServer) -> None:
    """Whoever comes first; and release and expiry let the other one in."""
    with redis.Redis(port=server.port) as data, lockkit.connect(server.url) as client:
        theirs = data.lock("lockkit:seat", timeout=30)
        ours = client.lock("seat")

        with ours:
            assert not theirs.acquire(blocking=False)
        assert theirs.acquire(blocking=False)
        assert busy(ours)
        assert ours.locked()
        theirs.release()
        with ours:
            assert theirs.locked()

        assert data.lock("lockkit:seat", timeout=0.2).acquire(blocking=False)
        ours.acquire(timeout=30).release()


def test_neither_frees_the_other_s_lock(server: RedisServer) -> None:
    """Both compare the owner: a late release of a lock that ran out harms nobody."""
    with redis.Redis(port=server.port) as data, lockkit.connect(server.url) as client:
        theirs = data.lock("lockkit:late", timeout=0.2)
        assert theirs.acquire(blocking=False)
        with client.lock("late", timeout=30) as lease:
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                theirs.release()
            assert lease.confirm()

        expired = client.lock("late", ttl=0.2, renew=False).acquire()
        expired.wait_lost()
        theirs = data.lock("lockkit:late", timeout=30)
        assert theirs.acquire(blocking=True, blocking_timeout=30)
        with pytest.raises(lockkit.LockLost):
            expired.release()
        assert data.get("lockkit:late") == theirs.local.token


def test_adapter_for_redis_py_s_own_tests_uses_their_key(server: RedisServer) -> None:
    """`nox -s redis-py-suite` runs seldom; without the same key, each of its tests would fail."""
    with redis.Redis(port=server.port) as data:
        ours, theirs = redis_py_adapter.Lock(data, "seat", timeout=30), data.lock("seat", timeout=30)
        with ours._client():
            assert ours.acquire(blocking=False)
            assert not theirs.acquire(blocking=False)
            ours.release()
            assert theirs.acquire(blocking=False)
            assert ours.locked()
            theirs.release()

    async def main() -> None:
        async with redis.asyncio.Redis(port=server.port) as data:
            ours, theirs = redis_py_adapter.AsyncLock(data, "seat", timeout=30), data.lock("seat", timeout=30)
            async with ours._client():
                assert await ours.acquire(blocking=False)
                assert not await theirs.acquire(blocking=False)
                await ours.release()

    asyncio.run(main())
