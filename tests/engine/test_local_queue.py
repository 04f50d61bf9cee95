"""The line of one client for one lock: in order, nobody forgotten, nobody blocked by who is gone."""

from __future__ import annotations

from math import inf

import pytest

from lockkit.engine.local_queue import LocalQueues, Ticket
from lockkit.runtime import BlockingRuntime, _BlockingEvent, drive
from lockkit.testing.timing import PATIENCE
from tests.tries import beside, until


def lines(monkeypatch: pytest.MonkeyPatch) -> LocalQueues:
    """Make an empty set of lines that looks often whether a head is gone."""
    monkeypatch.setattr("lockkit.engine.local_queue.LOOK_SECONDS", 0.05)
    return LocalQueues(BlockingRuntime())


def wait(line: LocalQueues, name: str, place: Ticket, seconds: float = PATIENCE) -> bool:
    """Wait for one's turn."""
    return drive(line.wait_for_turn(name, place, BlockingRuntime().now() + seconds, inf, lambda: None))


def test_next_in_line_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not look by itself."""
    line = lines(monkeypatch)
    monkeypatch.setattr("lockkit.engine.local_queue.LOOK_SECONDS", 60.0)
    head, second = Ticket(), Ticket()
    line.enter("x", head, wait=True)
    line.enter("x", second, wait=True)
    waiter = beside(wait, line, "x", second, 100.0)
    turn = second.turn
    assert isinstance(turn, _BlockingEvent)
    until(lambda: turn._sleepers)
    line.leave("x", head)

    assert waiter.result(20) is True


def test_head_that_gives_up_at_once_passes_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made the head in the instant in which it gave up."""
    line = lines(monkeypatch)
    head, second, third = Ticket(), Ticket(), Ticket()
    for place in (head, second, third):
        line.enter("x", place, wait=True)
    line.leave("x", head)  # `second` is the head now, and does not know it yet

    line.leave("x", second)

    assert wait(line, "x", third)


def test_head_that_is_gone_without_leaving_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from a signal handler may strike before its call could note that it must leave."""
    line = lines(monkeypatch)
    head, second, third = Ticket(), Ticket(), Ticket()
    for place in (head, second, third):
        line.enter("x", place, wait=True)
    del head

    assert wait(line, "x", second)
    del place, second  # also one that waited
    assert wait(line, "x", third)
    del third
    assert line.enter("x", Ticket(), wait=False)


def test_close_sends_everybody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are told; it waits until the head has left."""
    line = lines(monkeypatch)
    head, second = Ticket(), Ticket()
    line.enter("x", head, wait=True)
    line.enter("x", second, wait=True)

    def stand() -> bool:
        came = wait(line, "x", second, 100.0)
        line.leave("x", second)
        return came

    waiter = beside(stand)
    closing = beside(lambda: drive(line.close(inf)))
    until(lambda: line._closed)
    assert waiter.result(PATIENCE) is False
    assert not closing.done()
    line.leave("x", head)

    closing.result(PATIENCE)
