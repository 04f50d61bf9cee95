"""The processes from which workers are forked, seen from the process that measures: see `lockkit.bench.fork_server`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ORDER_BYTES_MAX", "ForkServer", "ForkServerGone", "close_all", "fork_server"]

ORDER_BYTES_MAX = 4096
"""An order is short; and one at a time, it needs no end mark."""

ANSWER_SECONDS = 120.0
"""An order is answered at once, but for the first, which waits for the imports on a busy machine."""


class ForkServerGone(Exception):
    """A fork_server does not answer any more."""


class ForkServer:
    """
    The end of the process that measures.

    Args:
        modules: What is imported beforehand.
        environment: Of the process and its workers.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._gone = False
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockkit.bench.fork_server", *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C on the terminal is for the process that measures.
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether it can be given orders."""
        return not self._gone and self._process.poll() is None

    def fork(self, fds: Mapping[int, int]) -> int:
        """
        Start a worker; give its process id, which stays its own until it is reaped.

        Args:
            fds: What it has open: our file descriptors by its numbers.

        Raises:
            ForkServerGone: There is no answer.
        """
        return self._order({"fork": list(fds)}, list(fds.values()))["pid"]

    def reap(self, pid: int) -> int:
        """
        Wait until a worker has ended; give its exit status, negative if a signal ended it.

        Raises:
            ForkServerGone: There is no answer.
        """
        return self._order({"reap": pid}, [])["status"]

    def close(self) -> None:
        """End it. Its workers have ended."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _order(self, order: Mapping[str, object], fds: list[int]) -> dict[str, int]:
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            answer = self._socket.recv(ORDER_BYTES_MAX)
        except OSError as error:
            self._gone = True
            message = f"the process that starts workers does not answer: {error}"
            raise ForkServerGone(message) from error
        if not answer:
            self._gone = True
            message = "the process that starts workers has ended"
            raise ForkServerGone(message)
        found: dict[str, int] = json.loads(answer)
        return found


_OPEN: dict[tuple[str, ...], ForkServer] = {}


def fork_server(modules: Sequence[str], environment: dict[str, str]) -> ForkServer:
    """Give the one whose workers import so much, and start it if there is none."""
    key = tuple(modules)
    known = _OPEN.get(key)
    if known is not None and known.alive:
        return known
    if known is not None:
        known.close()
    _OPEN[key] = ForkServer(modules, environment)
    return _OPEN[key]


def close_all() -> None:
    """End all of them."""
    while _OPEN:
        _OPEN.popitem()[1].close()
