"""Where a signal handler of a test must not raise."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from lockkit.testing.interrupts import is_destructor

if TYPE_CHECKING:
    from types import FrameType


def test_signal_within_a_destructor_is_told_from_others() -> None:
    """Also in a function that it calls."""
    seen: list[bool] = []

    def note(_: int, frame: FrameType | None) -> None:
        seen.append(is_destructor(frame))

    def send() -> None:
        signal.raise_signal(signal.SIGUSR1)

    class Dropped:
        def __del__(self) -> None:
            send()

    former = signal.signal(signal.SIGUSR1, note)
    try:
        Dropped()
        send()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [True, False]
