"""The wake-ups by inotify, at the instants that real processes hit only now and then."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from lockkit.backends.file import wakeup as watch
from lockkit.backends.file.clients import Client, poke
from lockkit.backends.file.directory import Directory
from lockkit.backends.file.wakeup import Watcher
from lockkit.runtime import BlockingRuntime, drive
from tests.backends.file.support import until
from tests.backends.support import StubHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lockkit.backend import Request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


class Stage:
    """A client with a watcher, in a directory."""

    def __init__(self, path: Path) -> None:
        """Make both."""
        self.host = StubHost(ScriptedSleep())
        self.directory = Directory(str(path), group=False)
        self.directory.prepare()
        self.client = Client(self.directory, "aaaa", 0.0)
        self.requests: dict[str, Request] = {}
        self.concerned: set[str] = set()
        self.watcher = Watcher(
            self.host.runtime,
            self.directory,
            self.client,
            self.requests,
            lambda request: request.owner in self.concerned,
        )

    def request(self, owner: str) -> Request:
        """A request that waits."""
        self.requests[owner] = self.host.request(owner=owner)
        return self.requests[owner]


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
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A client with a watcher."""
    stage = Stage(tmp_path / "locks")
    yield stage
    stopped = stage.watcher.retire()
    if stopped is not None:
        assert drive(stopped.wait(30))
    stage.client.close()


def woken(request: Request) -> bool:
    """Wait until the request is woken, generously."""
    return drive(request.wake.wait(30))


def test_client_that_ended_before_it_was_watched_is_noticed(stage: Stage) -> None:
    """Its file is there, or not any more: no event will ever come."""
    stage.request("r")
    other = Client(stage.directory, "bbbb", 0.0)

    assert stage.watcher.follow("r", "bbbb")
    other.forget()
    assert not stage.watcher.follow("r", "cccc")
    Client(stage.directory, "dddd", 0.0).forget()
    assert not stage.watcher.follow("r", "dddd")
    assert stage.watcher.follow("r", "")
    assert stage.watcher.follow("r", stage.client.id)


def test_follower_is_woken_only_when_the_flock_is_gone(stage: Stage) -> None:
    """The kernel reports the end of a process a moment before others can see it."""
    request = stage.request("r")
    other = Client(stage.directory, "bbbb", 0.0)
    runtime = stage.host.runtime
    assert isinstance(runtime, ScriptedSleep)
    seen: list[bool] = []

    def drop_at_the_third() -> None:
        seen.append(request.wake.is_set())
        if len(runtime.sleeps) == 3:
            fcntl.flock(other.fd, fcntl.LOCK_UN)

    runtime.meanwhile = drop_at_the_third
    drive(stage.watcher._ended("bbbb", {"r", "gone meanwhile"}))

    assert seen == [False] * 3
    assert request.wake.is_set()
    other.forget()


def test_follower_is_woken_though_the_flock_stays(stage: Stage) -> None:
    """Somebody else may have closed that file: a look too many, not one too few."""
    request = stage.request("r")
    other = Client(stage.directory, "bbbb", 0.0)

    drive(stage.watcher._ended("bbbb", {"r"}))

    assert request.wake.is_set()
    other.close()


def test_end_of_a_client_wakes_who_follows_it_and_nobody_else(stage: Stage) -> None:
    """Two followers of two clients, one of which ends."""
    first, second = stage.request("first"), stage.request("second")
    others = [Client(stage.directory, name, 0.0) for name in ("bbbb", "cccc")]
    assert stage.watcher.follow("first", "bbbb")
    assert stage.watcher.follow("second", "cccc")
    stage.watcher.listen()

    others[0].forget()

    assert woken(first)
    assert not second.wake.is_set()
    assert not stage.watcher.follow("first", "bbbb")
    others[1].close()
    assert woken(second)


def test_unfollowed_client_wakes_nobody(stage: Stage) -> None:
    """And its number may be forgotten while its last events are under way."""
    former, latter = stage.request("former"), stage.request("latter")
    other = Client(stage.directory, "bbbb", 0.0)
    assert stage.watcher.follow("former", "bbbb")
    stage.watcher.unfollow("former")
    stage.watcher.unfollow("former")
    other.close()
    third = Client(stage.directory, "cccc", 0.0)
    assert stage.watcher.follow("latter", "cccc")

    stage.watcher.listen()
    third.close()

    assert woken(latter)
    assert not former.wake.is_set()


def test_poke_wakes_a_lone_request_and_otherwise_whom_it_concerns(stage: Stage) -> None:
    """A poke carries no name."""
    first = stage.request("first")
    stage.watcher.listen()
    poke(stage.directory, stage.client.id)
    assert woken(first)
    first.wake.clear()
    second = stage.request("second")
    stage.concerned = {"second"}

    poke(stage.directory, stage.client.id)
    poke(stage.directory, "nobody")

    assert woken(second)
    assert not first.wake.is_set()


def test_lost_events_count_as_a_poke(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's queue is finite (IN_Q_OVERFLOW comes with the number -1)."""
    request = stage.request("r")
    monkeypatch.setattr(stage.watcher._inotify, "read", lambda: iter([(-1, 0x4000)]))

    assert stage.watcher._read() == []

    assert request.wake.is_set()


def test_watcher_ends_when_nobody_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle client has neither a thread nor an inotify instance; who comes then hears of it, and needs another."""
    monkeypatch.setattr(watch, "LINGER_SECONDS", 0.01)
    stage.request("r")
    before = threading.active_count()
    assert stage.watcher.listen()
    assert stage.watcher.listen()
    assert threading.active_count() == before + 1

    del stage.requests["r"]
    until(lambda: threading.active_count() == before)

    assert stage.watcher._inotify.fd == -1
    stage.request("again")
    assert not stage.watcher.listen()


def test_watcher_whose_listener_fails_wakes_everybody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They look for themselves then; the log says why."""

    def fail() -> None:
        message = "out of memory"
        raise MemoryError(message)

    monkeypatch.setattr(stage.watcher._inotify, "read", fail)
    request = stage.request("r")
    assert stage.watcher.listen()
    poke(stage.directory, stage.client.id)

    assert woken(request)
    assert not stage.watcher.listen()
    assert "out of memory" in caplog.text


def test_watcher_whose_listener_cannot_start_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time: there is no listener that a second caller could rely on."""

    def fail(*_: object) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(stage.host.runtime, "spawn", fail)

    with pytest.raises(RuntimeError, match="start new thread"):
        stage.watcher.listen()
    assert not stage.watcher.listen()


def test_retired_watcher_closes_its_descriptor(stage: Stage) -> None:
    """Whether or not it listens."""
    idle = Watcher(stage.host.runtime, stage.directory, stage.client, {}, lambda _: True)
    fd = idle._inotify.fd
    assert idle.retire() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)

    stage.request("r")
    stage.watcher.listen()
    stopped = stage.watcher.retire()
    assert stopped is not None
    assert drive(stopped.wait(30))
    assert stage.watcher._inotify.fd == -1
    stage.watcher.listen()
    assert stage.watcher.follow("r", "whoever")
