"""
Sells seats on four worker processes: ``uvicorn seats:app --workers 4``.

Each seat is sold once, whichever worker is asked; a payment that is repeated with its ``Idempotency-Key`` is made once;
and one of the workers gives back seats that nobody has paid for. Locks are files of this user unless ``LOCKKIT_URL``
says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, HTTPException

from lockkit.integrations.fastapi import IdempotencyMiddleware, Lease, lifespan, locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractContextManager

    from lockkit.aio import Term

DATABASE = os.environ.get("SEATS_DATABASE", "seats.db")
RESERVED_SECONDS = 600

TABLES = """
CREATE TABLE IF NOT EXISTS seats (
    seat TEXT PRIMARY KEY, customer TEXT, reserved REAL, paid INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS payments (seat TEXT, customer TEXT);
CREATE TABLE IF NOT EXISTS leaders (term INTEGER PRIMARY KEY, pid INTEGER);
"""


def database() -> AbstractContextManager[sqlite3.Connection]:
    """Open the database; each statement is a transaction."""
    return closing(sqlite3.connect(DATABASE, isolation_level=None, timeout=30))


async def give_back(term: Term) -> None:
    """Free seats that were reserved and not paid for. Runs in one of the workers."""
    with database() as sql:
        sql.execute("INSERT INTO leaders VALUES (?, ?)", (term.token, os.getpid()))
        while True:
            sql.execute("DELETE FROM seats WHERE NOT paid AND reserved < ?", (time.time() - RESERVED_SECONDS,))
            await asyncio.sleep(0.2)


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """Make the tables, and connect."""
    with database() as sql:
        sql.executescript(TABLES)
    async with lifespan(leading={"give-back": give_back})(app) as state:
        yield state


app = FastAPI(lifespan=run)
# Nobody logs in here. An application with accounts returns what stands for one, such as the Authorization header.
app.add_middleware(IdempotencyMiddleware, caller=lambda request: request.query_params.get("customer", ""))

Seat = Annotated[Lease, locked("seat:{seat}", timeout=5)]


@app.post("/seats/{seat}/reservation", status_code=201)
async def reserve(seat: str, customer: str, lease: Seat) -> dict[str, str | int]:
    """Reserve a seat that is free."""
    with database() as sql:
        found = sql.execute("SELECT customer FROM seats WHERE seat = ?", (seat,)).fetchone()
        if found is not None and found[0] != customer:
            raise HTTPException(410, f"{seat} is taken")
        await asyncio.sleep(0.05)  # the customer's history, the price, another service ...
        # A holder that was paused for longer than its lease comes with an older token, and changes nothing.
        changed = sql.execute(
            "INSERT INTO seats (seat, customer, reserved, fence) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (seat) DO UPDATE SET fence = excluded.fence "
            "WHERE fence <= excluded.fence AND customer = excluded.customer",
            (seat, customer, time.time(), lease.token),
        ).rowcount
    if not changed:
        raise HTTPException(410, f"{seat} is taken")
    return {"seat": seat, "customer": customer, "token": lease.token}


@app.post("/seats/{seat}/payment", status_code=201)
async def pay(seat: str, customer: str, lease: Seat) -> dict[str, str]:
    """Pay for a seat that is reserved."""
    with database() as sql:
        paid = sql.execute(
            "UPDATE seats SET paid = 1, fence = ? WHERE seat = ? AND customer = ? AND fence <= ?",
            (lease.token, seat, customer, lease.token),
        ).rowcount
        if not paid:
            raise HTTPException(410, f"{seat} is not reserved for {customer}")
        sql.execute("INSERT INTO payments VALUES (?, ?)", (seat, customer))
    return {"seat": seat, "receipt": f"{customer} paid for {seat}"}


@app.get("/seats")
async def seats() -> dict[str, str]:
    """Show who has which seat."""
    with database() as sql:
        return dict(sql.execute("SELECT seat, customer FROM seats").fetchall())
