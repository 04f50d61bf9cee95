"""
What lockkit works around in grpcio: private parts that it reaches into, and behavior that no documentation promises.

Seen with grpcio 1.80 to 1.85. Each entry names the test that fails without it; when a new grpcio makes an entry
unnecessary or ineffective, that test is where to look first.

lockkit leaves the environment variable ``GRPC_ENABLE_FORK_SUPPORT`` alone. A child of a program that forks works
without it; with ``1``, the fork of a program hangs while another of its threads keeps locking (grpcio 1.85.1).
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any
from weakref import ref

from lockkit.runtime import let_go

if TYPE_CHECKING:
    import grpc


class WallClockTimeout(float):
    """
    A timeout for a call, seconds, that does not depend on ``time.time``.

    grpc's Python part adds the timeout to ``time.time()``, and its C core subtracts the system clock. Where the two
    differ (freezegun in an application's tests) every call would time out at once, or never.

    Relies on: grpc computes ``time.time() + timeout`` with the object that it was given.
    Fails without it: test_wall_clock_decides_nothing_at_the_client, of the conformance suite
    """

    __slots__ = ()

    def __radd__(self, now: float) -> float:
        """Take the place of ``time.time() + timeout``."""
        del now
        return time.clock_gettime(time.CLOCK_REALTIME) + float(self)


def free_locks(channel: Any) -> None:  # noqa: ANN401 - a grpc.Channel
    """
    Free those locks of a channel that an interrupted call has left taken.

    A signal handler that raises (Ctrl-C) may strike after ``Condition.__enter__`` has taken a lock and before the
    ``with`` has begun that would free it (the remainder of grpc/grpc#19973). Then every other thread that uses the
    channel hangs: renewals, and the thread that closes it.

    Relies on: a ``grpc.Channel`` has its C part in ``_channel``, also below interceptors, and the C part shows the
    state that holds the lock to the garbage collector. Where this changes, nothing is freed.
    Fails without it: tests/backends/test_interrupts.py
    """
    while (inner := getattr(channel, "_channel", None)) is not None:
        channel = inner
    for state in gc.get_referents(channel):
        for lock in gc.get_referents(state):
            if isinstance(lock, threading.Condition):
                let_go(lock)


def target_of(channel: grpc.Channel | grpc.aio.Channel) -> str:
    """
    Give the address that a channel leads to, or "channel" if it doesn't tell.

    Relies on: the C part of a channel, in ``_channel``, has ``target()``. The public interface has nothing like it.
    Fails without it: TestForeignClients.test_channel_and_clients_of_others_are_used
    """
    target = getattr(getattr(channel, "_channel", None), "target", None)
    if not callable(target):
        return "channel"
    found = target()
    text = found.decode() if isinstance(found, bytes) else str(found)
    return text.rpartition("/")[2].removeprefix("ipv4:").removeprefix("ipv6:").replace("%5B", "[").replace("%5D", "]")


# grpc.aio has one poller thread for the whole process. It doesn't exist in a forked child, and cannot be started again
# there. So a child of a process that used grpc.aio uses the blocking API, and neither uses nor collects the channels
# that it inherited: closing one waits for the missing thread.
# Fails without it: test_forked_child_owns_nothing, of the conformance suite
_aio_channels: list[ref[Any]] = []
_kept_for_children: list[list[Any]] = []
_aio_used = False
_aio_unusable = False


def keep_in_children(channel: Any) -> None:  # noqa: ANN401 - a grpc.aio.Channel
    """Have a forked child never collect a channel of grpc.aio."""
    global _aio_used  # noqa: PLW0603 - of the process, as the poller thread is
    _aio_used = True
    if not any(one() is channel for one in tuple(_aio_channels)):
        _aio_channels.append(ref(channel, _aio_channels.remove))


def aio_is_unusable() -> bool:
    """Whether this process was forked from one that had used grpc.aio."""
    return _aio_unusable


def _before_fork() -> None:
    # Before, as other functions that run in the child first drop the clients.
    _kept_for_children.append([channel() for channel in tuple(_aio_channels)])


def _after_fork_in_parent() -> None:
    _kept_for_children.pop()


def _after_fork() -> None:
    global _aio_unusable  # noqa: PLW0603 - as above
    _aio_unusable = _aio_used


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
