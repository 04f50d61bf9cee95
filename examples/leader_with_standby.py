"""
One of two nodes leads. It is paused at the worst moment, the other takes over, and the first one's write is refused.

    LOCKKIT_URL=redis://localhost:6379/0 python examples/leader_with_standby.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lockkit

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Event

    from lockkit import Term

TTL = 3.0
PATIENCE = 120.0


@dataclass
class Signals:
    """What the play's director and the nodes tell each other."""

    pause: Event
    refused: Event
    stop: Event


def write(database: sqlite3.Connection, name: str, token: int) -> bool:
    """Do the leader's work, in one statement that compares tokens; False if there is a newer leader."""
    done = database.execute(
        "INSERT INTO journal SELECT ?, ? WHERE NOT EXISTS (SELECT 1 FROM journal WHERE token > ?)",
        [name, token, token],
    )
    return done.rowcount == 1


def lead(term: Term, database: sqlite3.Connection, name: str, signals: Signals) -> None:
    """Work until the term ends; the next one may begin a third of the ttl later."""
    while not (term.must_stop(0.05) or signals.stop.is_set()):
        if signals.pause.is_set():
            signals.pause.clear()
            # After the look at the term and before the write: no program can exclude this.
            os.kill(os.getpid(), signal.SIGSTOP)
            print(f"{name} goes on", flush=True)
        if not write(database, name, term.token):
            print(f"{name} was refused", flush=True)
            signals.refused.set()


def node(path: Path, name: str, signals: Signals) -> None:
    """Lead if nobody does, else stand by."""
    with lockkit.connect() as client, closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        election = client.election("leader", ttl=TTL, value=name)
        while not signals.stop.is_set():
            # The other one leads, or a term was lost: stand by again.
            with suppress(lockkit.LockTimeout, lockkit.LockLost), election.campaign(timeout=1) as term:
                print(f"{name} leads", flush=True)
                lead(term, database, name, signals)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("a node did not do what was expected")
        time.sleep(0.05)


def leaders(database: sqlite3.Connection) -> list[str]:
    """Who has written, in the order of their leads."""
    return [name for (name,) in database.execute("SELECT leader FROM journal GROUP BY token ORDER BY token")]


def main() -> int:
    """Start two nodes, pause the leader until the other leads, let it go on, and see what was written."""
    spawn = multiprocessing.get_context("spawn")
    signals = Signals(*(spawn.Event() for _ in range(3)))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal.db")
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("CREATE TABLE journal (leader TEXT, token INTEGER)")
            nodes = {name: spawn.Process(target=node, args=(path, name, signals)) for name in ("a", "b")}
            for process in nodes.values():
                process.start()
            try:
                wait_for(lambda: leaders(database))
                led = leaders(database)
                signals.pause.set()
                wait_for(lambda: not signals.pause.is_set())
                wait_for(lambda: len(leaders(database)) > len(led))
                os.kill(nodes[led[-1]].pid or 0, signal.SIGCONT)
                wait_for(signals.refused.is_set)
            finally:
                signals.stop.set()
                for process in nodes.values():
                    os.kill(process.pid or 0, signal.SIGCONT)
                    process.join()
            tokens = [token for (token,) in database.execute("SELECT token FROM journal ORDER BY rowid")]
    print(f"{led[-1]} led and was paused; after the other had written, it wrote nothing more")
    return 0 if tokens == sorted(tokens) and not any(process.exitcode for process in nodes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
