"""Databases in a country with summer time, on the two nights of the year on which its clocks are changed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

import lockkit
from lockkit.backends.sql.mysql import PymysqlConnection
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.sync import Client, Lease
from lockkit_tools.servers import MariaServer, PostgresServer, require
from lockkit_tools.servers.binaries import find_program
from tests.backends.sql_table.support import Look
from tests.tries import busy

pytestmark = pytest.mark.timeout(180)

ZONE = "Europe/Berlin"
CHANGES = {
    "spring": (datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp(), "01:59", "03:01"),
    "autumn": (datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp(), "02:59", "02:01"),
}
"""When it is, and what clocks show a minute before and after."""

MODES = ("table", "row", "advisory")
LEAD = 1.0
"""How long before the change locks are taken, seconds."""

TTL = 3.0
LONG = 600.0
PATIENCE = 60.0


class Clock:
    """
    A server's clock: it goes as ever, from a time that is chosen.

    Attributes:
        url: Of the server.
        ahead: How far it is ahead of the machine's, seconds.
    """

    wall_text: str

    def __init__(self, url: str) -> None:
        self.url = url
        self.ahead = 0.0
        self._look = Look(url)

    def set_before(self, change: float) -> None:
        """Have it strike the hour soon."""
        self.ahead = change - LEAD - time.time()

    def now(self) -> float:
        """Unix time."""
        return time.time() + self.ahead

    def wall(self, seconds: float) -> str:
        """Give what a clock on the wall shows at a Unix time, as a session of the server sees it."""
        ((shown,),) = self._look.run(self.wall_text, seconds=seconds)
        return str(shown)


class PostgresClock(Clock):
    """It stands in a table; `clock_timestamp` is looked for in a schema of ours before PostgreSQL's own."""

    wall_text = "SELECT to_char(to_timestamp(:seconds), 'HH24:MI')"

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(server.url)
        for statement in (
            "CREATE SCHEMA fake",
            "CREATE TABLE fake.clock AS SELECT CAST(0 AS double precision) AS ahead",
            (
                "CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS "
                "'SELECT pg_catalog.clock_timestamp() + ahead * interval ''1 second'' FROM fake.clock'"
            ),
            f"ALTER DATABASE postgres SET timezone = '{ZONE}'",
            "ALTER DATABASE postgres SET search_path = fake, pg_catalog, public",
        ):
            self._look.run(statement)

    def set_before(self, change: float) -> None:
        """See `Clock.set_before`."""
        super().set_before(change)
        self._look.run("UPDATE fake.clock SET ahead = :ahead", ahead=self.ahead)


class MariaClock(Clock):
    """MariaDB can be told the time, for a session, so it is told before each statement."""

    wall_text = "SELECT DATE_FORMAT(FROM_UNIXTIME(:seconds), '%H:%i')"

    def __init__(self, server: MariaServer, patch: pytest.MonkeyPatch) -> None:
        super().__init__(server.url)
        program = str(find_program("mariadb-tzinfo-to-sql", "mysql_tzinfo_to_sql"))
        load = subprocess.run(
            [program, f"/usr/share/zoneinfo/{ZONE}", ZONE], check=True, capture_output=True, text=True
        )
        server.execute(f"USE mysql; {load.stdout}; SET GLOBAL time_zone = '{ZONE}'")
        run = PymysqlConnection.run

        async def told(
            connection: PymysqlConnection,
            statement: Statement,
            parameters: Sequence[Parameter] = (),
            seconds: float = 3.0,
        ) -> Result:
            with connection.dbapi.cursor() as cursor:
                cursor.execute(f"SET timestamp = {self.now():.6f}")
            return await run(connection, statement, parameters, seconds)

        patch.setattr(PymysqlConnection, "run", told)


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def clock(request: pytest.FixtureRequest) -> Iterator[PostgresClock | MariaClock]:
    """Of a server of each kind."""
    require(request.param, local=True)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "postgresql":
            with PostgresServer() as postgresql:
                yield PostgresClock(postgresql)
        else:
            with MariaServer() as mariadb:
                yield MariaClock(mariadb, patch)


@pytest.mark.parametrize("season", CHANGES)
def test_change_of_summer_time_gives_no_second_holder(clock: PostgresClock | MariaClock, season: str) -> None:
    """
    In all modes at once: what is held stays held, what runs out does so after its ttl, and tokens increase.

    By the time of the wall, a ttl would end an hour early in spring, and last an hour longer in autumn.
    """
    change, before, later = CHANGES[season]
    assert (clock.wall(change - 60), clock.wall(change + 60)) == (before, later)
    with ExitStack() as stack:
        clients = {mode: stack.enter_context(lockkit.connect(clock.url, mode=mode)) for mode in MODES}
        others = {mode: stack.enter_context(lockkit.connect(clock.url, mode=mode)) for mode in MODES}
        clock.set_before(change)
        for client in (*clients.values(), *others.values()):
            client.lock("warm").acquire(PATIENCE).release()
        while True:
            clock.set_before(change)
            kept = {mode: client.lock("kept", ttl=LONG).acquire(PATIENCE) for mode, client in clients.items()}
            silent = {
                mode: client.lock("silent", ttl=TTL, renew=False).acquire(PATIENCE) for mode, client in clients.items()
            }
            if clock.now() < change:
                break
            for lease in (*kept.values(), *silent.values()):
                lease.release()  # too slow

        after = successors(others, silent)

        assert clock.now() > change
        for mode in MODES:
            assert after[mode].token > silent[mode].token
            after[mode].release()
            assert busy(others[mode].lock("kept"))
            kept[mode].extend()
            kept[mode].release()
            with others[mode].lock("kept", timeout=PATIENCE) as again:
                assert again.token > kept[mode].token


def successors(clients: dict[str, Client], former: dict[str, Lease]) -> dict[str, Lease]:
    """Wait in all modes for leases that nobody renews; give those that followed, when the former were over."""
    found: dict[str, Lease] = {}
    held: list[str] = []

    def wait(mode: str) -> None:
        lease = clients[mode].lock("silent", ttl=LONG).acquire(PATIENCE)
        if former[mode].held:
            held.append(mode)
        found[mode] = lease

    threads = [threading.Thread(target=wait, args=(mode,)) for mode in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    assert held == []
    assert set(found) == set(clients)
    return found
