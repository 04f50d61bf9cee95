"""Lends the terminal to the command's process group when the command needs it, as a shell does for its jobs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """
    The controlling terminal, if there is one.

    The command starts in the background of the terminal, because lockkit may be one part of a pipeline
    (``lockkit run … | less``) whose other parts need the foreground. A command that reads from the terminal, or changes
    its mode, is stopped by the kernel with SIGTTIN or SIGTTOU; the supervisor sees that, lends, and lets it go on.

    Attributes:
        lent: The command's group has the foreground.
    """

    def __init__(self, group: int) -> None:
        """Do nothing yet. `group` is the command's."""
        self._group = group
        self.lent = False

    def lend(self) -> bool:
        """Give the foreground to the command's group. False: lockkit does not have it."""
        with _opened() as fd:
            if fd is None or os.tcgetpgrp(fd) != os.getpgrp():
                return False
            _set_foreground(fd, self._group)
            self.lent = True
            return True

    def take_back(self) -> None:
        """Take the foreground, if the command's group has it."""
        if not self.lent:
            return
        self.lent = False
        with _opened() as fd:
            if fd is not None and os.tcgetpgrp(fd) == self._group:
                _set_foreground(fd, os.getpgrp())


@contextmanager
def _opened() -> Iterator[int | None]:
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        yield None  # no controlling terminal, as under cron
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _set_foreground(fd: int, group: int) -> None:
    # From the background the call itself would stop this process with SIGTTOU (tcsetpgrp(3)).
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(fd, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
