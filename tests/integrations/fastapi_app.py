"""The application that ``tests/integrations/test_fastapi.py`` serves with uvicorn: it says in files what it does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import BackgroundTasks, Body, Depends, FastAPI, HTTPException, Response

import lockkit.aio
from lockkit.integrations.fastapi import Client, IdempotencyMiddleware, Lease, client, lifespan, locked

HOME = Path(os.environ["SEATS_HOME"])


def note(file: str, text: object) -> None:
    """Add a line to a file, as a whole."""
    with (HOME / file).open("a") as lines:
        lines.write(f"{text}\n")


async def gate(name: str) -> None:
    """Say that somebody is at a gate, and wait until it is open."""
    note(f"{name}.reached", os.getpid())
    while not (HOME / f"{name}.open").exists():  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(0.01)


async def plan(term: lockkit.aio.Term) -> None:
    """Lead until cancelled."""
    note("leaders", f"{os.getpid()} {term.token}")
    try:
        await asyncio.sleep(3600)
    finally:
        note("stopped", f"{os.getpid()} {term.token}")


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """Do something at the start, as many applications do, in every worker process."""
    async with lifespan(os.environ["SEATS_URL"], leading={"planner": plan}, ttl=6)(app) as state:
        note("startups", os.getpid())
        yield state


app = FastAPI(lifespan=run)
app.add_middleware(IdempotencyMiddleware, caller=lambda request: request.headers.get("authorization", ""))
process_lock = asyncio.Lock()


@app.post("/seats/{seat}")
async def book(seat: int, lease: Annotated[Lease, locked("seat:{seat}")], at: str) -> dict[str, int]:
    """Book a seat, at a gate."""
    await gate(at)
    note("booked", seat)
    return {"token": lease.token, "pid": os.getpid()}


@app.post("/waiting/{seat}")
async def wait(seat: int, lease: Annotated[Lease, locked("seat:{seat}", timeout=60)]) -> int:
    """Book a seat when it is free."""
    note("waited", seat)
    return lease.token


@app.post("/thread/{seat}")
def book_in_thread(seat: int, lease: Annotated[Lease, locked("seat:{seat}")], at: str) -> int:
    """Book a seat in a thread, at a gate."""
    note(f"{at}.reached", os.getpid())
    while not (HOME / f"{at}.open").exists():
        time.sleep(0.01)
    note("booked", seat)
    return lease.token


@app.post("/alone")
async def stand_alone(at: str) -> None:
    """Stay at a gate under a lock of asyncio, which only this process knows; it accepts nothing meanwhile."""
    async with process_lock:
        note(f"{at}.reached", os.getpid())
        while not (HOME / f"{at}.open").exists():
            time.sleep(0.01)  # noqa: ASYNC251 - the other worker is to take the other request


@app.get("/waiters/{seat}")
async def waiters(seat: int, client: Annotated[Client, Depends(client)]) -> list[int | None]:
    """Tell how many wait for a seat, a number for each holder."""
    return [holder.waiters for holder in await client.holders(f"seat:{seat}")]


@app.post("/payments")
async def pay(
    tasks: BackgroundTasks,
    amount: Annotated[int, Body(embed=True)],
    at: str = "",
    status: int = 201,
) -> Response:
    """Pay, at a gate if one is named."""
    note("payments", amount)
    if at:
        await gate(at)
    if status >= 400:
        raise HTTPException(status)
    tasks.add_task(note, "receipts", amount)
    body = "\xe9\x00" * amount if amount > 1000 else f"paid {amount}"
    return Response(body, status, {"Location": f"/payments/{amount}", "Set-Cookie": "session=secret"}, "text/plain")
