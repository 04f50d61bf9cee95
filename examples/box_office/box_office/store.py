"""Sales in SQLite, for all environments: this example is about locks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


class SqliteStore:
    """Sales in a file, which any number of processes and threads may have open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._connect()) as database:
            database.execute("CREATE TABLE IF NOT EXISTS sales (seat TEXT PRIMARY KEY, customer TEXT, token INTEGER)")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=20, isolation_level=None)

    def buyer(self, seat: str) -> str | None:
        """Who has the seat."""
        with closing(self._connect()) as database:
            row = database.execute("SELECT customer FROM sales WHERE seat = ?", [seat]).fetchone()
        return None if row is None else str(row[0])

    def sell(self, seat: str, customer: str, token: int) -> bool:
        """Write a sale down, unless one with a higher token is there: one statement, so nobody comes between."""
        with closing(self._connect()) as database:
            done = database.execute(
                "INSERT INTO sales VALUES (?, ?, ?) ON CONFLICT (seat) DO UPDATE "
                "SET customer = excluded.customer, token = excluded.token WHERE sales.token <= excluded.token",
                [seat, customer, token],
            )
        return done.rowcount == 1
