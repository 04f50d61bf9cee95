"""Sixteen processes take pairs of three locks, in both orders: ``opposite_orders.py DIRECTORY ROUNDS URL [URL]``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import lockkit
from lockkit.testing.witness import Witness

PROCESSES = 16
NAMES = ("a", "b", "c")
TIMEOUT = 90.0


def pair(number: int) -> tuple[str, str]:
    """Return two of the names: over the processes every two, each way round."""
    pair = NAMES[number % 3], NAMES[(number + 1) % 3]
    return pair if number % 2 else pair[::-1]


def contend(directory: Path, urls: list[str], number: int, rounds: int) -> None:
    """Be inside with two locks, so often. With two URLs the locks alternate between the backends."""
    clients = [lockkit.connect(url, ttl=120) for url in urls]
    names = pair(number)
    locks = lockkit.locks([clients[NAMES.index(name) % len(clients)].lock(name) for name in names], timeout=TIMEOUT)
    for _ in range(rounds):
        with locks as leases:
            for name in names:
                Witness(directory / name).enter(str(number), leases[name].token)
            leases.check()
            for name in names:
                Witness(directory / name).leave(str(number), leases[name].token)
    for client in clients:
        client.close()


def main(directory: Path, rounds: int, urls: list[str]) -> int:
    """Fork the processes; return how many of them failed."""
    for name in NAMES:
        (directory / name).mkdir()
    for url in urls:
        lockkit.connect(url).close()  # no I/O, but what is imported now is not imported sixteen times
    pids = []
    for number in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                contend(directory, urls, number, rounds)
                status = 0
            except BaseException:  # noqa: BLE001 - nothing may run on in the copy of this program
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
