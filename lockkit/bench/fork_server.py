"""
The process from which workers of one kind are forked: it has imported what all of them import.

A driver takes longer to import than most turns last, and contention needs it in 16 processes at once. Here that is
done once for each kind of subject, before a turn begins. Nobody else's modules are in it, and nothing was used yet: no
connection, no thread. It answers on its standard input, a socket, one order at a time:

==============================================  =========================================================
order                                           answer
==============================================  =========================================================
``{"fork": [numbers]}``, with file descriptors  ``{"pid": …}`` of a worker that has them at these numbers
``{"reap": pid}``                               ``{"status": …}``, when that worker has ended
==============================================  =========================================================

It ends when the other end of the socket is closed. It is single-threaded, so that its children may do anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from lockkit.bench import worker
from lockkit.bench.fork_servers import ORDER_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

FDS_MAX = 16


def main() -> None:
    """Obey until nobody orders any more."""
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    for module in sys.argv[1:]:
        _import(module)
    while True:
        data, fds, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, FDS_MAX)
        if not data:
            return
        order = json.loads(data)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if not pid:
                control.close()
                _become_worker(fds, order["fork"])
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        control.sendall(json.dumps(answer).encode())


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception:  # noqa: BLE001 - its worker will try the same, and what it says is reported
        sys.modules.pop(module, None)


def _become_worker(fds: Sequence[int], numbers: Sequence[int]) -> NoReturn:
    # First out of the way of all numbers wanted: one may be where another has to go.
    spare = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, spare) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.setsid()
    worker.main()


if __name__ == "__main__":
    main()
