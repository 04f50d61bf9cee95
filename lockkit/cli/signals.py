"""
The events that the commands wait for: signals, wake-ups from their own threads, and answers of the backend.

Signals do not raise exceptions here. Python would notice a signal that arrives right before the main thread blocks in
a wait only when that wait ends (CPython runs handlers between instructions, and a signal cannot interrupt a wait that
has not begun). So the C handler writes the number of the signal into a pipe (``signal.set_wakeup_fd``), and the main
thread always waits on that pipe.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeVar

import typer

from lockkit.cli.status import SIGNALLED

LOOK_EVERY: Final = 1.0
"""Seconds. A wait does not count the time in which the machine was suspended; longer sees such a deadline later."""

WOKEN: Final = 0
"""Stands for "something has happened" among the numbers of signals."""

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask a process to end."""

FORWARDED: Final = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that are the command's. All of them end a process that does not expect them."""

_WHILE_RUNNING = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH, signal.SIGCHLD)


class Signals:
    """Takes the signals of this process from now on: `FORWARDED`, and after `watch_command` those of job control."""

    def __init__(self) -> None:
        self.ending: int | None = None  # one of `ENDING` that has come, SIGTERM before all others
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Inherited as ignored (some daemons do that), the end of a child would leave no status to ask for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _take(FORWARDED)

    def watch_command(self) -> None:
        """Take what concerns a running command too; until then Ctrl-Z stops this process as any other."""
        _take(_WHILE_RUNNING)

    def post(self) -> None:
        """Wake the main thread. From any thread."""
        try:
            os.write(self._write, bytes([WOKEN]))
        except BlockingIOError:
            return  # 64 KiB unread: it has enough to wake up for

    def wait(self, seconds: float, fd: int = -1) -> list[int]:
        """
        Give the signals that have come, in order, and `WOKEN`.

        Waits for them at most `seconds`, and not on once `fd`, if it is not -1, can be read.
        """
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if fd >= 0:
            poll.register(fd, select.POLLIN)
        # Rounded up: a wait that ends a little too early would make the caller's loop a busy one.
        if self._read not in dict(poll.poll(-int(-max(0.0, seconds) * 1000 // 1))):
            return []
        signals = list(os.read(self._read, 4096))
        for signum in signals:
            if signum in ENDING and self.ending != signal.SIGTERM:
                self.ending = signum
        return signals

    def forget_survived(self) -> None:
        """Forget a signal after which the command went on: a SIGHUP may mean a new configuration. Not SIGTERM."""
        if self.ending != signal.SIGTERM:
            self.ending = None


def _take(signals: Iterable[signal.Signals]) -> None:
    for signum in signals:
        # What the caller has us ignore (nohup, a shell's background jobs) is ignored by the command too.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)  # its number is in the pipe already


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """
    Have SIGTERM and SIGHUP end a command as Ctrl-C does, by a KeyboardInterrupt, so that it tidies up.

    For commands that have no `Signals`, whose handlers replace these.
    """
    came: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        del frame
        came.append(signum)
        if len(came) == 1:  # another one would cut the tidying short
            raise KeyboardInterrupt

    # Only the main thread may. SIGHUP is ignored under nohup, and stays so.
    wanted = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [signum for signum in wanted if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, interrupt)
    try:
        yield
    except (typer.Exit, typer.Abort, KeyboardInterrupt):  # of `reporting`, of a question, before the command
        if not came:
            raise
        raise typer.Exit(SIGNALLED + came[0]) from None
    finally:
        for signum in taken:
            if signal.getsignal(signum) is interrupt:
                signal.signal(signum, signal.SIG_DFL)


T = TypeVar("T")


class Interrupted(Exception):
    """A signal arrived during the wait, or the caller no longer wants what was waited for (0)."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


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
            raise Interrupted(0)
    thread.join()
    (result,) = outcome
    if isinstance(result, Exception):
        raise result
    return result
