"""Canaries for `lockkit.backends.sql.quirks`: each fails when a driver changes what has no public name."""

from __future__ import annotations

import asyncio
import os
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

import lockkit
from lockkit.backends.sql import quirks
from lockkit.backends.sql.blocking import PyMysqlConnection
from lockkit.backends.sql.statement import Statement
from lockkit.runtime import BlockingRuntime, drive
from lockkit_tools.servers import MariaServer
from tests.tries import until

PATIENCE = 60.0


@pytest.fixture
def connection(mariadb: MariaServer) -> Iterator[PyMysqlConnection]:
    """PyMySQL, with a limit of a minute."""
    engine = sqlalchemy.create_engine(with_driver(mariadb.url, "pymysql"), poolclass=NullPool)
    pooled = engine.raw_connection()
    connection = PyMysqlConnection(pooled.driver_connection, "format", PATIENCE, BlockingRuntime(), pooled)
    yield connection
    connection.terminate()


def with_driver(url: str, driver: str) -> str:
    """Write a URL as SQLAlchemy wants it."""
    scheme, _, rest = url.partition(":")
    return f"{scheme}+{driver}:{rest}"


def expect_socket(driver_connection: Any, port: int) -> None:  # noqa: ANN401 - any driver's
    """See that the socket of a connection is found."""
    with socket.socket(fileno=os.dup(quirks.file_descriptor(driver_connection))) as copy:
        assert copy.getpeername()[1] == port


@pytest.mark.parametrize(
    ("kind", "driver"), [("postgresql", "psycopg2"), ("postgresql", "pg8000"), ("mariadb", "pymysql")]
)
def test_socket_is_found(kind: str, driver: str, request: pytest.FixtureRequest) -> None:
    """Of a driver that blocks."""
    server = request.getfixturevalue(kind)
    engine = sqlalchemy.create_engine(with_driver(server.url, driver), poolclass=NullPool)
    connection = engine.raw_connection()

    expect_socket(connection.driver_connection, server.port)

    connection.close()


@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
def test_socket_of_an_asyncio_driver_is_found(driver: str, mariadb: MariaServer) -> None:
    """It is in a stream."""

    async def run() -> None:
        engine = create_async_engine(with_driver(mariadb.url, driver), poolclass=NullPool)
        async with engine.connect() as connection:
            pooled = await connection.get_raw_connection()
            expect_socket(pooled.driver_connection, mariadb.port)

    asyncio.run(run())


def test_pymysql_limit_holds_for_one_statement(connection: PyMysqlConnection) -> None:
    """The next one has that of the connection again."""
    drive(connection.run(Statement("SELECT 1"), (), 0.5))
    drive(connection.run(Statement("SELECT SLEEP(1)"), (), PATIENCE))
    errors = connection.dbapi.Error
    began = time.monotonic()

    with pytest.raises(errors, match="timed out"):
        drive(connection.run(Statement("SELECT SLEEP(60)"), (), 0.5))

    assert time.monotonic() - began < PATIENCE / 2


def test_pymysql_without_time_left_raises_its_own_error(connection: PyMysqlConnection) -> None:
    """A caller may be late."""
    errors = connection.dbapi.Error

    with pytest.raises(errors, match="timed out"):
        drive(connection.run(Statement("SELECT SLEEP(60)"), (), 0.0))


def test_pymysql_answer_is_read_later(connection: PyMysqlConnection) -> None:
    """An answer that does not come in time leaves the connection as it is."""
    connection.send(Statement("SELECT SLEEP(1), $1, $2"), ["it's \N{SNOWMAN}", None])

    with pytest.raises(TimeoutError):
        drive(connection.answer(0.01))
    assert not connection.answered

    assert drive(connection.answer(PATIENCE)).rows == ((0, "it's \N{SNOWMAN}", None),)


class _ResetsAll(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()


class _EndsAll(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1000)


@pytest.mark.parametrize("handler", [_ResetsAll, _EndsAll], ids=["reset", "ended"])
@pytest.mark.parametrize("adopted", [True, False], ids=["engine", "url"])
def test_pg8000_that_cannot_connect_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch, handler: type[socketserver.BaseRequestHandler], *, adopted: bool
) -> None:
    """The server resets each connection before it has answered, or ends it."""
    opened: list[socket.socket] = []
    create = socket.create_connection

    def noting(*arguments: Any) -> socket.socket:
        opened.append(create(*arguments))
        return opened[-1]

    monkeypatch.setattr("pg8000.core.socket.create_connection", noting)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"postgresql+pg8000://user:word@127.0.0.1:{server.server_address[1]}/x"
        with (
            lockkit.from_client(sqlalchemy.create_engine(url)) if adopted else lockkit.connect(url) as client,
            pytest.raises(lockkit.BackendUnavailable),
        ):
            client.lock("x").acquire(timeout=0)
        server.shutdown()

    assert opened
    until(lambda: [sock for sock in opened if sock.fileno() != -1] == [])


UNCLOSED = """
import asyncio
import sys

from sqlalchemy.ext.asyncio import create_async_engine

import lockkit.aio


async def main():
    global kept
    url = sys.argv[1]
    made = lockkit.aio.from_client(create_async_engine(url)) if "+" in url else lockkit.aio.connect(url)
    kept = await made
    async with kept.lock("left", ttl=30):
        pass


asyncio.run(main())
"""


@pytest.mark.parametrize("adopted", [False, True])
def test_client_that_was_not_closed_is_a_warning(mariadb: MariaServer, *, adopted: bool) -> None:
    """When the program has ended, and its event loop with it; no traceback for each connection."""
    url = with_driver(mariadb.url, "aiomysql").replace("mariadb+", "mysql+") if adopted else mariadb.url
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", UNCLOSED, url],
        check=True, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "ResourceWarning: Unclosed connection" in done.stderr
    assert "Traceback" not in done.stderr
