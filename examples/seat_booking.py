"""
Four customers want a seat, and there are three. Each customer is a process; every seat is sold once.

    LOCKKIT_URL=redis://localhost:6379/0 python examples/seat_booking.py
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

SEATS = ("12A", "12B", "12C")
CUSTOMERS = ("Ada", "Ben", "Cem", "Dia")


def book(client: Client, database: sqlite3.Connection, seat: str, customer: str) -> bool:
    """Sell a seat, unless somebody has it."""
    with client.lock(f"seat:{seat}", ttl=10, timeout=60) as lease:
        (owner,) = database.execute("SELECT customer FROM seats WHERE seat = ?", [seat]).fetchone()
        if owner is not None:
            return False
        # Here a payment would be made, which takes its time; then look at the clock before what cannot be undone.
        lease.check()
        # The token in the condition keeps out a holder that was paused for longer than its lease.
        sold = database.execute(
            "UPDATE seats SET customer = ?, token = ? WHERE seat = ? AND token <= ?",
            [customer, lease.token, seat, lease.token],
        )
        return sold.rowcount == 1


def shop(path: Path, customer: str, opening: Barrier) -> None:
    """Take the first seat that is to be had: one customer's process."""
    with lockkit.connect() as client, closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        opening.wait(60)
        for seat in SEATS:
            if book(client, database, seat, customer):
                print(f"{customer} has {seat}", flush=True)
                return
        print(f"{customer} goes home", flush=True)


def main() -> int:
    """Let all shop at the same time, and count what was sold."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "seats.db")
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE seats (seat TEXT PRIMARY KEY, customer TEXT, token INTEGER DEFAULT 0)")
            database.executemany("INSERT INTO seats (seat) VALUES (?)", [[seat] for seat in SEATS])

        spawn = multiprocessing.get_context("spawn")
        opening = spawn.Barrier(len(CUSTOMERS))
        shoppers = [spawn.Process(target=shop, args=(path, customer, opening)) for customer in CUSTOMERS]
        for shopper in shoppers:
            shopper.start()
        for shopper in shoppers:
            shopper.join()

        with closing(sqlite3.connect(path)) as database:
            (sold,) = database.execute("SELECT count(customer) FROM seats").fetchone()
    print(f"{sold} of {len(SEATS)} seats sold")
    return 0 if sold == len(SEATS) and not any(shopper.exitcode for shopper in shoppers) else 1


if __name__ == "__main__":
    sys.exit(main())
