"""What the failover of a PostgreSQL primary does to locks, and how tokens keep the first holder out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

import lockkit
from lockkit.fencing import SqlGuard
from lockkit.sql import lock_in
from lockkit_tools.servers import FaultProxy, PostgresServer, require, wait_until
from lockkit_tools.servers.binaries import find_program
from tests.storage.sql.support import Base


class Pair:
    """
    A primary and its replica, whose replication can be cut.

    Attributes:
        primary: Where everybody writes at first.
        replica: Copies it through a proxy.
    """

    def __init__(self, primary: PostgresServer, replica: PostgresServer, link: FaultProxy) -> None:
        """Take what has been started."""
        self.primary = primary
        self.replica = replica
        self._link = link

    def wait_for_copy(self) -> None:
        """Wait until the replica has all that the primary has."""
        position = self.primary.execute("SELECT pg_current_wal_flush_lsn()")
        asked = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
        wait_until(lambda: None if self.replica.execute(asked) == "t" else "the replica lags behind", timeout=30.0)

    def cut(self) -> None:
        """Let nothing more through to the replica."""
        self._link.blackhole()

    def fail_over(self) -> None:
        """Crash the primary and promote the replica."""
        self.primary.kill()
        assert self.replica.execute("SELECT pg_promote(wait_seconds => 60)") == "t"


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary and its replica in sync."""
    require("postgresql", local=True)
    with PostgresServer() as primary, FaultProxy(primary.host, primary.port) as link:
        replica = PostgresServer()
        # Made beforehand, so that it takes the copy for its own cluster.
        program = str(find_program("pg_basebackup", "postgres").with_name("pg_basebackup"))
        where = f"host={link.host} port={link.port} user=postgres"
        replica.run(program, "-D", str(replica.data), "-d", where, "-R", "--checkpoint=fast", "--no-sync")
        with replica:
            pair = Pair(primary, replica, link)
            pair.wait_for_copy()
            yield pair


def base(server: PostgresServer) -> Base:
    """Its database."""
    return Base("postgresql", server.url.partition("://")[2])


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
def test_promoted_replica_grants_a_second_holder_and_the_guard_rejects_the_first(pair: Pair, mode: str) -> None:
    """Nobody can prevent it where replication is asynchronous; the second one has the higher token."""
    with lockkit.connect(f"{pair.primary.url}?mode={mode}") as client:
        client.lock("made before").acquire(timeout=30).release()
    pair.wait_for_copy()
    pair.cut()

    with (
        lockkit.connect(f"{pair.primary.url}?mode={mode}") as one,
        lockkit.connect(f"{pair.replica.url}?mode={mode}") as two,
    ):
        first = one.lock("x", ttl=600, renew=False).acquire(timeout=30)
        pair.fail_over()
        second = two.lock("x", ttl=600).acquire(timeout=30)

        if mode == "table":
            assert first.held  # it cannot know; the others lose their connection, and are told
        else:
            assert first.wait_lost(30)
        assert second.token > first.token
        with base(pair.replica).engine() as engine:
            with engine.begin() as connection:
                SqlGuard(connection).accept("x", token=second.token)
            with engine.begin() as connection, pytest.raises(lockkit.StaleToken):
                SqlGuard(connection).accept("x", token=first.token)
        second.release()


def test_transaction_with_a_lock_is_lost_with_its_primary_and_tokens_go_on(pair: Pair) -> None:
    """Work and lock are one: what the promoted replica does not know was not committed, or lost with the lock."""
    with base(pair.primary).engine() as engine:
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE work (token bigint)"))
            lock_in(connection, "x")
        pair.wait_for_copy()
        pair.cut()
        tokens = []
        # More than the 32 numbers that PostgreSQL logs ahead.
        for _ in range(50):
            with engine.begin() as connection:
                tokens.append(lock_in(connection, "x").token)
        with engine.connect() as connection:
            tokens.append(lock_in(connection, "x").token)
            connection.execute(sa.text("INSERT INTO work VALUES (:token)"), {"token": tokens[-1]})
            pair.fail_over()
            with pytest.raises(sa.exc.DBAPIError):
                connection.execute(sa.text("SELECT 1"))

    with base(pair.replica).engine() as engine, engine.begin() as connection:
        assert lock_in(connection, "x", timeout=30).token > max(tokens)
        assert connection.execute(sa.text("SELECT count(*) FROM work")).scalar_one() == 0
