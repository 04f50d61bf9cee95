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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import lockkit
from lockkit.cli.status import status_of
from lockkit.errors import LockError
from lockkit.sync import Lease, Lock

LOCK_NAME = "lockkit-demo"

WAIT_MAX = 60.0
"""Seconds that a seller waits for the lock. If the backend is silent for longer, the demo ends."""

THINK_MIN, THINK_MAX = 0.002, 0.008
"""Seconds between reading and writing. A longer pause makes double sales more likely and the demo slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The orders for a seller."""

    directory: str  # where the box office keeps its files
    seller: int  # its number, from 0
    seats: int  # how many there are at first
    locked: bool  # sell under the lock
    url: str | None  # backend, or None
    profile: str | None  # profile, or None


@dataclass(frozen=True, slots=True)
class Sale:
    """One ticket."""

    seat: int  # its number, from 1
    seller: int  # who sold it
    token: int | None  # the fencing token of the lease under which it was sold, or None


Failure = tuple[int, str]
"""An exit status, and why a seller failed."""


class BoxOffice:
    """Two plain files in a directory: how many seats are left, and a line for each ticket sold."""

    def __init__(self, directory: Path) -> None:
        self._left = directory / "seats-left"
        self._ledger = directory / "tickets.jsonl"

    def open(self, seats: int) -> None:
        """Begin with that many seats, and no ticket."""
        self._left.write_text(f"{seats:09d}\n")
        self._ledger.write_text("")

    def left(self) -> int:
        return int(self._left.read_text())

    def sell(self, left: int, seats: int, seller: int, token: int | None) -> None:
        """Sell the next seat, where `left` were left."""
        line = json.dumps({"seat": seats - left + 1, "seller": seller, "token": token}) + "\n"
        # In place and of fixed width, so that the race is between processes and not between half-written files.
        _write(self._left, f"{left - 1:09d}\n", 0)
        # One write to a file opened for appending: tickets are never lost, whoever writes.
        _write(self._ledger, line, os.O_APPEND)

    def sales(self, offset: int = 0) -> tuple[list[Sale], int]:
        """Read the tickets from `offset` (bytes) on; gives them, and the next offset."""
        with self._ledger.open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        return [Sale(**json.loads(line)) for line in whole.splitlines()], offset + len(whole)


def _write(path: Path, text: str, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | flags)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _sell_one(office: BoxOffice, plan: Plan, lease: Lease | None) -> bool:
    """Read, think, write. False: sold out."""
    left = office.left()
    if left == 0:
        return False
    time.sleep(random.uniform(THINK_MIN, THINK_MAX))  # noqa: S311 - a customer's mind, no secret
    if lease is not None:
        lease.check()
    office.sell(left, plan.seats, plan.seller, None if lease is None else lease.token)
    return True


def _sell(office: BoxOffice, plan: Plan, lock: Lock | None) -> None:
    # At most all seats: without a lock a slow seller may write the number up again, time after time.
    for _ in range(plan.seats):
        guard: AbstractContextManager[Lease | None] = nullcontext() if lock is None else lock
        with guard as lease:
            if not _sell_one(office, plan, lease):
                return


def sell(plan: Plan, ready: Barrier, failures: SimpleQueue[Failure]) -> None:
    """Be a seller, in a process of its own: connect, wait for the others, and sell."""
    office = BoxOffice(Path(plan.directory))
    try:
        with lockkit.connect(plan.url, profile=plan.profile) as client:
            lock: Any = None
            if plan.locked:
                client.ping()
                lock = client.lock(LOCK_NAME, timeout=WAIT_MAX, metadata=f"seller {plan.seller} of lockkit demo")
            ready.wait(WAIT_MAX)
            _sell(office, plan, lock)
    except BrokenBarrierError:
        return  # another one has failed
    except LockError as problem:
        failures.put((status_of(problem), str(problem)))
        ready.abort()
