"""
Other processes that hold locks and wait for them, to be stopped, killed and asked.

::

    with Worker(target, "blocking") as worker:
        held = worker.acquire("seat:12A", ttl=2)
        worker.stop()  # SIGSTOP: it neither renews nor notices anything
        ...
        worker.resume()
        with pytest.raises(LockLost):  # what its client raised is raised here
            worker.check(held)

The other side is `lockkit.testing._worker`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lockkit.testing.fork_servers import ForkServerGone, environment, fork_server
from lockkit.testing.target import Face, Target
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds

PIPE = 3
"""The descriptor on which a worker is told what to do."""


class WorkerFailed(Exception):
    """The process ended, did not answer in time, or raised something that is no error of lockkit's."""


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """A lease that a worker has."""

    number: int  # which of the worker's
    owner: str  # its owner id
    token: int  # its fencing token


class Worker:
    """
    A process with one client, which carries out one order after the other.

    Every method that asks it something waits for the answer for `PATIENCE` at most, and raises what the client raised
    there. `send` and `receive` are the two halves, for what is to happen while it waits.

    Args:
        target: What it connects to.
        face: Of its client.
        options: For its ``connect``.
    """

    def __init__(self, target: Target, face: Face, **options: Any) -> None:
        self._status: int | None = None
        # What a worker has imported when it is ready, the next ones of the same backend need not import.
        kind = target.backend or target.url.partition(":")[0]
        self._server = fork_server("lockkit.testing._worker:run", (), environment(), kind)
        # Not multiprocessing.Process: that would import the test's main module there, and fork it on Linux.
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - no path that could be another's
            self._pid = self._server.fork({0: nothing.fileno(), 1: 1, 2: 2, PIPE: theirs.fileno()})
        try:
            self._pipe.send(_surroundings())
            # Through the pipe: a URL may have a password, and everybody can read the arguments of a process.
            self._pipe.send((target, face, options))
            self._server.load(self.receive())
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    # -- asking ----------------------------------------------------------------------------------------------------

    def ask(self, what: str, /, timeout: Seconds = PATIENCE, **arguments: Any) -> Any:  # noqa: ANN401 - depends on `what`
        """Tell it to do something and return the answer; see `lockkit.testing._worker.Orders`."""
        self.send(what, **arguments)
        return self.receive(timeout)

    def send(self, what: str, /, **arguments: Any) -> None:
        """Tell it to do something."""
        try:
            self._pipe.send((what, arguments))
        except (BrokenPipeError, ConnectionResetError) as ended:
            raise self._ended() from ended

    def receive(self, timeout: Seconds = PATIENCE) -> Any:  # noqa: ANN401 - depends on the question
        """Wait for the next answer."""
        try:
            if not self._pipe.poll(timeout):
                raise WorkerFailed(f"process {self.pid} did not answer within {timeout:g} s")
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as ended:
            raise self._ended() from ended
        if error is not None:
            raise error if isinstance(error, BaseException) else WorkerFailed(error)
        return answer

    def _ended(self) -> WorkerFailed:
        return WorkerFailed(f"process {self.pid} ended with status {self._wait(PATIENCE)}")

    def acquire(self, name: str, *, wait: Seconds | None = PATIENCE, **options: Any) -> RemoteLease:
        """Have it acquire a lock."""
        return RemoteLease(*self.ask("acquire", name=name, wait=wait, lock=options))

    def start_acquire(self, name: str, **options: Any) -> None:
        """Have it begin to acquire a busy lock, without limit; return once it waits. `finish_acquire` is its end."""
        self.ask("start_acquire", name=name, lock=options)

    def finish_acquire(self, timeout: Seconds = PATIENCE) -> RemoteLease:
        """Wait until it has what `start_acquire` began."""
        return RemoteLease(*self.ask("finish_acquire", timeout))

    def release(self, lease: RemoteLease) -> None:
        """Have it release a lease."""
        self.ask("release", number=lease.number)

    def check(self, lease: RemoteLease) -> None:
        """Have it check a lease."""
        self.ask("check", number=lease.number)

    def is_held(self, lease: RemoteLease) -> bool:
        """Ask it whether it believes that it holds."""
        held: bool = self.ask("held", number=lease.number)
        return held

    # -- what happens to processes ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop it with SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        self._status = self._server.until_stopped(self.pid)
        if self._status is not None:
            raise WorkerFailed(f"process {self.pid} ended with status {self._status}")

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._status is None:
            # Its number stays its own until it is reaped.
            os.kill(self.pid, signal.SIGKILL)
            self._wait(None)

    def exit(self) -> int:
        """Let it end as a program does whose main function returns, its leases still held; give the exit status."""
        self.send("exit")
        status = self._wait(PATIENCE)
        if status is None:
            raise WorkerFailed(f"process {self.pid} did not end within {PATIENCE:g} s")
        return status

    def close(self) -> None:
        """Kill it if it runs. May be called twice."""
        with suppress(ForkServerGone):  # which ends its workers
            self.kill()
        self._pipe.close()

    def _wait(self, seconds: Seconds | None) -> int | None:
        if self._status is None:
            self._status = self._server.reap(self.pid, seconds)
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _surroundings() -> tuple[list[str], dict[str, str], str]:
    """Where a program that this process started now would find itself: module path, environment, directory."""
    return [entry for entry in sys.path if entry], environment(), os.getcwd()  # noqa: PTH109 - no path to work with
