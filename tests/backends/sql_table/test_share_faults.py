"""Readers and permits of the lock table while the world behaves badly: races for the last one, dead and cut readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockkit.sync import Client
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.backends.sql_table.support import Connect

pytestmark = pytest.mark.timeout(180)

PATIENCE = 60.0
LONG = 600.0
ROUNDS = 5
RACERS = 16


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """One of each kind."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


def test_sixteen_connections_race_for_the_last_permit(server: PostgresServer | MariaServer, connect: Connect) -> None:
    """Never more holders than the limit, with two limits than the larger one, and no slot twice."""
    server.execute("DROP TABLE IF EXISTS lockkit_locks")
    mutex, slots, wrong = threading.Lock(), [0, 1], []
    held = [connect(server.url).semaphore("last", limit=3, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    assert [permit.slot for permit in held] == slots

    def run(limit: int, limit_max: int) -> None:
        semaphore = connect(server.url).semaphore("last", limit=limit, ttl=LONG)
        for _ in range(ROUNDS):
            with semaphore.acquire(PATIENCE) as permit:
                assert permit.slot is not None
                with mutex:
                    if permit.slot in slots or len(slots) >= limit_max:
                        wrong.append((permit.slot, *slots))
                    slots.append(permit.slot)
                with mutex:
                    slots.remove(permit.slot)

    for limits in ([3] * RACERS, [3, 4] * (RACERS // 2)):
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(run, limits, [max(limits)] * RACERS))
    assert wrong == []
    for permit in held:
        permit.release()


def test_sixteen_connections_read_and_write(server: PostgresServer | MariaServer, connect: Connect) -> None:
    """No writer beside a reader or another writer; tokens grow from each writer to whatever comes after it."""
    clients = [connect(server.url) for _ in range(RACERS)]
    mutex, readers, writers, newest, wrong = threading.Lock(), 0, 0, 0, []

    def run(client: Client, write: bool) -> None:  # noqa: FBT001 - a test's
        nonlocal readers, writers, newest
        lock = client.rwlock("both", ttl=LONG, timeout=PATIENCE)
        for _ in range(4):
            with lock.write() if write else lock.read() as lease:
                with mutex:
                    readers, writers = readers + (not write), writers + write
                    if writers > 1 or (writers and readers) or lease.token <= newest:
                        wrong.append((readers, writers, lease.token, newest))
                    newest = lease.token if write else newest
                with mutex:
                    readers, writers = readers - (not write), writers - write

    with ThreadPoolExecutor(RACERS) as pool:
        list(pool.map(run, clients, [True, False, False, False] * (RACERS // 4)))
    assert wrong == []
    assert newest > 0
