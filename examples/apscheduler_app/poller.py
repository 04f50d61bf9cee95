"""
Three processes of an application, each with an APScheduler: one of them polls.

``python poller.py`` starts them, kills the one that leads, shows that another one goes on, and ends. It needs no
server: locks are files in ``var/``, unless ``LOCKKIT_URL`` names a better place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from apscheduler.schedulers.blocking import BlockingScheduler

import lockkit
from lockkit.integrations.apscheduler import leader_only

VAR = Path("var").absolute()
LOCKS = os.environ.get("LOCKKIT_URL", f"file://{VAR}/locks")
JOURNAL = VAR / "journal"
PATIENCE = 120.0


def poll() -> None:
    """What only one process may do."""
    with JOURNAL.open("a") as journal:
        journal.write(f"{os.getpid()}\n")


def serve() -> int:
    """Run one process of the application."""
    with lockkit.connect(LOCKS) as client:
        scheduler = BlockingScheduler()
        scheduler.add_job(poll, "interval", seconds=0.2)
        leader_only(scheduler, client, "poller", ttl=2)
        scheduler.start()
    return 0


def polls() -> list[int]:
    """Which process polled, in order."""
    return [int(line) for line in JOURNAL.read_text().splitlines()] if JOURNAL.exists() else []


def polled(*, not_by: int | None = None) -> int:
    """Wait until a process has polled three times in a row; return it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        last = polls()[-3:]
        if len(last) == 3 and len(set(last)) == 1 and last[0] != not_by:
            return last[0]
        time.sleep(0.05)
    raise TimeoutError


def main() -> int:
    """Run three processes, and kill the leader."""
    VAR.mkdir(exist_ok=True)
    JOURNAL.unlink(missing_ok=True)
    processes = {}
    for _ in range(3):
        process = subprocess.Popen([sys.executable, __file__, "serve"])
        processes[process.pid] = process
    try:
        first = polled()
        processes[first].kill()
        second = polled(not_by=first)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

    print(f"{len(processes)} processes; the one that polled was killed; another one polls: {second != first}")
    return 0 if {first, second} <= set(processes) else 1


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else main())
