"""Who gets the connection: renewals first, then the caller that has waited longest."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockkit.backends.sql import database as module
from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import dialect_named
from lockkit.backends.sql.sqlite import SqliteDriver
from lockkit.runtime import AsyncioRuntime

PATIENCE = 60.0
OTHERS = [f"caller {number}" for number in range(6)]
CHECK_SECONDS = 0.01

GATE = Statement("SELECT gate()")
NOTE = Statement("SELECT note($1)")


class Connection(sqlite3.Connection):
    """Has one function in SQL that waits until the gate is open, and one that notes who came when."""

    gate: ClassVar[threading.Event]
    reached: ClassVar[threading.Event]
    noted: ClassVar[list[str]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.create_function("gate", 0, self.wait_at_the_gate)
        self.create_function("note", 1, self.noted.append)

    def wait_at_the_gate(self) -> bool:
        """Say that it was reached."""
        self.reached.set()
        return self.gate.wait(PATIENCE)


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The gate, closed. Callers look often whether a connection was lost."""
    made = threading.Event()
    monkeypatch.setattr(Connection, "gate", made, raising=False)
    monkeypatch.setattr(Connection, "reached", threading.Event(), raising=False)
    monkeypatch.setattr(Connection, "noted", [], raising=False)
    monkeypatch.setattr(module, "WAIT_CHECK_SECONDS", CHECK_SECONDS)
    return made


def test_renewals_go_first(tmp_path: Path, gate: threading.Event) -> None:
    """SQLite has one writer, so a client has one connection, and its callers queue."""

    async def main() -> None:
        database = opened(tmp_path)
        tasks = [asyncio.create_task(database.run(GATE))]
        await asyncio.to_thread(Connection.reached.wait, PATIENCE)
        tasks += [asyncio.create_task(database.run(NOTE, [caller])) for caller in OTHERS]
        await asyncio.sleep(20 * CHECK_SECONDS)
        tasks.append(asyncio.create_task(database.run(NOTE, ["renewal"], urgent=True)))
        await asyncio.sleep(20 * CHECK_SECONDS)
        gate.set()
        await asyncio.gather(*tasks)
        await database.close()

    asyncio.run(main())
    assert Connection.noted == ["renewal", *OTHERS]


def test_statement_that_undoes_a_cancelled_one_does_not_overtake_it(tmp_path: Path, gate: threading.Event) -> None:
    """It goes on at the server. However often its caller is cancelled: anyio does so until the task ends."""

    async def main() -> None:
        database = opened(tmp_path)
        task = asyncio.create_task(database.run(GATE))
        await asyncio.to_thread(Connection.reached.wait, PATIENCE)
        for _ in range(5):
            await asyncio.sleep(CHECK_SECONDS)
            task.cancel()
        await asyncio.wait([task], timeout=20 * CHECK_SECONDS)
        ended_early = task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ended_early
        assert len(database._idle) == 1
        await database.close()

    asyncio.run(main())


def opened(directory: Path) -> Database:
    """Return a database whose connections have the two functions."""
    driver = SqliteDriver(f"{directory}/locks.db", {"factory": Connection}, adopted=False)
    return Database(driver, dialect_named("sqlite"), AsyncioRuntime(), url="sqlite", label="sqlite")
