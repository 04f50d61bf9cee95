"""A wait of a command for its backend, which a signal ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lockkit.cli.guard import LOOK_EVERY
from lockkit.cli.signals import FORWARDED, Signals

T = TypeVar("T")


class Interrupted(Exception):
    """
    A signal arrived during the wait.

    Attributes:
        signum: Its number.
    """

    def __init__(self, signum: int) -> None:
        """Keep the number."""
        super().__init__(signum)
        self.signum = signum


class GaveUp(Exception):
    """The caller no longer wants what was waited for."""


def wait_in_thread(function: Callable[[], T], signals: Signals, *, gave_up: Callable[[], bool] = bool) -> T:
    """
    Call a function that waits for the backend in a thread, and wait for signals in this one.

    Interrupted: A signal came. Closing the client ends the function's wait. Catch it only after that: the exception
    keeps a lease that was granted at the same moment, which would be dropped without it, and not released.
    """
    outcome: list[T | Exception] = []

    def ask() -> None:
        try:
            outcome.append(function())
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            outcome.append(error)
        finally:
            signals.post()

    thread = threading.Thread(target=ask, name="lockkit-wait", daemon=True)
    thread.start()
    while not outcome and thread.is_alive():
        for signum in signals.wait(LOOK_EVERY):
            if signum in FORWARDED:
                raise Interrupted(signum)
        if not outcome and gave_up():
            raise GaveUp
    thread.join()
    (result,) = outcome
    if isinstance(result, Exception):
        raise result
    return result
