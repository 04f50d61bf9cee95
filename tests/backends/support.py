"""What the tests of single backends need instead of an engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, LockBackend, LossReason, Request
from lockkit.configuration import registry
from lockkit.runtime import BlockingRuntime, Runtime, drive
from lockkit.testing.face_driver import FACES, AsyncDriver, FaceDriver, SyncDriver
from lockkit.testing.target import Face, Target
from lockkit.url import parse
from lockkit_tools.servers import FaultProxy, Server
from tests.tries import until

Connect: TypeAlias = Callable[..., lockkit.Client]
SqlSettings: TypeAlias = Mapping[str, Mapping[str, str]]


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


def tick(host: StubHost, seconds: float) -> None:
    """Let time pass for a host with a `FakeClock`."""
    assert isinstance(host.runtime, FakeClock)
    host.runtime.time += seconds


def open_backend(url: str, host: StubHost, **options: Any) -> LockBackend:
    """Open a backend without an engine; nothing is sent."""
    return registry.open_backend(parse(url), options, host)[0]


def answers(call: Callable[[], object]) -> bool:
    """Tell whether the server answers."""
    try:
        call()
    except lockkit.BackendUnavailable:
        return False
    return True


def granted(outcome: object) -> Grant:
    """Assert that it is a grant."""
    assert isinstance(outcome, Grant), outcome
    return outcome


def refuses(url: str, problem: str, kind: type[lockkit.LockError] = lockkit.ConfigurationError) -> None:
    """Check that in each API neither ping nor an acquisition works, and what their errors say."""

    async def body(driver: FaceDriver) -> None:
        client = driver.make_client()
        for call in (client.ping, client.lock("x").try_acquire):
            with pytest.raises(kind, match=problem):
                await call()

    for face in FACES:
        play(face, url, body)


def inner(client: aio.Client) -> aio.Client:
    """The client itself, of which a driver may have handed out an adapter."""
    found: aio.Client = getattr(client, "inner", client)
    return found


def sent_to(backend: LockBackend, request: Request) -> bool:
    """Try to acquire without an answer; tell whether the backend says that something may have been sent."""
    with pytest.raises(lockkit.BackendUnavailable) as raised:
        drive(backend.try_acquire(request))
    return raised.value.sent


def says_whether_it_was_sent(server: Server) -> None:
    """Check what an acquisition says: refused at connect, no; unanswered, or refused while it has a place, yes."""
    host = StubHost()
    with FaultProxy(server.host, server.port) as proxy:
        ours = open_backend(server.url.replace(server.address, proxy.address), host)
        other = open_backend(server.url, host)
        grant = granted(drive(other.try_acquire(host.request("sent"))))
        proxy.refuse()
        request = host.request("sent")
        assert not sent_to(ours, request)
        assert request.state is None
        proxy.heal()
        until(lambda: answers(lambda: drive(ours.ping())))  # it connects again after a pause

        waiting = host.request("sent")
        assert isinstance(drive(ours.try_acquire(waiting)), Busy)
        proxy.refuse()
        proxy.cut()
        assert sent_to(ours, waiting)
        proxy.heal()
        until(lambda: answers(lambda: drive(ours.ping())))
        drive(ours.abandon(waiting))

        proxy.blackhole(to_server=False)
        assert sent_to(ours, host.request("unanswered"))
        proxy.heal()
        drive(other.release(grant))
        for one in (ours, other):
            drive(one.close())


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
