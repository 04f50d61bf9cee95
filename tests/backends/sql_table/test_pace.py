"""Who gets a lock that many take, where nothing wakes those that wait."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest

from lockkit import url
from lockkit.backend import Busy, LockBackend, Request
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
    """After a time, and when there are many."""
    paces = Paces()
    paces.begin("x").found(1, 10.0)
    assert paces.find("x", 10.0 + CONTENDED_SECONDS / 2) is not None
    assert paces.find("x", 10.0 + CONTENDED_SECONDS) is None

    for number in range(NAMES_MAX + 1):
        paces.begin(f"{number}").found(1, 20.0)

    assert paces.find("0", 20.0) is None
    assert paces.find(f"{NAMES_MAX}", 20.0) is not None


def test_client_that_has_released_lets_others_go_first(tmp_path: Path) -> None:
    """While it knows of others, and unless its caller has no time for that; on a clock that stands still."""
    host = StubHost(FakeClock())
    backend, other = (registry.open_backend(url.parse(f"sqlite:///{tmp_path}/x.db"), {}, host)[0] for _ in range(2))

    def take(request: Request, of: LockBackend = backend) -> None:
        assert drive(of.release(granted(drive(of.try_acquire(request)))))

    take(host.request())
    take(host.request())
    held, waiting = granted(drive(other.try_acquire(host.request()))), host.request()
    assert isinstance(drive(backend.try_acquire(waiting)), Busy)
    assert drive(other.release(held))
    take(waiting)

    request = host.request()
    busy = drive(backend.try_acquire(request))
    assert isinstance(busy, Busy)
    assert busy.poll
    assert (busy.owner, busy.retry_after is not None) == (None, True)
    take(request)  # it has waited once
    take(host.request(queue=False))
    short = host.request()
    short.answer_by = host.runtime.now() + 0.5
    take(short)
    host.runtime.time += CONTENDED_SECONDS  # type: ignore[attr-defined]
    take(host.request())
    for one in (backend, other):
        drive(one.close())
