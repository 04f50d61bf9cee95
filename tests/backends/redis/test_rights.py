"""Users without the right to publish or subscribe: under contention, waiters poll, and nothing fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisCluster, RedisNodes, RedisServer, require, wait_until

RULES = {
    "mute": "~* &* +@all -publish -spublish",
    "deaf": "~* &* +@all -subscribe -ssubscribe",
    "no-channels": "~* resetchannels +@all",
    "no-pubsub": "~* resetchannels +@all -@pubsub",
}
TTL = 600.0
"""Far longer than any test: a waiter that gets the lock has looked again by itself."""


@pytest.fixture(scope="module", params=["redis", "redis+cluster", "redlock"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL of each kind of servers, with ``USER`` for the user and its password."""
    require("redis", local=True)
    servers = {"redis": RedisServer, "redis+cluster": RedisCluster, "redlock": RedisNodes}[request.param]()
    with servers:
        nodes: Sequence[RedisServer] = [servers] if isinstance(servers, RedisServer) else servers.nodes
        for node in nodes:
            with node.connect() as connection:
                for user, rules in RULES.items():
                    connection.call("ACL", "SETUSER", user, "on", ">secret", *rules.split())
        yield f"{request.param}://USER@{','.join(node.address for node in nodes)}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those about polling."""
    return [message for message in caplog.messages if "poll, because" in message]


def contend(first: lockkit.Client, second: lockkit.Client, wait_for_warning: Callable[[], None]) -> None:
    """Do with one client what another one waits for."""
    waits: list[threading.Thread] = []

    def wait_for(lock: lockkit.Lock) -> threading.Event:
        granted = threading.Event()

        def wait() -> None:
            with lock.acquire(timeout=PATIENCE):
                granted.set()

        waits.append(threading.Thread(target=wait))
        waits[-1].start()
        return granted

    lease = first.lock("x", ttl=TTL).acquire(timeout=PATIENCE)
    waiters = [wait_for(second.lock("x", ttl=TTL)) for _ in range(3)]
    wait_for_warning()
    assert not waiters[0].is_set()
    lease.release()
    assert all(one.wait(PATIENCE) for one in waiters)
    lease = first.lock("y", ttl=TTL).acquire(timeout=PATIENCE)
    waiter = wait_for(second.lock("y", ttl=TTL))
    assert not waiter.wait(0.3)
    assert first.break_lock("y")
    assert waiter.wait(PATIENCE)
    with pytest.raises(lockkit.LockLost):
        lease.release()
    if first.capabilities.downgrade:
        writer = first.rwlock("z", ttl=TTL).write().acquire(timeout=PATIENCE)
        waiter = wait_for(second.rwlock("z", ttl=TTL).read())
        assert not waiter.wait(0.3)
        writer.downgrade()
        assert waiter.wait(PATIENCE)
        writer.release()
    permit = first.semaphore("s", 1, ttl=TTL).acquire(timeout=PATIENCE)
    waiter = wait_for(second.semaphore("s", 1, ttl=TTL))
    assert not waiter.wait(0.3)
    permit.release()
    assert waiter.wait(PATIENCE)
    for thread in waits:
        thread.join()


@pytest.mark.parametrize("user", RULES)
def test_waiters_poll(url: str, user: str, caplog: pytest.LogCaptureFixture) -> None:
    """Releases succeed, and one warning says why it is slow."""
    own = url.replace("USER", f"{user}:secret").replace(",", f",{user}:secret@" if url.startswith("redlock") else ",")
    own += f"?prefix={user}-sync"
    with (
        caplog.at_level(logging.WARNING, logger="lockkit"),
        lockkit.connect(own) as first,
        lockkit.connect(own) as second,
    ):
        contend(first, second, lambda: wait_until(lambda: None if warnings(caplog) else "no warning"))
    assert len(warnings(caplog)) == 1, caplog.messages
    assert "secret" not in caplog.text


@pytest.mark.parametrize("user", RULES)
def test_waiters_poll_with_asyncio(url: str, user: str, caplog: pytest.LogCaptureFixture) -> None:
    """As with threads."""
    own = url.replace("USER", f"{user}:secret").replace(",", f",{user}:secret@" if url.startswith("redlock") else ",")
    own += f"?prefix={user}-aio"

    async def scenario() -> None:
        async with lockkit.aio.connect(own) as first, lockkit.aio.connect(own) as second:
            lease = await first.lock("x", ttl=TTL).acquire(timeout=PATIENCE)

            async def wait() -> None:
                async with second.lock("x", ttl=TTL, timeout=PATIENCE):
                    pass

            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                while not warnings(caplog):  # noqa: ASYNC110 - of lockkit, which has no event for it
                    await asyncio.sleep(0.01)
            assert not any(task.done() for task in waiting)
            await lease.release()
            await asyncio.gather(*waiting)

    with caplog.at_level(logging.WARNING, logger="lockkit"):
        asyncio.run(scenario())
    assert len(warnings(caplog)) == 1


def test_holder_who_may_not_publish(caplog: pytest.LogCaptureFixture) -> None:
    """Its release succeeds though others, who have all rights, wait; the lock is free at once."""
    require("redis", local=True)
    users = {"mute": "on >secret ~* &* +@all -publish"}
    with RedisServer(users=users) as server:
        mute = server.url.replace("://", "://mute:secret@")
        with lockkit.connect(mute) as holder, lockkit.connect(server.url) as other:
            lease = holder.lock("x", ttl=2.0).acquire(timeout=PATIENCE)
            waiting = threading.Thread(target=lambda: other.lock("x").acquire(timeout=PATIENCE).release())
            waiting.start()
            while not [one for one in other.holders("x") if one.waiters]:
                pass
            lease.release()
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
    assert "Error" not in caplog.text
