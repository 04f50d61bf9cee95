"""How long an acquisition waits, pauses and undoes, and when what could not be undone is tried again: to the point."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf
from typing import Any

import pytest

from lockkit.backend import CALL_SECONDS, Busy, Request
from lockkit.engine.acquisition import ANSWER_GRACE, OUTAGE_PAUSE_MAX, UNDO_SECONDS, UNDO_SECONDS_MIN
from lockkit.engine.cleanup import FIRST_PAUSE, PAUSE_MAX, PendingCleanups
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import drive
from tests.engine.scripted import ScriptedBackend, fail, scripted
from tests.engine.test_agenda import Clock, Watched

DOWN = BackendUnavailable("the answer was lost")


class Pauses(Clock):
    """A runtime on which each wait for an event passes its time, and is noted."""

    def __init__(self) -> None:
        """Note nothing yet."""
        super().__init__()
        self.pauses: list[float] = []

    def event(self) -> Any:  # noqa: ANN401 - an event
        """Make an event that is never set by others."""
        event, runtime = super().event(), self

        class Noted:
            set, clear, is_set = event.set, event.clear, event.is_set

            async def wait(self, seconds: float | None) -> bool:
                if not event.is_set() and seconds is not None:
                    runtime.pauses.append(seconds)
                    runtime.time += seconds
                return event.is_set()

        return Noted()


def refusing(retry_after: float | None, *, poll: bool = False) -> tuple[Any, ScriptedBackend, Pauses]:
    """Make a client whose lock is busy."""
    runtime = Pauses()
    client, backend = scripted(runtime)

    async def try_acquire(_: Request) -> Busy:
        return Busy(retry_after, poll=poll)

    backend.try_acquire = try_acquire  # type: ignore[method-assign, assignment]
    return client, backend, runtime


@pytest.mark.parametrize(
    ("retry_after", "timeout", "wait", "answer"),
    [
        (20.0, None, 20.0, 20.0 + CALL_SECONDS),  # a little after the holder's ttl
        (None, None, 100.0, 100.0 + CALL_SECONDS),  # that of one's own, where it is not known
        (500.0, None, 100.0, 100.0 + CALL_SECONDS),  # at one's own ttl there is a warning to give
        (20.0, 15.0, 15.0, 15.0 + ANSWER_GRACE),
        (20.0, 60.0, 20.0, 20.0 + CALL_SECONDS),
    ],
)
def test_wait_at_the_backend_ends_when_it_is_worth_looking(
    retry_after: float | None, timeout: float | None, wait: float, answer: float
) -> None:
    """And its answer has a call's time after that, or the grace after the end of the caller's wait."""
    client, backend, runtime = refusing(retry_after)
    seen: list[tuple[float, float]] = []

    async def note(request: Request, _: Busy, until: float) -> None:
        seen.append((until - runtime.time, request.answer_by - runtime.time))
        raise LockError("seen")

    backend.wait = note  # type: ignore[method-assign, assignment]
    with pytest.raises(LockError, match="seen"):
        client.lock("x", ttl=100).acquire(timeout)

    ((until, answer_by),) = seen
    assert (0.001 if wait == retry_after else 0.0) <= until - wait <= 0.01
    assert (0.001 if wait == retry_after else 0.0) - 1e-9 <= answer_by - answer <= 0.01


@pytest.mark.parametrize(("why", "longest"), [("poll", 2.0), ("outage", OUTAGE_PAUSE_MAX)])
def test_pauses_double_up_to_a_bound(why: str, longest: float) -> None:
    """Each is half to all of it, at random; the last one ends with the caller's wait."""
    client, backend, runtime = refusing(None, poll=True)
    backend.poll_seconds = longest  # type: ignore[misc] # as a backend's class does it
    if why == "outage":

        async def down(_: Request) -> Busy:
            raise BackendUnavailable("down")

        backend.try_acquire = down  # type: ignore[method-assign, assignment]
    with pytest.raises(BackendUnavailable) if why == "outage" else nullcontext():
        assert client.lock("x", ttl=100).try_acquire(timeout=10.0) is None  # asks nobody who holds it

    *pauses, last = [pause for pause in runtime.pauses if pause]
    bounds = [min(longest, 0.01 * 2.0**number) for number in range(1, len(pauses) + 1)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert last <= bounds[-1] * 2
    assert sum(pauses) + last == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("timeout", "late", "seconds"),
    [(None, 0.0, UNDO_SECONDS), (0, 0.0, ANSWER_GRACE), (2.0, 0.0, 2.0 + ANSWER_GRACE), (0, 10.0, UNDO_SECONDS_MIN)],
)
def test_undoing_takes_what_the_caller_has_left(timeout: float | None, late: float, seconds: float) -> None:
    """And is tried in the background until a ttl has done the same: of a place in a queue, two."""
    client, backend = scripted(runtime := Pauses())
    left: list[float] = []

    def lose_answer() -> None:
        runtime.time += late
        raise LockError("lost")

    async def abandon(request: Request) -> None:
        left.append(request.answer_by - runtime.time)
        raise DOWN

    backend.after["try_acquire"], backend.abandon = lose_answer, abandon  # type: ignore[method-assign]
    with pytest.raises(LockError, match="lost"):
        client.lock("x", ttl=100).acquire(timeout)

    assert left == [pytest.approx(seconds)]
    ((_, _, cleanup),) = client._engine.cleanups._pending
    assert cleanup.until - runtime.time == pytest.approx(110.0 if timeout == 0 else 220.0)


def test_what_was_not_undone_is_tried_less_and_less_often_until_its_ttl() -> None:
    """Once another one has succeeded, at once: the backend is back."""
    watched = Watched()
    clock, cleanups = watched.runtime, PendingCleanups(watched.client)

    async def refused() -> None:
        fail(DOWN)()

    async def works() -> None: ...

    def run() -> None:
        cleanup, _ = cleanups._take()
        assert cleanup is not None
        drive(cleanups._try(cleanup))
        cleanups._idle.set()

    cleanups.add(60.0, refused)
    pause = FIRST_PAUSE
    for _ in range(8):
        run()
        if not cleanups._pending:
            break
        at = cleanups._pending[0][0]
        assert pause / 2 <= at - clock.time <= pause
        assert cleanups._take() == (None, at)  # not before
        clock.time, pause = at, min(2 * pause, PAUSE_MAX)
    clock.time = 1060.0
    assert cleanups._take() == (None, inf)  # its ttl has freed the lock

    cleanups.add(600.0, refused)
    run()
    assert cleanups._pending[0][0] > clock.time
    cleanups.add(600.0, works)
    run()
    assert cleanups._take()[0] is not None
