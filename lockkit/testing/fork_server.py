"""
The process from which workers of one kind are forked: it has imported what all of them import.

A driver takes longer to import than most workers live, and contention needs it in 16 processes at once. Here that is
done once for each kind. Nobody else's modules are in it, and nothing was used yet: no connection, no thread. It obeys
`lockkit.testing.fork_servers`, one order (a line of JSON on a socket) at a time:

==============================================  =========================================================
order                                           answer
==============================================  =========================================================
``{"fork": [numbers]}``, with file descriptors  ``{"pid": …}`` of a worker that has them at these numbers
``{"stopped": pid}``                            ``{"status": …}``, when that worker stands still or ended
``{"reap": pid, "seconds": …}``                 ``{"status": …}``, when that worker has ended
``{"import": [modules]}``                       ``{"threads": …}``, how many this process has then
==============================================  =========================================================

A status is null for a worker that has not ended. When the other end of the socket is closed, this process ends, and so
do all its workers. It is single-threaded, so that they may do anything.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["FDS_MAX", "main"]

FDS_MAX = 16
_CHUNK_BYTES = 65536
_TASKS = Path("/proc/self/task")


def main() -> object:
    """
    Obey until nobody orders any more; in a worker, give back what its function returned.

    Arguments: the socket's descriptor, ``module:function`` of what a worker runs, and the modules to import.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    module, _, function = sys.argv[2].partition(":")
    run: Callable[[], object] = getattr(import_module(module), function)
    _import(sys.argv[3:])
    if _obey(control):
        return None
    return run()


def _obey(control: socket.socket) -> bool:
    """Carry out orders. Tell True when there are no more, and False in a new worker."""
    workers: set[int] = set()
    while order := _receive(control):
        what, fds = order
        if "fork" in what:
            pid = os.fork()
            if not pid:
                control.close()
                _take_over(fds, what["fork"])
                return False
            for fd in fds:
                os.close(fd)
            workers.add(pid)
            answer: dict[str, int | None] = {"pid": pid}
        elif "stopped" in what:
            answer = {"status": _wait(workers, what["stopped"], os.WUNTRACED, None)}
        elif "reap" in what:
            answer = {"status": _wait(workers, what["reap"], 0, what["seconds"])}
        else:
            _import(what["import"])
            answer = {"threads": _threads()}
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return True


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    try:
        data, fds, _, _ = socket.recv_fds(control, _CHUNK_BYTES, FDS_MAX)
        while data and not data.endswith(b"\n"):
            more = control.recv(_CHUNK_BYTES)
            if not more:
                return None
            data += more
    except ConnectionResetError:  # ended without reading the last answer
        return None
    return (json.loads(data), fds) if data else None


def _wait(workers: set[int], pid: int, options: int, seconds: float | None) -> int | None:
    """Wait until a worker has ended (or stopped, with WUNTRACED), for so many seconds at most; give its status."""
    deadline = None if seconds is None else time.monotonic() + seconds
    pause = 0.0005
    while True:
        found, status = os.waitpid(pid, options if deadline is None else options | os.WNOHANG)
        if found or (deadline is not None and time.monotonic() > deadline):
            break
        # No system call of every Unix waits for a process with a limit. As `subprocess` does it.
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    if not found or os.WIFSTOPPED(status):
        return None
    workers.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        if module not in sys.modules:
            try:
                import_module(module)
            except Exception:  # noqa: BLE001 - its worker will try the same, and what it says is reported
                sys.modules.pop(module, None)
    # The collector of a worker has nothing to do with what stands here, nor copies its memory.
    gc.collect()
    gc.freeze()


def _threads() -> int:
    """How many threads this process has; where the system does not say it, of Python's own."""
    return len(list(_TASKS.iterdir())) if _TASKS.exists() else threading.active_count()


def _take_over(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Become a worker: have the descriptors at their numbers, in a session of its own."""
    # First out of the way of all numbers wanted: one may be where another has to go.
    spare = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, spare) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.setsid()


if __name__ == "__main__":
    # A worker that comes out here ends as a program does whose main function has returned; what its function gave back
    # is referenced until the interpreter exits.
    kept = main()
