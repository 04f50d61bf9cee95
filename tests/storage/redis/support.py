"""Redis, faces and other processes for the tests of guards and optimistic updates."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio

import lockkit
from tests.forked import Forked, arguments, say

PATIENCE = 60.0
"""Seconds that another process may take on a busy machine."""


@dataclass(frozen=True, slots=True)
class Face:
    """
    The sync or the async API, called from blocking code.

    Attributes:
        name: ``sync`` or ``asyncio``.
        port: Where the server is.
        options: For redis-py's client.
    """

    name: str
    port: int
    options: dict[str, Any] = field(default_factory=dict)

    def guard(self, ask: Callable[[Any], Any], **given: Any) -> Any:  # noqa: ANN401 - what is asked
        """Ask a guard something."""
        return self.client(
            lambda client: ask(lockkit.fencing.RedisGuard(client, **given)),
            lambda client: ask(lockkit.fencing.AsyncRedisGuard(client, **given)),
        )

    def update(self, key: Any, fn: Any, **given: Any) -> Any:  # noqa: ANN401 - also what is no key
        """Call `with_retry` or `with_retry_async`."""
        return self.client(
            lambda client: lockkit.optimistic.with_retry(client, key, fn, **given),
            lambda client: lockkit.optimistic.with_retry_async(client, key, fn, **given),
        )

    def client(self, blocking: Callable[[Any], Any], asynchronous: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - see above
        """Call one of them with a client."""
        if self.name == "sync":
            with redis.Redis(port=self.port, **self.options) as client:
                return blocking(client)

        async def main() -> Any:  # noqa: ANN401 - see above
            async with redis.asyncio.Redis(port=self.port, **self.options) as client:
                return await asynchronous(client)

        return asyncio.run(main())


# What they import when they begin.
IMPORTS = (
    *("lockkit.sync.client", "lockkit.backends.redis.backend", "lockkit.storage.redis"),
    *("lockkit.fencing", "lockkit.optimistic"),
)


def start(order: str, port: int, *given: object) -> Forked:
    """Start another process; it says a line when it is ready, and goes on when it gets one."""
    return Forked("tests.storage.redis.support:main", [order, str(port), *map(str, given)], IMPORTS)


def append(client: redis.Redis, key: str, times: str) -> None:
    """Take a token without any lock, append it to a list under the guard, again and again; say how often it was let."""
    guard = lockkit.fencing.RedisGuard(client)
    accepted = 0
    say("ready")
    sys.stdin.readline()
    for _ in range(int(times)):
        token = int(client.incr("tokens"))
        try:
            guard.run("return redis.call('RPUSH', KEYS[1], ARGV[1])", keys=[key], args=[token], token=token)
        except lockkit.StaleToken:
            continue
        accepted += 1
    say(accepted)


def hold(client: redis.Redis, key: str, value: str) -> None:
    """Acquire a key's lock and say the token; after the next line write, as if no time had passed; say how it ended."""
    guard = lockkit.fencing.RedisGuard(client)
    port = client.connection_pool.connection_kwargs["port"]
    with lockkit.connect(f"redis://127.0.0.1:{port}") as locks:
        lease = locks.lock(key, ttl=1.0, renew=False).acquire(timeout=PATIENCE)
        while not lease.held:  # the machine stood still
            lease = locks.lock(key, ttl=1.0, renew=False).acquire(timeout=PATIENCE)
        say(lease.token)
        sys.stdin.readline()
        try:
            guard.set(key, value, token=lease.token)
        except lockkit.StaleToken as error:
            say(f"StaleToken: {error}")
        else:
            say("written")


def main() -> None:
    """Carry out an order: `append` or `hold`."""
    order, port, *given = arguments()
    with redis.Redis(port=int(port)) as connected:
        {"append": append, "hold": hold}[order](connected, *given)
