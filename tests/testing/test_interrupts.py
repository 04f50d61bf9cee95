"""Where a signal handler of a test must not raise."""

from __future__ import annotations

import logging
import signal
from types import FrameType

import pytest

from lockkit.testing.interrupts import must_wait


def test_signal_within_logging_is_told_from_others() -> None:
    """A handler's lock that stays taken would hang every other thread that logs."""
    seen: list[bool] = []

    class Handler(logging.Handler):
        def createLock(self) -> None:  # noqa: N802 - logging's
            self.lock = None

        def acquire(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, lambda _, frame: seen.append(must_wait(frame)))
    try:
        with pytest.raises(NotImplementedError):  # by emit, after the lock was taken
            Handler().handle(logging.makeLogRecord({}))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [True]


def test_signal_within_a_destructor_is_told_from_others() -> None:
    """Also in a function that it calls, and in one that has another name."""
    seen: list[bool] = []

    def note(_: int, frame: FrameType | None) -> None:
        seen.append(must_wait(frame))

    def send() -> None:
        signal.raise_signal(signal.SIGUSR1)

    class Dropped:
        def __del__(self) -> None:
            send()

    class Closed:
        def close(self) -> None:
            send()

        __del__ = close

        def use(self) -> None:
            send()

    former = signal.signal(signal.SIGUSR1, note)
    try:
        Dropped()
        send()
        Closed()
        Closed().use()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [True, False, True, False, True]
