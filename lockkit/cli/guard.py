"""
A second process that ends the command when ``lockkit run`` itself cannot.

=============================================  ==========================================================
``lockkit run`` …                              the guard kills the command's process group …
=============================================  ==========================================================
is killed (SIGKILL, out of memory) or crashes  at once: renewal has ended, and on some backends the lock
is stopped (SIGSTOP, Ctrl-Z), or starved       just before the last deadline that it received
=============================================  ==========================================================

It cannot help when the whole machine, VM or container is paused, and the guard with it. Then the guard kills the
command as soon as they wake up, and only a fencing token protects what the command does in between.

The kernel's ``PR_SET_PDEATHSIG`` ends no more than the command's first process, and only on Linux (it is set too, for
the case that both processes of lockkit are killed).
"""

from __future__ import annotations

import os
import select
import signal
import struct
from contextlib import suppress
from math import inf
from typing import NoReturn

from lockkit.cli.output import say
from lockkit.cli.signals import LOOK_EVERY
from lockkit.runtime import monotonic
from lockkit.units import Instant

_DEADLINE = struct.Struct("d")


class Guard:
    """The guard of one process group. Before the first `tell` it does nothing."""

    def __init__(self, group: int) -> None:
        """Fork. Call it while this process has one thread."""
        self._told = -inf
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _stand(control, report, group)
        os.close(control)
        os.close(report)
        os.set_blocking(self._control, False)
        os.set_blocking(self._report, False)

    def tell(self, deadline: Instant) -> None:
        """
        Have the group killed at `deadline` (client monotonic time) or when this process ends, until told otherwise.

        From the first call on; cheap when the deadline has not moved.
        """
        if self._control < 0:
            return
        # Computed from the time left, the same deadline differs by microseconds from one look to the next.
        if deadline <= self._told + 0.001:
            return
        self._told = deadline
        try:
            os.write(self._control, _DEADLINE.pack(deadline))
        except BlockingIOError:
            self._told = -inf  # somebody has stopped it for hours: try again at the next look
        except BrokenPipeError:
            self._told = inf
            say("the guard process was killed: if lockkit is stopped or killed too, the command keeps running")

    def killed(self) -> bool:
        """Tell whether it has killed the group, since the last call, because a deadline passed."""
        if self._control < 0:
            return False
        try:
            return bool(os.read(self._report, 1))
        except BlockingIOError:
            return False

    def dismiss(self) -> None:
        """End it without harm to the group. May be called twice."""
        if self._control < 0:
            return
        # Killed, not asked: it then ends even if somebody has stopped it.
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._control)
        os.close(self._report)
        self._control = -1


def _stand(control: int, report: int, group: int) -> NoReturn:
    """Be the guard, in the child."""
    try:
        _detach(control, report)
        if _watch(control, report, group):
            _kill(group)
    finally:
        os._exit(0)


def _detach(*pipes: int) -> None:
    """Keep nothing but these: no terminal, no files of the caller, no signals meant for lockkit or its command."""
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    start = 3
    for fd in sorted(pipes):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _watch(control: int, report: int, group: int) -> bool:
    """Kill at the deadline; True when lockkit has ended and the group is to go too."""
    deadline = inf
    armed = False
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        left = max(0.0, deadline - monotonic())
        # A message first: lockkit may have renewed in time, and this process have slept.
        if poll.poll(int(min(left, LOOK_EVERY) * 1000) + 1 if left < inf else None):
            message = os.read(control, 4096)
            if not message:
                return armed
            (deadline,) = _DEADLINE.unpack(message[-_DEADLINE.size :])
            armed = True
        elif monotonic() >= deadline:
            # Said first: lockkit may go on at this moment, and renew, before it asks how the command ended.
            with suppress(BrokenPipeError):  # or it was killed at this moment
                os.write(report, b"k")
            _kill(group)
            deadline = inf


def _kill(group: int) -> None:
    # No process is left; or the command runs as another user (sudo), which lockkit reports when it can.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
