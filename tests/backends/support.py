"""What the tests of single backends need instead of an engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Grant, LockBackend, LossReason, Request
from lockkit.configuration import registry
from lockkit.runtime import BlockingRuntime, Runtime, drive
from lockkit.testing.face_driver import AsyncDriver, FaceDriver, SyncDriver
from lockkit.testing.target import Face, Target
from lockkit.url import parse


class StubHost:
    """The engine's side, which only takes down what it is told."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        """Take a runtime; a blocking one if none is given."""
        self.runtime: Runtime = BlockingRuntime() if runtime is None else runtime
        self.losses: list[tuple[str, LossReason]] = []
        self.confirmations = 0

    def lost(self, owner: str, reason: LossReason) -> None:
        """See `lockkit.backend.Host.lost`."""
        self.losses.append((owner, reason))

    def confirm_soon(self) -> None:
        """See `lockkit.backend.Host.confirm_soon`."""
        self.confirmations += 1

    def request(self, name: str = "x", *, ttl: float = 30.0, queue: bool = True, owner: str | None = None) -> Request:
        """Make a request as the engine does."""
        return Request(name, owner or secrets.token_hex(16), ttl, '{"pid":1}', queue=queue, runtime=self.runtime)


class FakeClock(BlockingRuntime):
    """A blocking runtime whose time stands still until it is moved."""

    def __init__(self) -> None:
        """Start at a time that is not 0."""
        super().__init__()
        self.time = 1000.0
        self.now = self._now

    def _now(self) -> float:
        return self.time


def granted(outcome: object) -> Grant:
    """Assert that it is a grant."""
    assert isinstance(outcome, Grant), outcome
    return outcome


async def broken_reason(url: str, name: str, *, renewed: bool) -> str:
    """Break a lock that an asyncio client holds; give the reason that its holder gets."""
    async with lockkit.aio.connect(url) as client, lockkit.aio.connect(url) as other:
        lease = await client.lock(name, ttl=60).acquire(30)
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        lease.on_lost(lambda _, reason: told.set_result(reason))
        if renewed:
            await lease.extend()
        assert await other.break_lock(name)
        client._engine.confirm_soon()
        return await asyncio.wait_for(told, 30)


def refuses(face: str, url: str, problem: str) -> None:
    """Check that neither ping nor an acquisition works, and what their errors say."""

    async def scenario() -> None:
        async with lockkit.aio.connect(url) as client:
            with pytest.raises(lockkit.BackendUnavailable, match=problem):
                await client.ping()
            with pytest.raises(lockkit.BackendUnavailable, match=problem):
                await client.lock("x").acquire(timeout=0)

    if face == "async":
        asyncio.run(scenario())
        return
    with lockkit.connect(url) as client:
        with pytest.raises(lockkit.BackendUnavailable, match=problem):
            client.ping()
        with pytest.raises(lockkit.BackendUnavailable, match=problem):
            client.lock("x").acquire(timeout=0)


def sent_to(backend: LockBackend, request: Request) -> bool:
    """Try to acquire without an answer; tell whether the backend says that something may have been sent."""
    with pytest.raises(lockkit.BackendUnavailable) as raised:
        drive(backend.try_acquire(request))
    return raised.value.sent


def play(
    face: Face,
    url: str,
    body: Callable[[FaceDriver], Coroutine[Any, Any, None]],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run a body with clients of one face of a URL."""
    kind = SyncDriver if face == "blocking" else AsyncDriver
    driver = kind(Target(url, options), registry.find_for(parse(url), options).capabilities)
    driver.run(body(driver))
