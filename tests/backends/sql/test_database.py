"""Who gets the connection: renewals first, then the caller that has waited longest."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockkit.backends.sql import database as module
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import dialect_named
from lockkit.backends.sql.sqlite import SqliteDriver
from lockkit.backends.sql.statement import Statement
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.units import Seconds
from lockkit_tools.servers import wait_until

PATIENCE = 60.0
OTHERS = [f"caller {number}" for number in range(6)]
CHECK_SECONDS = 0.01

GATE = Statement("SELECT gate()")
NOTE = Statement("SELECT note($1)")


class Connection(sqlite3.Connection):
    """Has one function in SQL that waits until the gate is open, and one that notes who came when."""

    gate: ClassVar[threading.Event]
    noted: ClassVar[list[str]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.create_function("gate", 0, lambda: self.gate.wait(PATIENCE))
        self.create_function("note", 1, self.noted.append)


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The gate, closed. Callers look often whether a connection was lost."""
    made = threading.Event()
    monkeypatch.setattr(Connection, "gate", made, raising=False)
    monkeypatch.setattr(Connection, "noted", [], raising=False)
    monkeypatch.setattr(module, "WAIT_CHECK_SECONDS", CHECK_SECONDS)
    return made


class TestQueue:
    """SQLite has one writer, so a client has one connection, and its callers queue."""

    def test_renewals_go_first_with_tasks(self, tmp_path: Path, gate: threading.Event) -> None:
        """The same with tasks."""

        async def main() -> None:
            database = opened(tmp_path, AsyncioRuntime())
            tasks = [asyncio.create_task(database.run(GATE))]
            await asyncio.to_thread(wait_until, lambda: None if database._counted else "the gate")
            tasks += [asyncio.create_task(database.run(NOTE, [caller])) for caller in OTHERS]
            await asyncio.sleep(20 * CHECK_SECONDS)
            tasks.append(asyncio.create_task(database.run(NOTE, ["renewal"], urgent=True)))
            await asyncio.sleep(20 * CHECK_SECONDS)
            gate.set()
            await asyncio.gather(*tasks)
            await database.close()

        asyncio.run(main())
        assert Connection.noted == ["renewal", *OTHERS]


class TestCancelled:
    """A statement goes on at the server when its caller is cancelled."""

    def test_statement_that_undoes_it_does_not_overtake_it(self, tmp_path: Path, gate: threading.Event) -> None:
        """However often its caller is cancelled: anyio does so until the task ends."""

        async def main() -> None:
            database = opened(tmp_path, AsyncioRuntime())
            task = asyncio.create_task(database.run(GATE))
            await asyncio.to_thread(wait_until, lambda: None if database._counted else "the gate")
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


class TestOtherWriters:
    """Where another process has the file, a statement waits a little and is sent again."""

    @pytest.mark.parametrize(("urgent", "longest"), [(False, 0.01), (True, 0.001)])
    def test_a_renewal_waits_a_tenth_of_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, urgent: bool, longest: float
    ) -> None:
        """So it finds the file free before those of other processes do."""
        path = tmp_path / "locks.db"
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("CREATE TABLE t (x)")
        other.execute("BEGIN IMMEDIATE")
        runtime = BlockingRuntime()
        pauses: list[float] = []

        async def sleep(seconds: Seconds) -> None:
            pauses.append(seconds)
            if len(pauses) == 20:
                other.execute("COMMIT")

        monkeypatch.setattr(runtime, "sleep", sleep)
        database = opened(tmp_path, runtime)
        drive(database.run(Statement("INSERT INTO t VALUES (1)"), urgent=urgent))
        drive(database.close())
        other.close()
        assert len(pauses) == 20
        assert longest / 2 <= min(pauses)
        assert max(pauses) <= longest


def opened(directory: Path, runtime: Runtime) -> Database:
    """Return a database whose connections have the two functions."""
    driver = SqliteDriver(f"{directory}/locks.db", {"factory": Connection}, adopted=False)
    return Database(driver, dialect_named("sqlite"), runtime, url="sqlite", label="sqlite")
