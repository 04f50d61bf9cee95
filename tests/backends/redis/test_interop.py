"""
On the same key redis-py's ``Lock`` and lockkit keep each other out; with waiters, readers and an empty prefix.

What both do to one another without these: ``tests/interop/test_redis_py_lock.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
import redis.asyncio
import redis.exceptions

import lockkit
import lockkit.aio
from lockkit.runtime import drive
from lockkit.sync import Client, Lease
from lockkit_tools.servers import RedisServer, wait_until
from tests.tries import busy

PATIENCE = 60.0


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


def test_their_lock_is_broken_by_us(ours: Client, theirs: redis.Redis) -> None:
    """`break_lock` frees a key that another client forgot, also one without an expiry."""
    theirs.set("lockkit:x", "forgotten")

    assert ours.break_lock("x")

    ours.lock("x").acquire(timeout=PATIENCE).release()


# -- the same name, with an empty prefix -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["foo", "stock:17", "a key with spaces/and slashes"])
def test_empty_prefix_makes_the_name_the_key_of_redis_py(server: RedisServer, theirs: redis.Redis, name: str) -> None:
    """``redis.Redis().lock("foo")`` can be replaced in one process at a time: each keeps the other out."""
    their_lock = theirs.lock(name, timeout=30)
    with lockkit.connect(f"{server.url}?prefix=") as client:
        with client.lock(name, ttl=30) as lease:
            assert theirs.get(name) == lease.owner.encode()
            assert not their_lock.acquire(blocking=False)
        assert their_lock.acquire(blocking=True, blocking_timeout=PATIENCE)

        assert busy(client.lock(name))
        (holder,) = client.holders(name)
        assert holder.owner.encode() == their_lock.local.token
        their_lock.release()
        client.lock(name).acquire(timeout=PATIENCE).release()


def test_empty_prefix_wakes_waiters_and_keeps_the_rest_of_the_keys(server: RedisServer, theirs: redis.Redis) -> None:
    """Two clients of lockkit hand over as under any prefix; the application's keys stay."""
    theirs.set("mine", "kept")
    with lockkit.connect(server.url, prefix="") as one, lockkit.connect(server.url, prefix="") as other:
        lease = one.lock("foo").acquire(timeout=PATIENCE)
        got: list[Lease] = []
        thread = threading.Thread(target=lambda: got.append(other.lock("foo").acquire(timeout=PATIENCE)))
        thread.start()
        wait_until(lambda: None if one.holders("foo")[0].waiters == 1 else "nobody waits for foo")
        lease.release()
        thread.join(PATIENCE)
        assert got[0].token > lease.token
        got[0].release()
        with one.lock("held", timeout=PATIENCE), one.semaphore("permit", limit=1, timeout=PATIENCE):
            # Of lockkit's own keys the lock's alone: not those beside it, nor those of what lives apart.
            assert list(one.names()) == ["held"]
        with pytest.raises(lockkit.Unsupported, match="empty prefix"):
            drive(one._engine.client.ready().erase())
    assert theirs.get("mine") == b"kept"


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("scheme", ["redis", "redlock"])
def test_empty_prefix_keeps_locks_from_what_lives_apart(server: RedisServer, scheme: str) -> None:
    """A lock may have any name, also that of the key of a semaphore or of what is done once."""
    names = {"+sem:x", "+once:x", "+limit:x", "+session:x", "+sem", "+49 30 901820", "sem:x"}
    with lockkit.connect(f"{scheme}://{server.host}:{server.port}", prefix="") as client:
        with ExitStack() as held:
            held.enter_context(client.semaphore("x", limit=1, timeout=PATIENCE))
            for name in names:
                held.enter_context(client.lock(name, timeout=PATIENCE))
            for begin in ("", "+", "+s", "+sem", "+sem:", "+49", "sem"):
                found = {name for name in client.names(begin) if name.startswith(("+", "sem"))}
                assert found == {name for name in names if name.startswith(begin)}
        assert client.semaphore("x", limit=1).available() == 1


@pytest.mark.parametrize("scheme", ["redis", "redlock"])
def test_empty_prefix_leaves_data_of_an_application_alone(
    server: RedisServer, theirs: redis.Redis, scheme: str
) -> None:
    """A key without an expiry and without a record is no lock that could be listed or broken, unless by force."""
    url = f"{scheme}://{server.host}:{server.port}?prefix="
    theirs.set("user:1", "kept")
    theirs.hset("user:2", "name", "kept")
    theirs.set("their lock", "token", px=30_000)
    with lockkit.connect(url) as client, client.lock("user:3", timeout=PATIENCE):
        assert {"their lock", "user:3"} == {name for name in client.names() if name[0] in "tu"}
        assert busy(client.lock("user:1"))

        with pytest.raises(lockkit.LockError, match=r"'user:1'.* was not broken.*expiry.*force=True"):
            client.break_lock("user:1")
        assert theirs.get("user:1") == b"kept"
        with pytest.raises(lockkit.LockError, match="WRONGTYPE"):
            client.break_lock("user:2", force=True)
        assert theirs.hget("user:2", "name") == b"kept"
        assert client.break_lock("their lock")
        assert client.break_lock("user:1", force=True)
    assert theirs.exists("their lock", "user:1") == 0


def test_empty_prefix_breaks_a_lock_of_which_only_the_record_is_left(server: RedisServer, theirs: redis.Redis) -> None:
    """Its counter is a proof, also when somebody has removed the expiry."""
    with lockkit.connect(f"{server.url}?prefix=") as client:
        lease = client.lock("x", timeout=PATIENCE, raise_on_lost=False).acquire()
        theirs.persist("x")
        assert list(client.names("x")) == ["x"]

        assert client.break_lock("x")

        assert not lease.confirm()


# -- readers and permits -----------------------------------------------------------------------------------------------


def test_our_readers_keep_them_out_until_the_last_one_ends(ours: Client, theirs: redis.Redis) -> None:
    """The key is there, and its value is no owner of theirs."""
    reads = [ours.rwlock("x", ttl=30).read().acquire(timeout=PATIENCE) for _ in range(2)]
    lock = theirs.lock("lockkit:x", timeout=30, sleep=0.01)
    for lease in reads:
        assert not lock.acquire(blocking=False)
        assert lock.locked()
        assert not lock.owned()
        lease.release()

    assert lock.acquire(blocking_timeout=PATIENCE)
    assert busy(ours.rwlock("x").read())
    lock.release()


def test_their_release_does_not_end_our_readers(ours: Client, theirs: redis.Redis) -> None:
    """An expired holder of redis-py's finds readers there, and leaves them alone."""
    lock = theirs.lock("lockkit:x", timeout=0.1)
    assert lock.acquire()
    with ours.rwlock("x", timeout=PATIENCE).read() as lease:
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            lock.extend(10)
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            lock.release()
        assert lease.confirm()
