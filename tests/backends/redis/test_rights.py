"""Users without the right to publish or subscribe: under contention, waiters poll, and nothing fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.target import Face
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisCluster, RedisNodes, RedisServer, require
from tests.backends.support import play

RULES = {
    "mute": "~* &* +@all -publish",
    "deaf": "~* &* +@all -subscribe",
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


async def contend(driver: FaceDriver, first: lockkit.aio.Client, second: lockkit.aio.Client) -> None:
    """Do with one client what another one waits for."""
    lease = await first.lock("x", ttl=TTL).acquire(timeout=PATIENCE)
    waiters = [driver.spawn(hold(second.lock("x", ttl=TTL))) for _ in range(3)]
    await driver.sleep(0.1)
    assert not any(one.done for one in waiters)
    await lease.release()
    for one in waiters:
        await one.result(PATIENCE)

    lease = await first.lock("y", ttl=TTL).acquire(timeout=PATIENCE)
    waiter = driver.spawn(hold(second.lock("y", ttl=TTL)))
    await driver.sleep(0.1)
    assert await first.break_lock("y")
    await waiter.result(PATIENCE)
    with pytest.raises(lockkit.LockLost):
        await lease.release()
    permit = await first.semaphore("s", 1, ttl=TTL).acquire(timeout=PATIENCE)
    waiter = driver.spawn(hold(second.semaphore("s", 1, ttl=TTL)))
    await driver.sleep(0.1)
    await permit.release()
    await waiter.result(PATIENCE)


async def hold(lock: lockkit.aio.Lock | lockkit.aio.Semaphore) -> None:
    """Wait for it, and release it."""
    await (await lock.acquire(timeout=PATIENCE)).release()


@pytest.mark.parametrize(("user", "face"), [*zip(RULES, ["blocking", "asyncio"] * 2, strict=True)])
def test_waiters_poll(url: str, user: str, face: Face, caplog: pytest.LogCaptureFixture) -> None:
    """Releases succeed, and one warning says why it is slow."""
    own = url.replace("USER", f"{user}:secret").replace(",", f",{user}:secret@" if url.startswith("redlock") else ",")
    own += f"?prefix={user}" + ("&node_timeout=10" if url.startswith("redlock") else "")

    async def body(driver: FaceDriver) -> None:
        await contend(driver, await driver.connect(), await driver.connect())

    with caplog.at_level(logging.WARNING, logger="lockkit"):
        play(face, own, body)
    warnings = [message for message in caplog.messages if "poll, because" in message]
    assert len(warnings) == 1, caplog.messages
    assert "secret" not in caplog.text


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
