"""What `lockkit.backends.sql.mysql` uses of PyMySQL's private names: each test fails when they change."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql.mysql import PymysqlConnection, PymysqlDriver
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit_tools.servers import MariaServer

PATIENCE = 60.0


@pytest.fixture
def connection(mariadb: MariaServer) -> Iterator[PymysqlConnection]:
    """With a limit of a minute."""
    login = {"host": mariadb.host, "port": mariadb.port, "user": "lockkit", "database": "lockkit"}
    driver = PymysqlDriver(lambda: {**login, "read_timeout": PATIENCE}, mariadb.url)
    connection = driver.open(BlockingRuntime())
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


def test_pymysql_answer_is_read_later(connection: PymysqlConnection) -> None:
    """An answer that does not come in time leaves the connection as it is."""
    connection.send(Statement("SELECT SLEEP(1), $1, $2"), ["it's \N{SNOWMAN}", None])

    with pytest.raises(TimeoutError):
        drive(connection.answer(0.01))
    assert not connection.answered

    assert drive(connection.answer(PATIENCE)).rows == ((0, "it's \N{SNOWMAN}", None),)


@contextmanager
def stalling_relay(server: MariaServer, stall: threading.Event, go: threading.Event) -> Iterator[int]:
    """Stand before a server; while `stall` is set, pass on one byte of an answer, and the rest after `go`."""

    def pass_on(source: socket.socket, target: socket.socket, *, to_client: bool) -> None:
        while data := source.recv(65_536):
            if to_client and stall.is_set():
                target.sendall(data[:1])
                go.wait(PATIENCE)
                data = data[1:]
            target.sendall(data)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection((server.host, server.port)) as behind,
    ):

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                answering = threading.Thread(target=pass_on, args=(behind, client), kwargs={"to_client": True})
                answering.start()
                pass_on(client, behind, to_client=False)
                behind.shutdown(socket.SHUT_RDWR)
                answering.join(PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE)


@pytest.mark.parametrize("sent", [True, False])
def test_answer_that_stalls_after_its_first_byte_does_not_block_the_event_loop(
    mariadb: MariaServer, *, sent: bool
) -> None:
    """Its caller is back in time, other tasks go on meanwhile, and the answer is read later."""
    stall, go = threading.Event(), threading.Event()
    statement = Statement("SELECT 1")

    async def main(port: int) -> None:
        login = {"host": "127.0.0.1", "port": port, "user": "lockkit", "database": "lockkit", "read_timeout": PATIENCE}
        driver = PymysqlDriver(lambda: login, mariadb.url)
        connection = await asyncio.to_thread(driver.open, AsyncioRuntime())
        stall.set()
        ticks = asyncio.create_task(asyncio.sleep(0.1))
        if sent:
            connection.send(statement)
        with pytest.raises(TimeoutError):
            await (connection.answer(0.5) if sent else connection.run(statement, (), 0.5))
        assert ticks.done()
        assert not connection.answered
        await connection.until_answer(asyncio.Event(), connection._runtime.now() + 0.1)  # type: ignore[arg-type]
        stall.clear()
        go.set()
        assert (await connection.answer(PATIENCE)).rows == ((1,),)
        assert (await connection.run(Statement("SELECT 2"))).rows == ((2,),)
        await connection.close()

    with stalling_relay(mariadb, stall, go) as port:
        asyncio.run(main(port))
