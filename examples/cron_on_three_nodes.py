"""
The same crontab on three nodes. In each of three nights one of them makes the report.

    LOCKKIT_URL=redis://localhost:6379/0 python examples/cron_on_three_nodes.py
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import lockkit

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from lockkit import Client

NIGHTS = (1, 2, 3)
NODES = ("n1", "n2", "n3")


def nightly_report(client: Client, database: sqlite3.Connection, night: int, node: str) -> str:
    """Make the report of a night, unless another node does or has."""
    # Not once only: of several that come in the same moment, Redlock may refuse all when their votes split.
    lease = client.lock("nightly-report", ttl=30).try_acquire(timeout=10)
    if lease is None:
        return "another node is at it"
    with lease:
        # Who waited, or whose clock is late, comes when the report is finished and the lock free again: so the work
        # is written down with the night that it was for.
        (last,) = database.execute("SELECT night FROM last_report").fetchone()
        if last >= night:
            return "another node has done it"
        database.execute("INSERT INTO reports VALUES (?, ?)", [night, node])
        database.execute(
            "UPDATE last_report SET night = ?, token = ? WHERE token <= ?", [night, lease.token, lease.token]
        )
        return "made the report"


def node(path: Path, name: str, midnight: Barrier) -> None:
    """Be one node, with its crontab."""
    with lockkit.connect() as client, closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        for night in NIGHTS:
            midnight.wait(60)
            print(f"night {night}, {name}: {nightly_report(client, database, night, name)}", flush=True)


def main() -> int:
    """Let three nights pass, and see who has made which report."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "reports.db")
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE reports (night INTEGER, node TEXT)")
            database.execute("CREATE TABLE last_report (night INTEGER, token INTEGER)")
            database.execute("INSERT INTO last_report VALUES (0, 0)")

        spawn = multiprocessing.get_context("spawn")
        midnight = spawn.Barrier(len(NODES))
        nodes = [spawn.Process(target=node, args=(path, name, midnight)) for name in NODES]
        for process in nodes:
            process.start()
        for process in nodes:
            process.join()

        with closing(sqlite3.connect(path)) as database:
            made = [night for (night,) in database.execute("SELECT night FROM reports ORDER BY night")]
    print(f"reports made for nights {made}")
    return 0 if made == list(NIGHTS) and not any(process.exitcode for process in nodes) else 1


if __name__ == "__main__":
    sys.exit(main())
