"""Statements that a session of MariaDB prepares by itself, as they go to the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit import aio
from lockkit.backends.sql.mysql import PymysqlConnection
from lockkit.backends.sql.prepared import PREPARE_AFTER
from lockkit.backends.sql.statement import Parameter, Statement
from lockkit.backends.sql_table import backend as sql_table
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit_tools.servers import MariaServer, require

PATIENCE = 60.0
MODES = ["table", "row", "advisory"]
FORGET = Statement("DEALLOCATE PREPARE lockkit_1", once=True)


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """A server, with the tables: to find one missing is a use of a statement, too."""
    require("mariadb", local=True)
    with MariaServer() as server:
        for mode in MODES:
            with lockkit.connect(server.url, mode=mode) as client:
                client.lock("first", timeout=PATIENCE).acquire().release()
        yield server


@pytest.fixture(autouse=True)
def _no_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take a second connection, which has prepared nothing."""
    monkeypatch.setattr(sql_table, "REAP_SHARE", 0.0)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of what goes to the server."""
    seen: list[str] = []
    send = PymysqlConnection.send

    def collecting(self: PymysqlConnection, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        seen.append(" ".join(statement.text.replace("$2", "'lockkit:").split()[:2]))
        send(self, statement, parameters)

    monkeypatch.setattr(PymysqlConnection, "send", collecting)
    return seen


def connections(client: Client | aio.Client) -> list[Any]:
    """Give the kept connections of a client."""
    backend: Any = client._engine._backend
    sessions = backend._sessions._idle if hasattr(backend, "_sessions") else []
    return [*backend.database._idle, *(session.connection for session in sessions)]


def warm_up(client: Client, count: int) -> list[int]:
    """Lock and release; give the tokens."""
    tokens = []
    for _ in range(count):
        with client.lock("often", timeout=PATIENCE) as lease:
            tokens.append(lease.token)
    return tokens


@pytest.mark.parametrize(
    ("mode", "takes", "frees"),
    [
        ("table", "INSERT INTO", "UPDATE `lockkit_locks`"),
        ("advisory", "INSERT INTO", "SELECT RELEASE_ALL_LOCKS()"),
        ("row", "SELECT GET_LOCK('lockkit:,", "BEGIN NOT"),
    ],
)
def test_pair_sends_what_was_prepared(
    mode: str, takes: str, frees: str, mariadb: MariaServer, texts: list[str]
) -> None:
    """One message more, once; the table's or lease's own statement is then one word and its values."""
    with lockkit.connect(mariadb.url, mode=mode) as client:
        tokens = warm_up(client, 1)
        texts.clear()

        tokens += warm_up(client, PREPARE_AFTER + 1)
        prepared, executed = texts.count("PREPARE lockkit_1"), texts.count("EXECUTE lockkit_1")
        texts.clear()
        tokens += warm_up(client, 1)

    assert (prepared, executed) == (1, 2)
    expected = [takes, "EXECUTE lockkit_1", frees] if mode == "row" else ["EXECUTE lockkit_1", frees]
    assert [text[: len(start)] for text, start in zip(texts, expected, strict=True)] == expected
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("mode", MODES)
def test_session_that_forgot_is_sent_the_text(mode: str, mariadb: MariaServer, texts: list[str]) -> None:
    """As behind a proxy that resets sessions: nothing was done, so the same call goes on."""
    with lockkit.connect(mariadb.url, mode=mode) as client:
        tokens = warm_up(client, PREPARE_AFTER + 2)
        prepared = [connection for connection in connections(client) if connection.prepared._forms]
        assert prepared
        for connection in prepared:
            drive(connection.run(FORGET))
        texts.clear()

        tokens += warm_up(client, 2)

    assert texts.count("EXECUTE lockkit_1") == 1
    assert "PREPARE lockkit_1" not in texts
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("mode", MODES)
def test_server_that_prepares_no_more_is_sent_the_text(mode: str, mariadb: MariaServer, texts: list[str]) -> None:
    """It has a limit for all clients together."""
    limit = mariadb.execute("SELECT @@max_prepared_stmt_count")
    mariadb.execute("SET GLOBAL max_prepared_stmt_count = 0")
    try:
        with lockkit.connect(mariadb.url, mode=mode) as client:
            tokens = warm_up(client, PREPARE_AFTER + 4)
    finally:
        mariadb.execute(f"SET GLOBAL max_prepared_stmt_count = {limit}")

    assert texts.count("PREPARE lockkit_1") == 1
    assert "EXECUTE lockkit_1" not in texts
    assert tokens == sorted(set(tokens))
