"""
Another process that uses locks, told by lines on its standard input what to do, and answering each with a line.

======================= ================================================================
``acquire NAME TTL``    waits for the lock; ``granted TOKEN``
``attempt NAME TTL``    tries once; ``granted TOKEN`` or ``busy``
``release NAME``        ``released`` or ``lost``
``fork``                leaves a child that sleeps; ``forked PID``
======================= ================================================================
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import lockkit

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).parents[3]


class Peer:
    """The process, seen from the test."""

    def __init__(self, url: str) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def tell(self, command: str) -> None:
        """Send a command without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        """Wait for an answer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def ask(self, command: str) -> list[str]:
        """Send a command and wait for its answer."""
        self.tell(command)
        return self.answer()

    def kill(self) -> None:
        """End it without giving it a chance."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        """Start with the first word."""
        assert self.answer() == ["ready"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def serve(url: str) -> None:
    """Do what the test says."""
    client = lockkit.connect(url)
    leases: dict[str, lockkit.Lease] = {}
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        print(_obey(client, leases, *line.split()), flush=True)  # noqa: T201


def _obey(client: lockkit.Client, leases: dict[str, lockkit.Lease], command: str, name: str = "", ttl: str = "") -> str:
    if command in {"acquire", "attempt"}:
        lease = client.lock(name, ttl=float(ttl)).try_acquire(None if command == "acquire" else 0)
        if lease is None:
            return "busy"
        leases[name] = lease
        return f"granted {lease.token}"
    if command == "release":
        try:
            leases.pop(name).release()
        except lockkit.LockLost:
            return "lost"
        return "released"
    assert command == "fork"
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(600)
    return f"forked {pid}"


if __name__ == "__main__":
    serve(sys.argv[1])
