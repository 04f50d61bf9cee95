"""Who gets a lock that many take, where nothing wakes those that wait."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit import url
from lockkit.backend import Busy, Grant, LockBackend
from lockkit.backends.sql_table.pace import CONTENDED_SECONDS, NAMES_MAX, RATE_MIN, Pace, Paces
from lockkit.configuration import registry
from lockkit.runtime import drive
from tests.backends.support import FakeClock, StubHost, granted

HOLD_SECONDS = 0.0006
LOOK_SECONDS = 0.0003
PAUSE_FROM, PAUSE_TO = 0.001, 0.01  # what the engine adds


def turns(count: int, *, seconds: float, seed: int) -> list[int]:
    """Let so many clients take a lock in a loop; give how often each had it."""
    source = random.Random(seed)
    paces, had = [Pace() for _ in range(count)], [0] * count
    events = [(source.random() * PAUSE_TO, client) for client in range(count)]
    heapq.heapify(events)
    free_at, token = 0.0, 1
    while events[0][0] < seconds:
        now, client = heapq.heappop(events)
        pace = paces[client]
        if now >= free_at:
            token += 1
            had[client] += 1
            pace.granted(token, now)
            now = free_at = now + HOLD_SECONDS * source.uniform(0.7, 1.6)
            pace.released_at = now
            waits = pace.just_released(now)
        else:
            pace.found(token, now)
            waits = True
        pause = pace.pause(source.uniform) + source.uniform(PAUSE_FROM, PAUSE_TO) if waits else 0.0
        heapq.heappush(events, (now + LOOK_SECONDS + pause, client))
    return had


@pytest.mark.parametrize("seed", range(5))
def test_eight_clients_have_it_about_equally_often(seed: int) -> None:
    """In ten seconds; and the lock is not idle for most of the time."""
    had = turns(8, seconds=10.0, seed=seed)

    assert min(had) >= 0.75 * max(had)
    assert sum(had) >= 10.0 * 400


def test_hundreds_of_clients_look_less_often_each() -> None:
    """A server has only so many looks to give."""
    pace = Pace()

    looks = [pace.found(token, token / 1000) for token in range(1, 1000)]

    assert all(looks[1:])
    assert pace.rate == RATE_MIN


def test_lock_in_the_same_hands_is_looked_at_as_rarely_as_any() -> None:
    """Once it was there for a while; a new holder makes it contended again."""
    pace = Pace()

    assert [pace.found(7, 0.0), pace.found(7, 0.05)] == [False, False]
    assert [pace.found(8, 0.1), pace.found(8, 0.15), pace.found(8, 0.3)] == [True, True, False]
    assert pace.found(9, 0.4)


def test_names_are_forgotten() -> None:
    """After a time, and the oldest when there are many."""
    paces = Paces()
    paces.begin("x").found(1, 10.0)
    assert paces.find("x", 10.0 + CONTENDED_SECONDS / 2) is not None
    assert paces.find("x", 10.0 + CONTENDED_SECONDS) is None

    for number in range(NAMES_MAX + 1):
        paces.begin(f"{number}").found(1, 20.0)

    assert paces.find("0", 20.0) is None
    assert paces.find("1", 20.0) is not None


class TestBackend:
    """Of SQLite, on a clock that stands still."""

    @pytest.fixture
    def host(self) -> StubHost:
        """With such a clock."""
        return StubHost(FakeClock())

    @pytest.fixture
    def backend(self, host: StubHost, tmp_path: Path) -> Iterator[LockBackend]:
        """That of a client."""
        backend, _ = registry.open_backend(url.parse(f"sqlite:///{tmp_path}/locks.db"), {}, host)
        yield backend
        drive(backend.close())

    @pytest.fixture
    def other(self, host: StubHost, tmp_path: Path, backend: LockBackend) -> Iterator[LockBackend]:
        """That of another."""
        del backend
        other, _ = registry.open_backend(url.parse(f"sqlite:///{tmp_path}/locks.db"), {}, host)
        yield other
        drive(other.close())

    @staticmethod
    def take(backend: LockBackend, host: StubHost) -> Grant:
        """Take a lock at once, and give it back."""
        grant = granted(drive(backend.try_acquire(host.request())))
        assert drive(backend.release(grant))
        return grant

    def test_client_that_has_released_lets_others_go_first(
        self, backend: LockBackend, other: LockBackend, host: StubHost
    ) -> None:
        """Once for each acquisition, and only while it knows of others."""
        clock = host.runtime
        assert isinstance(clock, FakeClock)
        self.take(backend, host)
        self.take(backend, host)
        held, waiting = granted(drive(other.try_acquire(host.request()))), host.request()
        assert isinstance(drive(backend.try_acquire(waiting)), Busy)
        assert drive(other.release(held))
        assert drive(backend.release(granted(drive(backend.try_acquire(waiting)))))

        request = host.request()
        busy = drive(backend.try_acquire(request))
        assert isinstance(busy, Busy)
        assert busy.poll
        assert (busy.owner, busy.retry_after is not None) == (None, True)
        assert drive(backend.release(granted(drive(backend.try_acquire(request)))))

        clock.time += CONTENDED_SECONDS
        self.take(backend, host)
        self.take(backend, host)

    def test_caller_with_little_time_takes_it_at_once(
        self, backend: LockBackend, other: LockBackend, host: StubHost
    ) -> None:
        """One that tries once, and one whose timeout would be over."""
        held, waiting = granted(drive(other.try_acquire(host.request()))), host.request()
        assert isinstance(drive(backend.try_acquire(waiting)), Busy)
        assert drive(other.release(held))
        assert drive(backend.release(granted(drive(backend.try_acquire(waiting)))))

        assert drive(backend.release(granted(drive(backend.try_acquire(host.request(queue=False))))))
        short = host.request()
        short.answer_by = host.runtime.now() + 0.5
        granted(drive(backend.try_acquire(short)))

    def test_waiter_looks_again_soon_while_the_lock_changes_hands(
        self, backend: LockBackend, other: LockBackend, host: StubHost
    ) -> None:
        """Not if it stays in the same."""
        clock = host.runtime
        assert isinstance(clock, FakeClock)
        waiting = host.request()

        def left() -> float:
            busy = drive(backend.try_acquire(waiting))
            assert isinstance(busy, Busy)
            assert busy.retry_after is not None
            return busy.retry_after

        held = granted(drive(other.try_acquire(host.request())))
        assert left() > 1.0
        assert drive(other.release(held))
        granted(drive(other.try_acquire(host.request())))
        assert left() < 0.1
        clock.time += 0.2
        assert left() > 1.0
