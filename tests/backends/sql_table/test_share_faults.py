"""Readers and permits of the lock table while the world behaves badly: races for the last one, dead and cut readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import lockkit
from lockkit.sync import Client
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.backends.sql_table.support import Connect

pytestmark = pytest.mark.timeout(180)

PATIENCE = 60.0
LONG = 600.0
SHORT = 1.0
ROUNDS = 60
RACERS = 16


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | MariaServer]:
    """One of each kind."""
    require(request.param, local=True)
    with PostgresServer() if request.param == "postgresql" else MariaServer() as made:
        yield made


class Witness:
    """Counts those who hold a permit, outside the database."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.slots: set[int] = set()
        self.twice: list[int] = []
        self._mutex = threading.Lock()

    def enter(self, slot: int) -> None:
        """See one more holder."""
        with self._mutex:
            self.now += 1
            self.most = max(self.most, self.now)
            if slot in self.slots:
                self.twice.append(slot)
            self.slots.add(slot)

    def leave(self, slot: int) -> None:
        """See one fewer."""
        with self._mutex:
            self.now -= 1
            self.slots.discard(slot)


def race(clients: list[Client], limits: list[int], witness: Witness) -> int:
    """Let each client try at the same moment to get a permit; return how many got one."""
    start, answered = threading.Barrier(len(clients)), threading.Barrier(len(clients))
    won: list[int] = []

    def run(client: Client, limit: int) -> None:
        permit, slot = None, 0
        start.wait(PATIENCE)
        # Unavailable: the machine was too busy to answer a single try in time.
        with suppress(lockkit.BackendUnavailable):
            permit = client.semaphore("last", limit=limit, ttl=LONG).try_acquire()
        if permit is not None:
            slot = permit.slot or 0
            witness.enter(slot)
            won.append(slot)
        answered.wait(PATIENCE)
        if permit is not None:
            witness.leave(slot)
            permit.release()

    threads = [threading.Thread(target=run, args=pair) for pair in zip(clients, limits, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return len(won)


def test_sixteen_connections_race_for_the_last_permit(server: PostgresServer | MariaServer, connect: Connect) -> None:
    """No round admits more than the limit, nor gives a slot twice; with two limits, no more than the larger one."""
    server.execute("DROP TABLE IF EXISTS lockkit_locks")
    holder, clients, witness = connect(server.url), [connect(server.url) for _ in range(RACERS)], Witness()
    held = [holder.semaphore("last", limit=3, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    for permit in held:
        witness.enter(permit.slot or 0)
    for client in clients:
        client.ping()

    wins = [race(clients, [3] * RACERS, witness) for _ in range(ROUNDS)]
    assert witness.most <= 3
    wins += [race(clients, [3, 4] * (RACERS // 2), witness) for _ in range(ROUNDS // 4)]

    assert witness.most <= 4
    assert witness.twice == []
    assert sum(wins) > ROUNDS // 2  # else this shows nothing
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

    threads = [threading.Thread(target=run, args=(client, index % 4 == 0)) for index, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    assert wrong == []
    assert newest > 0
