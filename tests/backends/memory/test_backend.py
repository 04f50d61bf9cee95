"""What is special about ``memory://``; what it shares with the other backends is in the conformance suite."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from lockkit.backend import Busy, Gone, Grant, Renewed
from lockkit.backends.memory.backend import EXPIRED_MAX, MemoryBackend, _Space, _spaces
from lockkit.errors import ConfigurationError
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.url import parse
from tests.backends.support import FakeClock, StubHost, granted


def connect(space: str, host: StubHost) -> MemoryBackend:
    """Open a backend as the engine does."""
    return MemoryBackend.open(parse(f"memory://{space}"), {}, host)


@pytest.fixture
def host() -> StubHost:
    """A client whose time stands still."""
    return StubHost(FakeClock())


def clock(host: StubHost) -> FakeClock:
    """The host's clock, to move it."""
    assert isinstance(host.runtime, FakeClock)
    return host.runtime


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
        clock(host).time += 2.0

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


def test_release_wakes_the_next_waiters_only(host: StubHost) -> None:
    """The head of the queue and the one behind it, not all 100."""
    backend = connect("wake", host)
    grant = granted(drive(backend.try_acquire(host.request())))
    waiters = [host.request() for _ in range(100)]
    for waiter in waiters:
        assert isinstance(drive(backend.try_acquire(waiter)), Busy)

    assert drive(backend.release(grant))

    assert [waiter.wake.is_set() for waiter in waiters] == [True, True] + [False] * 98
    assert isinstance(drive(backend.try_acquire(waiters[5])), Busy)
    granted(drive(backend.try_acquire(waiters[0])))


def test_expired_lease_is_neither_renewed_nor_released(host: StubHost) -> None:
    """A lease ends with its ttl, also while no other client has taken the lock."""
    backend = connect("expiry", host)
    grant = granted(drive(backend.try_acquire(host.request(ttl=10.0))))
    clock(host).time += 9.0
    assert drive(backend.renew([grant])) == [Renewed()]
    assert [holder.remaining for holder in drive(backend.holders("x"))] == [10.0]

    clock(host).time += 10.0

    assert drive(backend.holders("x")) == []
    assert drive(backend.renew([grant])) == [Gone("expired")]
    assert not drive(backend.release(grant))
    assert drive(backend.renew([grant])) == [Gone("gone")]


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


def test_holders_show_metadata_and_waiters(host: StubHost) -> None:
    """As in `lockkit holders`."""
    backend = connect("holders", host)
    grant = granted(drive(backend.try_acquire(host.request(ttl=7.0))))
    drive(backend.try_acquire(host.request()))

    (holder,) = drive(backend.holders("x"))

    assert (holder.owner, holder.token, holder.remaining, holder.waiters) == (grant.owner, grant.token, 7.0, 1)
    assert holder.metadata == {"pid": 1}


def test_uncertain_grant_is_undone(host: StubHost) -> None:
    """A request that was interrupted after its grant leaves nothing behind."""
    backend = connect("uncertain", host)
    request = host.request()
    granted(drive(backend.try_acquire(request)))
    request.uncertain = True

    drive(backend.abandon(request))
    drive(backend.abandon(request))

    assert drive(backend.holders("x")) == []


def test_threads_and_event_loops_share_a_lock_in_turns() -> None:
    """Two threads and two event loops, one lock: never two inside, everybody gets it, tokens grow."""
    rounds = 200
    inside = 0
    overlaps = 0
    tokens: list[int] = []

    async def contend(host: StubHost, backend: MemoryBackend) -> None:
        nonlocal inside, overlaps
        for _ in range(rounds):
            request = host.request()
            while not isinstance(outcome := await backend.try_acquire(request), Grant):
                await backend.wait(request, outcome, host.runtime.now() + 20.0)
            inside += 1
            overlaps += inside != 1
            tokens.append(outcome.token)
            await host.runtime.sleep(0)
            inside -= 1
            assert await backend.release(outcome)

    def blocking() -> None:
        host = StubHost(BlockingRuntime())
        drive(contend(host, connect("turns", host)))

    def looping() -> None:
        host = StubHost(AsyncioRuntime())
        asyncio.run(contend(host, connect("turns", host)))

    threads = [threading.Thread(target=target) for target in (blocking, blocking, looping, looping)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not any(thread.is_alive() for thread in threads), "a wake-up was lost"
    assert overlaps == 0
    assert len(tokens) == 4 * rounds
    assert tokens == sorted(set(tokens))


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
