"""``python -m pytest -n 4`` runs these in four processes, over one database."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest


@pytest.mark.parametrize(("name", "price"), [("apple", 30), ("pear", 40)])
def test_price(database: str, name: str, price: int) -> None:
    """Each worker reads the same database."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT price FROM products WHERE name = ?", (name,)).fetchone() == (price,)


@pytest.mark.parametrize("number", range(6))
def test_made_once(database: str, number: int) -> None:
    """Whatever the number of workers."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM made").fetchone() == (1,), number
