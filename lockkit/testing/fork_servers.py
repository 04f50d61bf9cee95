"""The processes from which workers are forked, seen from the one that uses them: see `lockkit.testing.fork_server`."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockkit.units import Seconds

__all__ = ["ForkServer", "ForkServerGone", "close_all", "environment", "fork_server"]

ANSWER_SECONDS = 120.0
"""An order is answered at once, but for imports on a busy machine."""

_END_SECONDS = 5.0
_CHUNK_BYTES = 4096


class ForkServerGone(Exception):
    """A fork server does not answer any more."""


class ForkServer:
    """
    The end of the process that uses it. May be used by several threads.

    Args:
        main: ``module:function`` of what each worker runs.
        modules: What is imported beforehand.
        environment: Of the process and its workers.
        loads: Whether `load` does anything.
    """

    def __init__(
        self, main: str, modules: Sequence[str], environment: Mapping[str, str], *, loads: bool = True
    ) -> None:
        self._gone = False
        self._lock = threading.Lock()
        self._loads = loads
        self._threads = 1
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockkit.testing.fork_server", str(theirs.fileno()), main, *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C on the terminal is for the process that uses it.
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
        pid: int = self._order({"fork": list(fds)}, list(fds.values()))["pid"]
        return pid

    def until_stopped(self, pid: int) -> int | None:
        """
        Wait until a worker that was sent SIGSTOP stands still.

        Returns:
            None; the exit status, as from `reap`, if it had ended instead.

        Raises:
            ForkServerGone: There is no answer.
        """
        status: int | None = self._order({"stopped": pid})["status"]
        return status

    def reap(self, pid: int, seconds: Seconds | None = None) -> int | None:
        """
        Wait until a worker has ended.

        Args:
            pid: Of the worker, which was not reaped yet.
            seconds: How long at most. None: until the worker ends.

        Returns:
            Its exit status, negative if a signal ended it; None if it has not ended.

        Raises:
            ForkServerGone: There is no answer.
        """
        status: int | None = self._order({"reap": pid, "seconds": seconds})["status"]
        return status

    @property
    def spoilt(self) -> bool:
        """Whether an import started a thread: then a fork would be a copy of half a program."""
        return self._threads > 1

    def load(self, modules: Sequence[str]) -> None:
        """
        Have modules imported before the next workers are forked. What cannot be imported is left to them.

        Raises:
            ForkServerGone: There is no answer.
        """
        if self._loads and modules:
            self._threads = self._order({"import": list(modules)})["threads"]

    def close(self) -> None:
        """End it, and the workers that have not ended."""
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _order(self, order: Mapping[str, object], fds: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                return self._exchange(json.dumps(order).encode() + b"\n", fds)
            except OSError as error:
                self._gone = True
                message = f"the process that starts workers does not answer: {error}"
                raise ForkServerGone(message) from error
            except BaseException:
                # Interrupted: an answer that nobody waited for would be taken for that to the next order.
                self._gone = True
                raise

    def _exchange(self, order: bytes, fds: Sequence[int]) -> dict[str, Any]:
        if self._gone:
            message = "the process that starts workers is gone"
            raise ForkServerGone(message)
        # With descriptors, an order is short enough to go in one piece.
        if fds:
            socket.send_fds(self._socket, [order], fds)
        else:
            self._socket.sendall(order)
        answer = b""
        while not answer.endswith(b"\n"):
            piece = self._socket.recv(_CHUNK_BYTES)
            if not piece:
                message = "the process that starts workers has ended"
                raise ForkServerGone(message)
            answer += piece
        found: dict[str, Any] = json.loads(answer)
        return found


_open: dict[tuple[int, tuple[str, ...]], ForkServer] = {}
"""By process, because a fork of this one must not speak on its sockets."""

_spoilt: list[tuple[int, ForkServer]] = []
"""Not forked from any more, but their workers may still be there."""


_starting = threading.Lock()
"""Two threads that want the same one must not start two: nobody would end the first."""


def _forked() -> None:
    global _starting  # noqa: PLW0603 - another thread of the parent may have had it
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def fork_server(main: str, modules: Sequence[str], environment: Mapping[str, str], kind: str = "") -> ForkServer:
    """
    Give the one whose workers run and import so much, and start it if there is none.

    Args:
        main: ``module:function`` of what each worker runs.
        modules: What is imported beforehand.
        environment: Of the process, if it is started now.
        kind: Keeps those apart that are to import different modules later (`ForkServer.load`).
    """
    key = os.getpid(), (kind, main, *modules)
    loads = True
    with _starting:
        if (known := _open.get(key)) is not None:
            if known.alive and not known.spoilt:
                return known
            if known.spoilt:
                _spoilt.append((os.getpid(), known))
                loads = False
            else:
                known.close()
        _open[key] = ForkServer(main, modules, environment, loads=loads)
        return _open[key]


@atexit.register
def close_all() -> None:
    """End all of this process."""
    mine = os.getpid()
    for key in [key for key in _open if key[0] == mine]:
        _open.pop(key).close()
    for _, server in [entry for entry in _spoilt if entry[0] == mine]:
        server.close()
    _spoilt.clear()


def environment() -> dict[str, str]:
    """Give an environment in which Python finds the same modules as here, in whatever way they were found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
