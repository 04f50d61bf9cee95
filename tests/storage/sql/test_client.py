"""What an application's errors are about."""

from __future__ import annotations

import sqlite3
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from lockkit.errors import BackendUnavailable
from lockkit.storage.sql.client import data_error, kind_of


def said(*arguments: object, **attributes: str | int) -> Exception:
    """Make a driver's error."""
    error = Exception(*arguments)
    cast("Any", error).__dict__.update(attributes)
    return error


def of_sqlite(name: str) -> Exception:
    """Make one of SQLite's."""
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (said("deadlock detected", sqlstate="40P01"), "deadlock"),  # psycopg, asyncpg
        (said("could not serialize access", pgcode="40001"), "stale"),  # psycopg2
        (said({"C": "40P01", "M": "deadlock detected"}), "deadlock"),  # pg8000
        (said("relation does not exist", sqlstate="42P01"), "no table"),
        (said(1213, "Deadlock found"), "deadlock"),  # PyMySQL, mysqlclient, aiomysql, asyncmy
        (said(1205, "Lock wait timeout exceeded", "HY000", sqlstate="HY000"), "locked"),  # mysql-connector
        (said("Deadlock found", errno=1213, sqlstate="40001"), "deadlock"),  # mariadb
        (said(1412, "Table definition has changed"), "new table"),
        (of_sqlite("SQLITE_BUSY"), "locked"),
        (of_sqlite("SQLITE_BUSY_RECOVERY"), "locked"),  # another process recovers a write-ahead log
        (of_sqlite("SQLITE_BUSY_SNAPSHOT"), "stale"),
    ],
)
def test_error_of_any_driver_is_known(error: Exception, kind: str) -> None:
    """By what the driver's own error has, however SQLAlchemy wraps it."""
    assert kind_of(error) == kind
    assert kind_of(OperationalError("SELECT 1", {}, error)) == kind


def test_connection_that_cannot_be_made_in_time_is_an_outage() -> None:
    """It has no statement that the server ended."""
    error = OperationalError(None, None, said(2003, "Can't connect to MySQL server on 'db' (timed out)"))

    assert isinstance(data_error(error, None), BackendUnavailable)
