"""One database for all workers of pytest-xdist: the first one makes it."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def database(lockkit_once: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a database with the schema and the data of the tests."""

    def make() -> str:
        path = tmp_path_factory.mktemp("database") / "shop.db"
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE products (name TEXT PRIMARY KEY, price INTEGER)")
            connection.execute("CREATE TABLE made (count INTEGER)")
            connection.execute("INSERT INTO products VALUES ('apple', 30), ('pear', 40)")
            connection.execute("INSERT INTO made VALUES (1)")
        connection.close()
        return str(path)

    return lockkit_once("database", make)
