"""
One process of ``lockkit demo``: sells seats that are counted in a plain file.

It is wrong on purpose: it reads how many seats are left, pauses, and writes one less. Two processes that read the same
number sell the same seat. Under a lock the same code is right.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import nullcontext
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import lockkit
from lockkit.cli.status import status_of
from lockkit.errors import LockError
from lockkit.sync import Lease

LOCK_NAME = "lockkit-demo"

WAIT_MAX = 60.0
"""Seconds that a seller waits for the lock. If the backend is silent for longer, the demo ends."""

THINK_MIN, THINK_MAX = 0.002, 0.008
"""Seconds between reading and writing. A longer pause makes double sales more likely and the demo slower."""

Failure = tuple[int, str]
"""An exit status, and why a seller failed."""


class Sale(NamedTuple):
    """One ticket."""

    seat: int  # its number, from 1
    seller: int  # who sold it, from 0
    token: int | None  # the fencing token of the lease under which it was sold, or None


class BoxOffice(NamedTuple):
    """Two plain files in a directory: how many seats are left, and a line for each ticket sold."""

    directory: str
    seats: int  # how many there are at first

    @property
    def left(self) -> Path:
        return Path(self.directory, "seats-left")

    @property
    def ledger(self) -> Path:
        return Path(self.directory, "tickets.jsonl")

    def open(self) -> None:
        """Begin with all seats, and no ticket."""
        self.left.write_text(f"{self.seats:09d}\n")
        self.ledger.write_text("")

    def sell(self, seller: int, lease: Lease | None) -> bool:
        """Read, think, write. False: sold out."""
        left = int(self.left.read_text())
        if left == 0:
            return False
        time.sleep(random.uniform(THINK_MIN, THINK_MAX))  # noqa: S311 - a customer's mind, no secret
        if lease is not None:
            lease.check()
        # In place and of fixed width, so that the race is between processes and not between half-written files.
        _write(self.left, f"{left - 1:09d}\n", 0)
        # One write to a file opened for appending: tickets are never lost, whoever writes.
        sale = Sale(self.seats - left + 1, seller, None if lease is None else lease.token)
        _write(self.ledger, json.dumps(sale) + "\n", os.O_APPEND)
        return True

    def sales(self) -> list[Sale]:
        """Read the tickets."""
        return [Sale(*json.loads(line)) for line in self.ledger.read_text().splitlines()]


def _write(path: Path, text: str, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | flags)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def sell(
    office: BoxOffice, seller: int, lock_at: tuple[str | None, str | None] | None, ready: Barrier,
    failures: SimpleQueue[Failure],
) -> None:  # fmt: skip
    """Be a seller, in a process of its own: connect, unless it sells without a lock, wait for the others, and sell."""
    try:
        if lock_at is None:
            _sell(office, seller, nullcontext(), ready)
        else:
            with lockkit.connect(lock_at[0], profile=lock_at[1]) as client:
                client.ping()
                about = f"seller {seller} of lockkit demo"
                _sell(office, seller, client.lock(LOCK_NAME, timeout=WAIT_MAX, metadata=about), ready)
    except BrokenBarrierError:
        return  # another one has failed
    except LockError as problem:
        failures.put((status_of(problem), str(problem)))
        ready.abort()


def _sell(office: BoxOffice, seller: int, lock: Any, ready: Barrier) -> None:  # noqa: ANN401 - or no lock
    ready.wait(WAIT_MAX)
    # At most all seats: without a lock a slow seller may write the number up again, time after time.
    for _ in range(office.seats):
        with lock as lease:
            if not office.sell(seller, lease):
                return
