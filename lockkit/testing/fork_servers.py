"""
Processes from which workers are forked: each has imported what all workers of its kind import.

A driver takes longer to import than most workers live, and contention needs it in 16 processes at once. Here that is
done once for each kind. Nobody else's modules are in a fork server, and nothing was used yet: no connection, no thread.
It is single-threaded, so that workers may do anything. `multiprocessing` has one fork server for each process, which
passes on neither descriptors nor the stop of a child. This one obeys one order at a time, on a pipe:

===========================================  ============================================================
order                                        answer
===========================================  ============================================================
``fork``, numbers; and as many descriptors   the process id of a worker that has them at these numbers
``stopped``, process id                      the status, when that worker stands still or ended
``reap``, process id, seconds or None        the status, when that worker has ended
``load``, modules                            how many threads the fork server has when it has imported them
===========================================  ============================================================

A status is None for a worker that has not ended. When the other end of the pipe is closed, the fork server ends, and so
do all its workers.

The first half of this module is for those who use fork servers, the second half is what a fork server runs.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockkit.units import Seconds

ANSWER_SECONDS = 120.0
"""An order is answered at once, but for imports on a busy machine."""

_END_SECONDS = 5.0
_TASKS = Path("/proc/self/task")


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
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockkit.testing.fork_servers", str(theirs.fileno()), main, *modules],
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
        """Start a worker; give its process id, which stays its own until it is reaped."""
        pid: int = self._order("fork", list(fds), fds=list(fds.values()))
        return pid

    def until_stopped(self, pid: int) -> int | None:
        """Wait until a worker that was sent SIGSTOP stands still; its exit status if it had ended instead."""
        status: int | None = self._order("stopped", pid)
        return status

    def reap(self, pid: int, seconds: Seconds | None = None) -> int | None:
        """Wait until a worker has ended; its exit status (negative: of a signal), None if it has not in `seconds`."""
        status: int | None = self._order("reap", pid, seconds)
        return status

    @property
    def spoilt(self) -> bool:
        """Whether an import started a thread: then a fork would be a copy of half a program."""
        return self._threads > 1

    def load(self, modules: Sequence[str]) -> None:
        """Have modules imported before the next workers are forked. What cannot be imported is left to them."""
        if self._loads and modules:
            self._threads = self._order("load", list(modules))

    def close(self) -> None:
        """End it, and the workers that have not ended."""
        self._pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _order(self, *order: object, fds: list[int] | None = None) -> Any:  # noqa: ANN401 - depends on the order
        with self._lock:
            if self._gone:
                raise ForkServerGone("the process that starts workers is gone")
            try:
                self._pipe.send(order)
                if fds:
                    with socket.socket(fileno=os.dup(self._pipe.fileno())) as passing:
                        reduction.sendfds(passing, fds)
                if not self._pipe.poll(ANSWER_SECONDS):
                    raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")  # noqa: TRY301 - as any other failure
                return self._pipe.recv()
            except BaseException as error:
                # Also if interrupted: an answer that nobody waited for would be taken for that to the next order.
                self._gone = True
                if not isinstance(error, OSError | EOFError):
                    raise
                message = f"the process that starts workers does not answer: {str(error) or 'it has ended'}"
                raise ForkServerGone(message) from error


_open: dict[tuple[int, str, str, *tuple[str, ...]], list[ForkServer]] = {}
"""By process, because a fork of this one must not speak on its sockets. The last of each is in use; those before it
are spoilt, but their workers may still be there."""

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
    with _starting:
        servers = _open.setdefault((os.getpid(), kind, main, *modules), [])
        if servers and not servers[-1].alive:
            servers.pop().close()
        if not servers or servers[-1].spoilt:
            servers.append(ForkServer(main, modules, environment, loads=not servers))
        return servers[-1]


@atexit.register
def close_all() -> None:
    """End all of this process."""
    for key in [key for key in _open if key[0] == os.getpid()]:
        for server in _open.pop(key):
            server.close()


def environment() -> dict[str, str]:
    """Give an environment in which Python finds the same modules as here, in whatever way they were found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# -- in a fork server --------------------------------------------------------------------------------------------------


def _main() -> object:
    """
    Obey until nobody orders any more; in a worker, give back what its function returned.

    Arguments: the pipe's descriptor, ``module:function`` of what a worker runs, and the modules to import.
    """
    control = Connection(int(sys.argv[1]))
    module, _, function = sys.argv[2].partition(":")
    run = getattr(import_module(module), function)
    _load(sys.argv[3:])
    workers: set[int] = set()
    numbers: list[int] = []
    fds: list[int] = []
    try:
        while True:
            what, *given = control.recv()
            if what == "fork":
                (numbers,) = given
                with socket.socket(fileno=os.dup(control.fileno())) as passing:
                    fds = reduction.recvfds(passing, len(numbers))
                pid = os.fork()
                if not pid:
                    break
                for fd in fds:
                    os.close(fd)
                workers.add(pid)
                control.send(pid)
            elif what == "load":
                control.send(_load(*given))
            else:
                control.send(_wait(workers, *given, stopped=what == "stopped"))
    except (EOFError, ConnectionResetError):  # the latter: ended without reading the last answer
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None
    control.close()
    _take_over(fds, numbers)
    return run()


def _wait(workers: set[int], pid: int, seconds: float | None = None, *, stopped: bool) -> int | None:
    """Wait until a worker has ended (or stopped), for so many seconds at most; give its status."""
    options = os.WUNTRACED if stopped else 0
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


def _load(modules: Sequence[str]) -> int:
    """Import modules; tell how many threads this process has then (where the system does not, of Python's own)."""
    for module in modules:
        if module not in sys.modules:
            try:
                import_module(module)
            except Exception:  # noqa: BLE001 - its worker will try the same, and what it says is reported
                sys.modules.pop(module, None)
    # The collector of a worker has nothing to do with what stands here, nor copies its memory.
    gc.collect()
    gc.freeze()
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
    kept = _main()
