"""The wake-ups by inotify, at the instants that real processes rarely hit."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockkit.backend import Request
from lockkit.backends.file.directory import Directory
from lockkit.backends.file.wakeup import WakeupListener
from lockkit.runtime import BlockingRuntime, drive
from tests.backends.support import StubHost
from tests.tries import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


class Listening:
    """A client with a listener, in a directory."""

    def __init__(self, path: Path) -> None:
        """Make both."""
        self.host = StubHost(ScriptedSleep())
        self.path = path
        self.directory = self.other_client()
        self.requests: dict[str, Request] = {}
        self.listener = WakeupListener(self.host.runtime, self.directory, self.requests)

    def request(self, owner: str) -> Request:
        """A request that waits."""
        self.requests[owner] = self.host.request(owner=owner)
        return self.requests[owner]

    def other_client(self) -> Directory:
        """Another client of the directory."""
        client = Directory(self.host.runtime, str(self.path), group=False, on_removed=lambda: None)
        client.check(0.0)
        return client


class ScriptedSleep(BlockingRuntime):
    """Does something at each sleep instead of sleeping."""

    def __init__(self) -> None:
        """Do nothing at first."""
        super().__init__()
        self.sleeps: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def sleep(self, seconds: float) -> None:
        """See the class."""
        self.sleeps.append(seconds)
        self.meanwhile()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Listening]:
    """A client with a listener."""
    client = Listening(tmp_path / "locks")
    yield client
    stopped = client.listener.stop()
    if stopped is not None:
        assert drive(stopped.wait(30))
    client.directory.close()


def woken(request: Request) -> bool:
    """Wait until the request is woken, generously."""
    return drive(request.wake.wait(30))


def test_client_that_ended_before_it_was_watched_is_noticed(client: Listening) -> None:
    """Whether its file is still there or not: no event will ever come."""
    client.request("r")
    other = client.other_client()
    other_id = other.client_id

    assert client.listener.watch("r", other_id)
    other.forget()
    assert not client.listener.watch("r", "cccc")
    assert not client.listener.watch("r", other_id)
    assert client.listener.watch("r", "")
    assert client.listener.watch("r", client.directory.client_id)


def test_waiter_is_woken_only_when_the_flock_is_gone(client: Listening) -> None:
    """The kernel reports the end of a process a moment before it drops the flock."""
    request = client.request("r")
    other = client.other_client()
    runtime = client.host.runtime
    assert isinstance(runtime, ScriptedSleep)
    seen: list[bool] = []

    def drop_at_the_third() -> None:
        seen.append(request.wake.is_set())
        if len(runtime.sleeps) == 3:
            fcntl.flock(other.fd, fcntl.LOCK_UN)

    runtime.meanwhile = drop_at_the_third
    assert client.listener.watch("r", other.client_id)
    drive(client.listener._client_ended(other.client_id))

    assert seen == [False] * 3
    assert request.wake.is_set()
    other.forget()


def test_listener_that_fails_wakes_all_requests(
    client: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They poll then; the log says why."""

    def fail() -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(client.listener._inotify, "read", fail)
    request = client.request("r")
    assert client.listener.start()
    client.directory.notify(client.directory.client_id)

    assert woken(request)
    assert not client.listener.start()
    until(lambda: "out of memory" in caplog.text)
