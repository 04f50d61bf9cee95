"""What the page on other libraries says of them, each on the server that it locks on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.backoff
import redis.exceptions
import redis.retry
import sqlalchemy

from lockkit_tools.servers import EtcdServer, FaultProxy, PostgresServer, RedisServer, wait_until
from tests.backends.etcd.support import leases_of
from tests.comparison.support import LONG, PATIENCE, run_out


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One Redis."""
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One etcd."""
    with EtcdServer() as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A connection to an empty Redis."""
    with redis.Redis(port=server.port) as connected:
        connected.flushall()
        yield connected


# -- Redis -------------------------------------------------------------------------------------------------------------


def test_redis_py_holder_hears_of_its_loss_when_it_releases(client: redis.Redis) -> None:
    """It may ask before; nothing tells it."""
    first, second = (client.lock("seat", timeout=LONG) for _ in range(2))
    assert first.acquire()

    run_out(client, "seat")
    assert second.acquire(blocking=False)

    assert not first.owned()
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        first.release()
    assert second.owned()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # how its thread ends
def test_python_redis_lock_renews_no_more_after_one_error(server: RedisServer, client: redis.Redis) -> None:
    """A connection that breaks once while it renews costs the lock, and nobody is told."""
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy("127.0.0.1", server.port))
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        far = stack.enter_context(redis.Redis(port=proxy.port, retry=retry))
        lock: Any = import_module("redis_lock").Lock(far, "seat", expire=3, auto_renewal=True)
        assert lock.acquire()
        renewal = lock._lock_renewal_thread  # the only way to see it end

        proxy.refuse()
        proxy.cut()
        renewal.join(PATIENCE)
        proxy.accept()
        assert not renewal.is_alive()
        wait_until(lambda: "the key is still there" if client.exists("lock:seat") else None)

        other: Any = import_module("redis_lock").Lock(client, "seat", expire=3)
        assert other.acquire(blocking=False)


def test_pottery_says_free_of_a_lock_that_another_object_holds(client: redis.Redis) -> None:
    """Whether a lock is held cannot be asked from elsewhere."""
    make: Any = import_module("pottery").Redlock
    holder, other = (make(key="seat", masters={client}, auto_release_time=LONG) for _ in range(2))
    assert holder.acquire(blocking=False)

    assert not other.locked()
    assert not other.acquire(blocking=False)
    holder.release()


def test_redlock_py_gives_up_after_its_tries(client: redis.Redis) -> None:
    """There is no wait: a caller who wants the lock asks again."""
    manager: Any = import_module("redlock").Redlock([client], retry_count=2, retry_delay=0.01)
    held = manager.lock("seat", int(LONG * 1000))

    assert held
    assert manager.lock("seat", int(LONG * 1000)) is False


def test_tooz_believes_in_a_lock_whose_key_is_gone(server: RedisServer, client: redis.Redis) -> None:
    """`acquired` is what it remembers: two hold the lock, and both say so."""
    coordination = import_module("tooz.coordination")
    with ExitStack() as stack:
        locks = []
        for member in (b"a", b"b"):
            coordinator: Any = coordination.get_coordinator(f"redis://127.0.0.1:{server.port}", member)
            coordinator.start()
            stack.callback(coordinator.stop)
            locks.append(coordinator.get_lock(b"seat"))
        first, second = locks
        assert first.acquire()

        client.flushall()

        assert second.acquire(blocking=False)
        assert first.acquired
        assert second.acquired


# -- etcd, PostgreSQL, files -------------------------------------------------------------------------------------------


def test_etcd3gw_enters_the_block_without_the_lock(etcd: EtcdServer) -> None:
    """Its `with` does not look at what `acquire` says."""
    host, _, port = etcd.url.partition("://")[2].partition(":")
    client: Any = import_module("etcd3gw").client(host=host, port=int(port), api_path="/v3/")
    first, second = (client.lock("seat", ttl=int(LONG)) for _ in range(2))
    inside = []

    with first, second:
        inside += [first.is_acquired(), second.is_acquired()]

    assert inside == [True, False]


def test_pyetcd_leaves_a_lease_for_each_attempt_that_fails(etcd: EtcdServer) -> None:
    """Who asks often leaves many: each stays at the server until its ttl is over."""
    host, _, port = etcd.url.partition("://")[2].partition(":")
    with closing(import_module("pyetcd").client(host=host, port=int(port))) as client:
        assert client.lock("stool", ttl=int(LONG)).acquire(timeout=PATIENCE)
        before = leases_of(etcd)

        for _ in range(3):
            assert not client.lock("stool", ttl=int(LONG)).acquire(timeout=0.1)

    assert len(leases_of(etcd) - before) >= 3  # it asks several times within the timeout, with a lease each time


def test_sqlalchemy_dlock_believes_in_a_lock_whose_session_was_ended() -> None:
    """Another has the lock, and `locked` is still true: nothing looks after the connection."""
    make: Any = import_module("sqlalchemy_dlock").create_sadlock
    with PostgresServer() as server, ExitStack() as stack:
        url = sqlalchemy.make_url(server.url).set(drivername="postgresql+psycopg")
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        stack.callback(engine.dispose)
        open_one = engine.execution_options(isolation_level="AUTOCOMMIT").connect
        first, second, admin = (stack.enter_context(closing(open_one())) for _ in range(3))
        pid = first.execute(sqlalchemy.text("SELECT pg_backend_pid()")).scalar_one()
        held, wanted = make(first, "seat"), make(second, "seat")
        assert held.acquire(timeout=0)

        admin.execute(sqlalchemy.text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})

        assert wanted.acquire(timeout=PATIENCE)
        assert held.locked
        wanted.release()
        first.invalidate()


async def most_inside(lock: AbstractAsyncContextManager[object], seconds: float) -> int:
    """Two tasks enter a lock, and stay until both are in, or for so long; tell how many were in together at most."""
    inside = most = 0
    both = asyncio.Event()

    async def enter() -> None:
        nonlocal inside, most
        async with lock:
            inside += 1
            most = max(most, inside)
            if inside == 2:
                both.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(both.wait(), seconds)
            inside -= 1

    await asyncio.gather(enter(), enter())
    return most


@pytest.mark.asyncio
async def test_filelock_object_shared_by_two_tasks_lets_both_in(tmp_path: Path) -> None:
    """The lock belongs to the object, which counts; with two objects they would exclude each other."""
    lock: Any = import_module("filelock").AsyncFileLock(tmp_path / "seat.lock")

    assert await most_inside(lock, PATIENCE) == 2
