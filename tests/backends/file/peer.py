"""
Another process that uses locks. It reads a command per line from standard input and answers each with a line.

======================= ================================================================
``acquire NAME TTL``    waits for the lock; ``granted TOKEN``
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
from types import TracebackType
from typing import Self

import lockkit

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
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        """Wait until it is ready."""
        assert self.answer() == ["ready"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it and close its pipes."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def serve(url: str) -> None:
    """Run the commands of the test."""
    client = lockkit.connect(url)
    leases: dict[str, lockkit.Lease] = {}
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        print(_obey(client, leases, *line.split()), flush=True)  # noqa: T201


def _obey(client: lockkit.Client, leases: dict[str, lockkit.Lease], command: str, name: str = "", ttl: str = "") -> str:
    if command == "acquire":
        leases[name] = client.lock(name, ttl=float(ttl)).acquire()
        return f"granted {leases[name].token}"
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
