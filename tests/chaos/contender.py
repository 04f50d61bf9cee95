"""
One client process of a chaos run: contends for a few locks until it is stopped.

Started by `tests.chaos.run`, which sends a `Part` through the standard input.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import sys
import time
import traceback
from dataclasses import dataclass

from lockkit import aio
from lockkit.errors import BackendUnavailable, LockLost, LockTimeout
from lockkit.testing.face_driver import DRIVERS, FaceDriver
from lockkit.testing.target import Face, Target
from tests.chaos.journal import Journal, now

LANES = 2
"""Threads or tasks of a process that contend at the same time, through one client."""

STEP_SECONDS = 0.004
"""Time between two looks of a holder at its lease."""

RELAY = "chaos:relay"
RELAY_TTL, RELAY_STAY_MAX = 20.0, 6.0
"""The lock that a `Relay` passes back and forth, its ttl, and how long it is held at most, seconds. So a waiter that
nobody wakes is late by many seconds: the rest of the ttl."""


@dataclass(frozen=True, slots=True)
class Part:
    """
    What a contender is to do.

    Attributes:
        target: What it connects to.
        face: Its API.
        names: The locks.
        ttls: It takes one of them each time.
        journal: Path of the witness's file.
        stop: It ends when there is a file of this name.
        seed: Of its choices.
        relay: Be a `Relay`.
    """

    target: Target
    face: Face
    names: tuple[str, ...]
    ttls: tuple[float, ...]
    journal: str
    stop: str
    seed: int
    relay: bool = False


class Contender:
    """Works with one client in `LANES` lanes."""

    def __init__(self, part: Part, driver: FaceDriver) -> None:
        self._part = part
        self._stage = driver
        self._client = driver.make_client()
        self._journal = Journal(part.journal)
        self._parent = os.getppid()

    async def work(self) -> None:
        """Contend until told to stop."""
        lanes = [self._stage.spawn(self._lane(number)) for number in range(LANES)]
        for lane in lanes:
            await lane.result(1e6)
        await self._client.close()

    async def _lane(self, number: int) -> None:
        choose = random.Random(self._part.seed + number)
        count = 0
        while not self._stopped():
            count += 1
            stay = f"{os.getpid()}.{number}.{count}"
            try:
                await self._stay(stay, choose)
            except LockTimeout:
                self._journal.write("said", stay, "timeout", now())
            except LockLost:
                self._journal.write("said", stay, "lost", now())
            except BackendUnavailable:
                self._journal.write("said", stay, "unavailable", now())
            except Exception:  # noqa: BLE001 - the run counts it
                self._journal.write("said", stay, "error", now())
                traceback.print_exc()
                await self._stage.sleep(0.1)

    def _stopped(self) -> bool:
        """A run that was killed cannot tell us to stop."""
        return os.getppid() != self._parent or os.path.exists(self._part.stop)  # noqa: PTH110 - some µs

    async def _stay(self, stay: str, choose: random.Random) -> None:
        ttl = choose.choice(self._part.ttls)
        # Mostly short; now and then so long that the lease must be renewed.
        seconds = choose.uniform(0, 1.5 * ttl) if choose.random() < 0.03 else choose.uniform(0, 0.03)
        lock = self._client.lock(choose.choice(self._part.names), ttl=ttl)
        self._journal.write("call", stay, lock.name, now())
        lease = await lock.acquire(choose.choice([0.0, 0.5, 3.0]))
        await self._hold(stay, lease, now() + int(seconds * 1e9))
        await lease.release()
        self._journal.write("left", stay, now())

    async def _hold(self, stay: str, lease: aio.Lease, until: int) -> None:
        line: tuple[object, ...] = ("enter", stay, lease.name, lease.token)
        while True:
            looked = now()  # before the look: see `tests.chaos.journal`
            if not lease.held:
                return
            self._journal.write(*line, looked)
            line = ("held", stay)
            if looked >= until:
                return
            await self._stage.sleep(STEP_SECONDS)


class Relay(Contender):
    """
    Passes one lock back and forth between two clients: the release of one lets the other one, which waits, have it.

    So each release must wake exactly one waiter, and no newcomer hides a wake-up that was lost.
    """

    def __init__(self, part: Part, driver: FaceDriver) -> None:
        super().__init__(part, driver)
        self._clients = self._client, driver.make_client()
        self._taken = 0

    async def work(self) -> None:
        """Hand over until told to stop."""
        await super().work()
        await self._clients[1].close()

    async def _stay(self, stay: str, choose: random.Random) -> None:
        lock = self._clients[int(stay.split(".")[1])].lock(RELAY, ttl=RELAY_TTL)
        self._journal.write("call", stay, RELAY, now())
        lease = await lock.acquire(2 * RELAY_TTL)
        self._taken = taken = self._taken + 1
        # Now and then so long that a fault begins and ends while the other one waits.
        seconds = choose.uniform(2, RELAY_STAY_MAX) if choose.random() < 0.02 else choose.uniform(0.02, 0.06)
        await self._hold(stay, lease, now() + int(seconds * 1e9))
        await lease.release()
        self._journal.write("left", stay, now())
        end = now() + int(RELAY_TTL * 1e9)
        while self._taken == taken and now() < end and not self._stopped():
            await self._stage.sleep(STEP_SECONDS)


def _sleep(seconds: float) -> None:
    """Sleep where libfaketime takes the monotonic deadline of `time.sleep` for a time of day (0.9.10)."""
    select.select([], [], [], seconds)


def main() -> None:
    """Take the part from the standard input and play it."""
    if "FAKETIME_TIMESTAMP_FILE" in os.environ:
        time.sleep = _sleep  # type: ignore[assignment] # nobody gives an index
    part: Part = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own run's
    with part.target.connect() as asked:
        driver = DRIVERS[part.face](part.target, asked.capabilities)
    driver.run_bare((Relay if part.relay else Contender)(part, driver).work())


if __name__ == "__main__":
    main()
