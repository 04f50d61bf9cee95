"""MariaDB's defaults for new sessions may end a session, or cut what a statement returns: lockkit sets its own."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

import lockkit
import lockkit.aio
from lockkit.backends.sql.dialect import dialect_named
from lockkit_tools.servers import MariaServer
from lockkit_tools.servers.binaries import find_program
from tests.tries import busy, until

pytestmark = pytest.mark.timeout(120)

PATIENCE = 60.0
NAME = "printer"


@contextmanager
def default(server: MariaServer, **settings: str) -> Iterator[None]:
    """Give the sessions that begin now other settings."""
    before = {name: server.execute(f"SELECT @@GLOBAL.{name}") for name in settings}
    try:
        for name, value in settings.items():
            server.execute(f"SET GLOBAL {name} = {value}")
        yield
    finally:
        for name, value in before.items():
            server.execute(f"SET GLOBAL {name} = {value if value[0].isdigit() else repr(value)}")


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
@pytest.mark.parametrize("completion", ["CHAIN", "RELEASE"])
def test_end_of_a_transaction_ends_no_session(mariadb: MariaServer, completion: str, mode: str) -> None:
    """With RELEASE the server closes a connection behind its ROLLBACK; in mode=row one comes before the first grant."""
    with (
        default(mariadb, completion_type=f"'{completion}'"),
        lockkit.connect(mariadb.url, mode=mode) as client,
        lockkit.connect(mariadb.url, mode=mode) as other,
    ):
        last = 0
        for _ in range(3):
            with client.lock(f"{NAME} {completion}", timeout=PATIENCE) as lease:
                assert lease.token > last
                last = lease.token
                assert busy(other.lock(f"{NAME} {completion}"))
                lease.extend()
                assert lease.confirm()


@pytest.mark.parametrize("settings", [{"sql_select_limit": "1"}, {"max_join_size": "1", "sql_big_selects": "0"}])
def test_all_readers_are_shown(mariadb: MariaServer, settings: dict[str, str]) -> None:
    """Also where a SELECT returns one row unless it is told otherwise, or is refused for the rows it might read."""
    with (
        default(mariadb, **settings),
        lockkit.connect(mariadb.url, mode="row") as client,
        lockkit.connect(mariadb.url, mode="row") as other,
    ):
        mine, theirs = client.rwlock(NAME, timeout=PATIENCE), other.rwlock(NAME, timeout=PATIENCE)
        for _ in range(2):
            with mine.read() as first, theirs.read() as second:
                assert {holder.owner for holder in client.holders(NAME)} == {first.owner, second.owner}
            with mine.write() as lease:
                assert [holder.owner for holder in other.holders(NAME)] == [lease.owner]


def test_clock_does_not_follow_summer_time(mariadb: MariaServer) -> None:
    """By the time of the wall a ttl would end an hour early in spring, and last an hour longer in autumn."""
    program = str(find_program("mariadb-tzinfo-to-sql", "mysql_tzinfo_to_sql"))
    zone = [program, "/usr/share/zoneinfo/Europe/Berlin", "Europe/Berlin"]
    load = subprocess.run(zone, check=True, capture_output=True, text=True).stdout
    mariadb.execute(f"USE mysql; {load}")
    asked = "SET time_zone = 'Europe/Berlin', timestamp = {}; SELECT {}, HOUR(NOW())".format
    for change, shown in (("2026-03-29 01:00Z", [1, 3, 3]), ("2026-10-25 01:00Z", [2, 2, 2])):
        at = int(datetime.fromisoformat(change).timestamp())
        for seconds, hour in zip((at - 1, at, at + 1800), shown, strict=True):
            answer = mariadb.execute(asked(seconds, dialect_named("mariadb").now_us)).split()
            assert answer == [f"{seconds}000000", str(hour)]


@pytest.mark.parametrize("mode", ["row", "advisory"])
def test_waiter_keeps_its_place_in_the_queue(mariadb: MariaServer, mode: str) -> None:
    """Though the server ends statements that take long: the waiter's goes on for longer than that."""
    waiting = (
        "SELECT COUNT(*) FROM information_schema.processlist"
        " WHERE info LIKE '%GET_LOCK(%' AND time_ms > 3000 AND id <> CONNECTION_ID()"
    )
    tokens: list[int] = []

    def wait() -> None:
        with other.lock(NAME, timeout=PATIENCE) as lease:
            tokens.append(lease.token)

    with (
        default(mariadb, max_statement_time="1"),
        lockkit.connect(mariadb.url, mode=mode) as client,
        lockkit.connect(mariadb.url, mode=mode) as other,
    ):
        thread = threading.Thread(target=wait)
        with client.lock(NAME, timeout=PATIENCE) as lease:
            thread.start()
            until(lambda: mariadb.execute(waiting) != "0", 30)
        thread.join()
        assert [token > lease.token for token in tokens] == [True]


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
def test_statements_are_committed_though_the_server_begins_sessions_without_autocommit(
    mariadb: MariaServer, mode: str
) -> None:
    """The server runs ``init_connect`` after it has answered the login, so no driver notices."""
    mariadb.execute("CREATE USER IF NOT EXISTS plain")  # not for a user with all rights
    mariadb.execute("GRANT ALL ON lockkit.* TO plain")
    url = f"mariadb://plain@{mariadb.address}/lockkit"
    mariadb.execute("SET GLOBAL init_connect = 'SET autocommit = 0'")
    try:
        with lockkit.connect(url, mode=mode) as client, lockkit.connect(url, mode=mode) as other:
            for _ in range(2):
                with client.lock(f"{NAME} begun", timeout=PATIENCE) as lease:
                    assert [holder.owner for holder in other.holders(f"{NAME} begun")] == [lease.owner]
                    assert busy(other.lock(f"{NAME} begun"))
                with other.lock(f"{NAME} begun", timeout=PATIENCE) as after:
                    assert after.token > lease.token
    finally:
        mariadb.execute("SET GLOBAL init_connect = ''")
