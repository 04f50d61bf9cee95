"""MariaDB's defaults for new sessions change what statements mean or return, or end a session: lockkit sets its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

import lockkit
from lockkit.backends.sql.dialect import dialect_named
from lockkit_tools.servers import MariaServer
from lockkit_tools.servers.binaries import find_program
from tests.tries import beside, busy, until

PATIENCE = 60.0
NAME = "it's a \"name\\' `%s` $1 "


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
            server.execute(f"SET GLOBAL {name} = {value if value[:1].isdigit() else repr(value)}")


@pytest.fixture(
    params=[
        {"sql_mode": "'SIMULTANEOUS_ASSIGNMENT'"},
        {"sql_mode": "'ORACLE'"},
        {"sql_mode": "'TRADITIONAL'"},
        {"sql_mode": "'ANSI,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE,EMPTY_STRING_IS_NULL'"},
        {"sql_mode": "''"},
        # After RELEASE the server closes a connection behind its ROLLBACK; in mode=row one comes before a first grant.
        {"completion_type": "'CHAIN'"},
        {"completion_type": "'RELEASE'"},
        {"sql_select_limit": "1"},
        {"max_join_size": "1", "sql_big_selects": "0"},
        # The server runs it after it has answered the login, so no driver notices.
        {"init_connect": "'SET autocommit = 0'"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def url(request: pytest.FixtureRequest, mariadb: MariaServer) -> Iterator[str]:
    """The server, with another default, for a user without all rights: for others there is no ``init_connect``."""
    mariadb.execute("CREATE USER IF NOT EXISTS plain; GRANT ALL ON lockkit.* TO plain")
    with default(mariadb, **request.param):
        yield f"mariadb://plain@{mariadb.address}/lockkit"


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
def test_lock_is_exclusive_in_any_sql_mode(url: str, mode: str) -> None:
    """Each time: the first grant inserts a row, the others change it, and all of it is committed."""
    with lockkit.connect(url, mode=mode) as client, lockkit.connect(url, mode=mode) as other:
        last = 0
        for _ in range(3):
            with client.lock(NAME, timeout=PATIENCE) as lease:
                assert lease.token > last
                last = lease.token
                assert [(held.owner, held.token) for held in other.holders(NAME)] == [(lease.owner, last)]
                assert busy(other.lock(NAME))
                lease.extend()
                assert lease.confirm()
        if mode == "advisory":
            return
        mine, theirs = client.rwlock(NAME, timeout=PATIENCE), other.rwlock(NAME, timeout=PATIENCE)
        for _ in range(2):
            with mine.read() as first, theirs.read() as second:
                assert {held.owner for held in client.holders(NAME)} == {first.owner, second.owner}
            with mine.read():
                assert busy(theirs.write())
            with mine.write():
                assert busy(theirs.read())


def test_permits_and_notes_in_any_sql_mode(url: str) -> None:
    """In the lock table, which has both."""
    with lockkit.connect(url) as client:
        permits = client.semaphore(NAME, limit=2, timeout=PATIENCE)
        for _ in range(3):
            with permits as first, permits as second:
                assert {first.slot, second.slot} == {0, 1}
                assert permits.available() == 0
            with client.once(NAME, keep=60, timeout=PATIENCE) as attempt:
                if attempt.first:
                    attempt.done({"what": NAME})
                assert attempt.first or attempt.result == {"what": NAME}


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
        " WHERE info LIKE '%GET_LOCK(%' AND time_ms > 1500 AND id <> CONNECTION_ID()"
    )
    with (
        default(mariadb, max_statement_time="0.5"),
        lockkit.connect(mariadb.url, mode=mode) as client,
        lockkit.connect(mariadb.url, mode=mode) as other,
    ):
        with client.lock(NAME, timeout=PATIENCE) as lease:
            got = beside(other.lock(NAME).acquire, PATIENCE)
            until(lambda: mariadb.execute(waiting) != "0", 30)
        assert got.result(PATIENCE).token > lease.token
        got.result().release()
