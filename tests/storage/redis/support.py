"""
Redis, faces and other processes for the tests of guards and optimistic updates.

``python -m tests.storage.redis.support ORDER PORT KEY …`` is one such process: see `append`, `count` and `hold`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

import lockkit
from tests.conventions.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

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


def start(order: str, port: int, *arguments: object) -> subprocess.Popen[str]:
    """Start another process; it says a line when it is ready, and goes on when it gets one."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.redis.support", order, str(port), *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """Read the next line that a process says."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"the process ended with {process.wait(PATIENCE)}"
    return line


def all_done(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Let processes go on together, and give what each says at the end."""
    try:
        for process in processes:
            line_of(process)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [process.communicate(timeout=PATIENCE)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def say(text: object) -> None:
    """Say a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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


def count(client: redis.Redis, key: str, times: str) -> None:
    """Add 1 to a number, again and again; say how often the function was asked."""
    asked = 0

    def more(now: bytes | None) -> int:
        nonlocal asked
        asked += 1
        return int(now or 0) + 1

    say("ready")
    sys.stdin.readline()
    for _ in range(int(times)):
        lockkit.optimistic.with_retry(client, key, more, attempts=None, timeout=PATIENCE)
    say(asked)


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


if __name__ == "__main__":
    order, port, *arguments = sys.argv[1:]
    with redis.Redis(port=int(port)) as connected:
        {"append": append, "count": count, "hold": hold}[order](connected, *arguments)
