"""What is special about ``memory://``; what it shares with the other backends is in the conformance suite."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from lockkit.backend import Busy, Gone, Grant
from lockkit.backends.memory.backend import EXPIRED_MAX, MemoryBackend, _Space, _spaces
from lockkit.errors import ConfigurationError
from lockkit.runtime import drive
from lockkit.url import parse
from tests.backends.support import FakeClock, StubHost, granted, open_backend, tick


def connect(space: str, host: StubHost) -> MemoryBackend:
    """Open a backend as the engine does."""
    backend = open_backend(f"memory://{space}", host)
    assert isinstance(backend, MemoryBackend)
    return backend


@pytest.fixture
def host() -> StubHost:
    """A client whose time stands still."""
    return StubHost(FakeClock())


@pytest.mark.parametrize("url", ["memory://", "memory:", "memory:///", "memory://space", "memory://a%2Fb"])
def test_url_is_accepted(url: str, host: StubHost) -> None:
    """With or without the name of a space."""
    backend = MemoryBackend.open(parse(url), {}, host)

    drive(backend.ping())
    drive(backend.close())


@pytest.mark.parametrize("url", ["memory://a,b", "memory://a:1", "memory://u:secret@a", "memory:///path"])
def test_url_that_means_something_else_is_refused(url: str, host: StubHost) -> None:
    """The message says what to write, and shows no password."""
    with pytest.raises(ConfigurationError, match="write memory:// or memory://SPACE") as caught:
        MemoryBackend.open(parse(url), {}, host)

    assert "secret" not in str(caught.value)


def test_space_is_shared_by_clients_and_apart_from_others(host: StubHost) -> None:
    """Two clients of a space exclude each other; another space has other locks."""
    first, second = connect("shared", host), connect("shared", StubHost(host.runtime))
    elsewhere = connect("elsewhere", host)

    grant = granted(drive(first.try_acquire(host.request())))

    busy = drive(second.try_acquire(host.request(queue=False)))
    assert busy == Busy(30.0, owner=grant.owner, metadata='{"pid":1}')
    granted(drive(elsewhere.try_acquire(host.request())))


def test_nothing_is_left_of_released_and_abandoned_locks(host: StubHost) -> None:
    """A million names used once need no memory, but the tokens go on."""
    backend = connect("unused", host)
    space = _spaces["unused"]
    tokens = []
    for index in range(100):
        request, waiter = host.request(f"lock {index}"), host.request(f"lock {index}")
        grant = granted(drive(backend.try_acquire(request)))
        tokens.append(grant.token)
        assert isinstance(drive(backend.try_acquire(waiter)), Busy)
        drive(backend.abandon(waiter))
        assert drive(backend.release(grant))
        assert not drive(backend.release(grant))

    assert space.locks == {}
    assert tokens == sorted(set(tokens))


def test_leases_that_expired_without_a_release_are_forgotten(host: StubHost) -> None:
    """A million names that are left to expire need no memory; what is held or waited for stays."""
    backend = connect("expired", host)
    kept = granted(drive(backend.try_acquire(host.request("kept", ttl=1e6))))
    waiter = host.request("kept")
    assert isinstance(drive(backend.try_acquire(waiter)), Busy)
    left = host.request("left", ttl=1.0)
    granted(drive(backend.try_acquire(left)))
    last = host.request("left")
    assert isinstance(drive(backend.try_acquire(last)), Busy)
    for number in range(3 * EXPIRED_MAX):
        granted(drive(backend.try_acquire(host.request(f"lock {number}", ttl=1.0))))
        tick(host, 2.0)

    assert len(_spaces["expired"].locks) <= EXPIRED_MAX
    assert drive(backend.confirm(kept)) is None
    assert {"kept", "left"} < _spaces["expired"].locks.keys()


def test_many_locks_that_are_held_are_not_looked_at_each_time(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when there are twice as many as were left the last time."""
    backend = connect("held", host)
    looks: list[float] = []
    look = _Space.remove_expired

    def noted(space: _Space, now: float) -> None:
        looks.append(now)
        look(space, now)

    monkeypatch.setattr(_Space, "remove_expired", noted)
    for number in range(4 * EXPIRED_MAX):
        granted(drive(backend.try_acquire(host.request(f"lock {number}", ttl=1e6))))

    assert len(_spaces["held"].locks) == 4 * EXPIRED_MAX
    assert len(looks) == 2


def test_token_grows_though_the_record_was_removed(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the wall clock stands still, or is set back."""
    backend = connect("tokens", host)
    tokens = []
    for wall_us in (5000, 5000, 1, 9000):
        monkeypatch.setattr("lockkit.backends.memory.backend.wall_clock_us", lambda value=wall_us: value)
        grant = granted(drive(backend.try_acquire(host.request())))
        drive(backend.release(grant))
        tokens.append(grant.token)

    assert tokens == [5000, 5001, 5002, 9000]


def test_broken_holder_is_notified_once_and_forgotten(host: StubHost) -> None:
    """break_lock frees the lock; the holder is notified at once, and in the end nothing is left."""
    backend = connect("broken", host)
    grant = granted(drive(backend.try_acquire(host.request())))
    waiter = host.request()
    drive(backend.try_acquire(waiter))

    assert drive(backend.break_lock("x"))
    assert not drive(backend.break_lock("x"))
    assert not drive(backend.break_lock("never seen"))
    assert waiter.wake.is_set()
    assert host.losses == [(grant.owner, "broken")]
    assert drive(backend.renew([grant])) == [Gone("gone")]

    again = granted(drive(backend.try_acquire(waiter)))
    assert again.token > grant.token
    assert drive(backend.release(again))
    assert _spaces["broken"].locks == {}


def test_locks_are_broken_while_clients_join(host: StubHost) -> None:
    """The clients of a space are asked in one thread, and a new one comes in another."""
    backend, others, stop = connect("joined", host), [connect("joined", host) for _ in range(200)], threading.Event()

    def join() -> None:
        while not stop.is_set():
            others.append(connect("joined", host))

    thread = threading.Thread(target=join)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            granted(drive(backend.try_acquire(host.request("x"))))
            assert drive(backend.break_lock("x"))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_forked_child_has_empty_spaces(host: StubHost) -> None:
    """The child owns nothing, and does not hang on a mutex that a thread of the parent held."""
    backend = connect("fork", host)
    granted(drive(backend.try_acquire(host.request())))

    with _spaces["fork"].mutex:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # rather than hang
            free = isinstance(drive(backend.try_acquire(host.request())), Grant)
            os._exit(0 if free else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert len(drive(backend.holders("x"))) == 1
