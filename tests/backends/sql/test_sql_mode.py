"""MariaDB's ``sql_mode`` changes what statements mean: a server's default must not change what lockkit's do."""

from __future__ import annotations

import pytest

import lockkit
from lockkit_tools.servers import MariaServer
from tests.tries import busy

pytestmark = pytest.mark.timeout(120)

PATIENCE = 60.0
NAME = "it's a \"name\\' `%s` $1 "
MODES = ["table", "row", "advisory"]


@pytest.fixture(
    params=[
        "SIMULTANEOUS_ASSIGNMENT",
        "ORACLE",
        "TRADITIONAL",
        "ANSI,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE,EMPTY_STRING_IS_NULL",
        "",
    ]
)
def url(request: pytest.FixtureRequest, mariadb: MariaServer) -> str:
    """The server, with another default."""
    mariadb.execute(f"SET GLOBAL sql_mode = '{request.param}'")
    return mariadb.url


@pytest.mark.parametrize("mode", MODES)
def test_lock_is_exclusive_in_any_sql_mode(url: str, mode: str) -> None:
    """Each time: the first grant inserts a row, the others change it, at last by a prepared statement."""
    with lockkit.connect(url, mode=mode) as client, lockkit.connect(url, mode=mode) as other:
        last = 0
        for _ in range(12):
            with client.lock(NAME, timeout=PATIENCE) as lease:
                assert lease.token > last
                last = lease.token
                assert [(held.owner, held.token) for held in other.holders(NAME)] == [(lease.owner, last)]
                assert busy(other.lock(NAME))
                lease.extend()
                assert lease.confirm()


@pytest.mark.parametrize("mode", ["table", "row"])
def test_readers_keep_a_writer_out_in_any_sql_mode(url: str, mode: str) -> None:
    """And a writer keeps readers out."""
    with lockkit.connect(url, mode=mode) as client, lockkit.connect(url, mode=mode) as other:
        mine, theirs = client.rwlock(NAME, timeout=PATIENCE), other.rwlock(NAME, timeout=PATIENCE)
        for _ in range(3):
            with mine.read(), theirs.read():
                assert len(client.holders(NAME)) == 2
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
        for _ in range(2):
            with client.once(f"{url}{NAME}", keep=60, timeout=PATIENCE) as attempt:
                if attempt.first:
                    attempt.done({"what": NAME})
                assert attempt.first or attempt.result == {"what": NAME}
