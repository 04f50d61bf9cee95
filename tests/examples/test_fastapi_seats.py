"""The web application: started by the command of its README, on the embedded backend."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import pytest

from lockkit_tools.servers._ports import Ports
from tests.cli.support import PATIENCE, alive, children
from tests.conventions.sources import ROOT
from tests.tries import until

PROJECT = ROOT / "examples" / "fastapi_seats"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Start it as its README says."""
    (command,) = re.findall(r"^\$ (uvicorn .*)$", (PROJECT / "README.md").read_text(), re.MULTILINE)
    port = Ports().reserve()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKKIT_")}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "LOCKKIT_STATE_DIR": str(tmp_path / "state"),
        "SEATS_DATABASE": str(tmp_path / "seats.db"),
    }
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command.split(), "--port", str(port), "--timeout-graceful-shutdown", "5"],
            cwd=PROJECT,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: (tmp_path / "log").read_text().count("startup complete") == 4)
        yield f"http://127.0.0.1:{port}"
    finally:
        workers = children(server.pid)
        server.terminate()
        server.wait(PATIENCE)
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def test_seat_is_sold_once_and_paid_once(url: str, tmp_path: Path) -> None:
    """To one of ten customers; unpaid seats come back, and the worker that sees to it can be killed."""
    with ThreadPoolExecutor(10) as customers:
        path = f"{url}/seats/12A/reservation"
        asked = [customers.submit(httpx.post, f"{path}?customer={name}", timeout=PATIENCE) for name in range(10)]
        answers = [one.result() for one in asked]
    (sold,) = [answer for answer in answers if answer.status_code == 201]
    buyer = sold.json()["customer"]
    key = {"Idempotency-Key": '"5b0f"'}

    receipts = {httpx.post(f"{url}/seats/12A/payment?customer={buyer}", headers=key).text for _ in range(5)}

    assert {answer.status_code for answer in answers} <= {201, 409, 410}
    assert len(receipts) == 1
    assert httpx.get(f"{url}/seats").json() == {"12A": buyer}
    with closing(sqlite3.connect(tmp_path / "seats.db", timeout=PATIENCE)) as database:
        assert database.execute("SELECT customer FROM payments").fetchall() == [(buyer,)]

        ((_, leader),) = database.execute("SELECT * FROM leaders").fetchall()
        os.kill(leader, signal.SIGKILL)
        until(lambda: database.execute("SELECT count(*) FROM leaders").fetchone() == (2,))
        with database:
            database.execute("INSERT INTO seats (seat, customer, reserved, fence) VALUES ('13A', 'Ben', 0, 0)")
    until(lambda: httpx.get(f"{url}/seats").json() == {"12A": buyer})
