"""What `lockkit.backends.sql.mysql` uses of PyMySQL's private names: each test fails when they change."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lockkit.backends.sql.mysql import PymysqlConnection, PymysqlDriver
from lockkit.backends.sql.statement import Statement
from lockkit.runtime import BlockingRuntime, drive
from lockkit_tools.servers import MariaServer

PATIENCE = 60.0


@pytest.fixture
def connection(mariadb: MariaServer) -> Iterator[PymysqlConnection]:
    """With a limit of a minute."""
    login = {"host": mariadb.host, "port": mariadb.port, "user": "lockkit", "database": "lockkit"}
    driver = PymysqlDriver(lambda: {**login, "read_timeout": PATIENCE}, mariadb.url)
    connection = driver.wrap(driver.open(), BlockingRuntime())
    yield connection
    connection.terminate()


def test_pymysql_limit_holds_for_one_statement(connection: PymysqlConnection) -> None:
    """The next one has that of the connection again."""
    drive(connection.run(Statement("SELECT 1"), (), 0.5))
    drive(connection.run(Statement("SELECT SLEEP(1)"), (), PATIENCE))
    errors = connection.dbapi.Error
    began = time.monotonic()

    with pytest.raises(errors, match="timed out"):
        drive(connection.run(Statement("SELECT SLEEP(60)"), (), 0.5))

    assert time.monotonic() - began < PATIENCE / 2


def test_pymysql_without_time_left_raises_its_own_error(connection: PymysqlConnection) -> None:
    """A caller may be late."""
    errors = connection.dbapi.Error

    with pytest.raises(errors, match="timed out"):
        drive(connection.run(Statement("SELECT SLEEP(60)"), (), 0.0))


def test_pymysql_answer_is_read_later(connection: PymysqlConnection) -> None:
    """An answer that does not come in time leaves the connection as it is."""
    connection.send(Statement("SELECT SLEEP(1), $1, $2"), ["it's \N{SNOWMAN}", None])

    with pytest.raises(TimeoutError):
        drive(connection.answer(0.01))
    assert not connection.answered

    assert drive(connection.answer(PATIENCE)).rows == ((0, "it's \N{SNOWMAN}", None),)
