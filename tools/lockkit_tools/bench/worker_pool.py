"""The processes of one measurement, seen from the process that measures."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Self

from lockkit.testing.fork_servers import ForkServer, ForkServerGone, environment, fork_server
from lockkit.units import Seconds
from lockkit_tools.bench.parts import now_ns
from lockkit_tools.bench.subject import Subject

_START_SECONDS = 0.1
"""From the word to go to the common start: long enough for the word to reach every process."""

_COMPLAINT_LINES = 3
"""How much of what a process that ended silently had printed is shown."""


class WorkerFailed(Exception):
    """A worker process raised, ended, or did not answer in time."""


class WorkerPool:
    """
    Starts workers, and ends them at the end of the ``with``, whatever happened.

    Args:
        limit: Seconds after which a worker that has not answered has failed.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._workers: list[WorkerProcess] = []

    def start(
        self, subject: Subject, workload: str, part: Mapping[str, Any], *, ttl: Seconds, pass_fds: Sequence[int] = ()
    ) -> WorkerProcess:
        """Start a process that does its part of a workload for a subject."""
        job = {"subject": subject, "workload": workload, "part": part, "ttl": ttl, "limit": self.limit}
        # Interrupted here, a worker may be left to its fork server, which ends its workers with this process.
        worker = WorkerProcess(_fork_server(subject), self.limit, pass_fds)
        self._workers.append(worker)
        # The URL, which may hold a password, goes through the pipe: arguments can be seen by other users.
        worker.tell(job)
        return worker

    def start_together(self) -> int:
        """Wait until all workers are ready, and tell them when to begin, as ``start_ns``."""
        for worker in self._workers:
            worker.ready()
        start_ns = now_ns() + int(_START_SECONDS * 1e9)
        for worker in self._workers:
            worker.go(start_ns=start_ns)
        return start_ns

    def results(self) -> list[dict[str, Any]]:
        """Wait for the end of all workers; give their results in the order in which they were started."""
        found: dict[int, dict[str, Any]] = {}
        left: dict[object, int] = {worker.connection: index for index, worker in enumerate(self._workers)}
        deadline = time.monotonic() + self.limit
        while left:
            ready = wait(
                [self._workers[index].connection for index in left.values()], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise _silent(self.limit)
            for connection in ready:
                index = left.pop(connection)
                found[index] = self._workers[index].result()
        return [found[index] for index in range(len(self._workers))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()


class WorkerProcess:
    """One process; see `lockkit_tools.bench.worker` for what is said. Made by `WorkerPool.start`."""

    def __init__(self, fork_server: ForkServer, limit: float, pass_fds: Sequence[int]) -> None:
        self._fork_server = fork_server
        self._deadline = time.monotonic() + limit
        self._limit = limit
        self._ended = False
        self.connection, theirs = Pipe()  # on which both say it
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        # What a library prints must not get between the messages: it is a complaint.
        standard = {0: theirs.fileno(), 1: self._complaints.fileno(), 2: self._complaints.fileno()}
        try:
            self.pid = fork_server.fork(standard | {fd: fd for fd in pass_fds})
        except ForkServerGone as error:
            self._close()
            raise WorkerFailed(str(error)) from error
        finally:
            theirs.close()

    def ready(self) -> dict[str, Any]:
        """Wait until the worker is ready."""
        return self._receive("ready")

    def go(self, **data: Any) -> None:
        """Give the word to go on after `ready`."""
        self.tell({"go": data})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        try:
            self.connection.send(message)
        except BrokenPipeError:
            raise WorkerFailed(self._why_it_ended()) from None

    def result(self) -> dict[str, Any]:
        """Wait for the end."""
        return self._receive("result")

    def answers_within(self, seconds: float) -> bool:
        """Tell whether there is something to read from it within so many seconds."""
        return self.connection.poll(seconds)

    def end(self) -> None:
        """Kill the process unless it has ended, and reap it."""
        if not self._ended:
            # A process that has ended keeps its number until its fork server reaps it.
            with suppress(ProcessLookupError):  # unless that fork_server itself has ended
                os.kill(self.pid, signal.SIGKILL)
            self._reap()
        self._close()

    def _receive(self, wanted: str) -> dict[str, Any]:
        if not self.connection.poll(max(0.0, self._deadline - time.monotonic())):
            raise _silent(self._limit)
        try:
            message: dict[str, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerFailed(self._why_it_ended()) from None
        if "error" in message:
            raise WorkerFailed(message["error"])
        assert wanted in message, f"the worker said {sorted(message)} where {wanted!r} was due"
        data: dict[str, Any] = message[wanted]
        return data

    def _why_it_ended(self) -> str:
        ended = self._reap()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        said = " | ".join(lines[-_COMPLAINT_LINES:])
        return ended + (f": {said}" if said else "")

    def _reap(self) -> str:
        """Wait for its end; tell how it ended, as far as anybody knows."""
        try:
            status = self._fork_server.reap(self.pid)
        except ForkServerGone as error:
            return str(error)
        finally:
            self._ended = True
        return f"its process ended with status {status}"

    def _close(self) -> None:
        self.connection.close()
        self._complaints.close()


def _silent(limit: float) -> WorkerFailed:
    return WorkerFailed(f"no answer within {limit:g} s")


def _fork_server(subject: Subject) -> ForkServer:
    """Give where the workers of a subject come from: with its adapter and what that imports in it."""
    adapter, _, _ = subject.target.partition(":")
    return fork_server("lockkit_tools.bench.worker:main", [adapter, *subject.imports], environment())
