"""What the failover of a PostgreSQL primary does to locks, and how tokens keep the first holder out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import sqlalchemy as sa

import lockkit
from lockkit.fencing import SqlGuard
from lockkit.sql import lock_in
from lockkit_tools.servers import FaultProxy, PostgresServer, require, wait_until
from tests.backends.sql_table.support import Standby
from tests.storage.sql.support import Base


class Pair(NamedTuple):
    """A primary and its replica, whose replication can be cut."""

    primary: PostgresServer
    replica: PostgresServer
    link: FaultProxy

    def cut(self) -> None:
        """Wait until the replica has all that the primary has, and let nothing more through to it."""
        position = self.primary.execute("SELECT pg_current_wal_flush_lsn()")
        asked = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
        wait_until(lambda: None if self.replica.execute(asked) == "t" else "the replica lags behind", timeout=30.0)
        self.link.blackhole()

    def fail_over(self) -> None:
        """Crash the primary and promote the replica."""
        self.primary.kill()
        assert self.replica.execute("SELECT pg_promote(wait_seconds => 60)") == "t"


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary and its replica."""
    require("postgresql", local=True)
    with PostgresServer() as primary, FaultProxy(primary.host, primary.port) as link, Standby(primary, link) as replica:
        yield Pair(primary, replica, link)


def base(server: PostgresServer) -> Base:
    """Its database."""
    return Base("postgresql", server.url.partition("://")[2])


def test_promoted_replica_grants_a_second_holder_and_the_guard_rejects_the_first(pair: Pair) -> None:
    """Nobody can prevent it where replication is asynchronous; the second one has the higher token."""
    modes = ("table", "row", "advisory")
    with ExitStack() as stack:
        one, two = (
            {mode: stack.enter_context(lockkit.connect(f"{server.url}?mode={mode}")) for mode in modes}
            for server in (pair.primary, pair.replica)
        )
        for mode in modes:
            one[mode].lock("made before").acquire(timeout=30).release()
        pair.cut()
        firsts = [one[mode].lock(mode, ttl=600, renew=False).acquire(timeout=30) for mode in modes]
        pair.fail_over()
        engine = stack.enter_context(base(pair.replica).engine())
        for mode, first in zip(modes, firsts, strict=True):
            second = two[mode].lock(mode, ttl=600).acquire(timeout=30)

            if mode == "table":
                assert first.held  # it cannot know; the others lose their connection, and are told
            else:
                assert first.wait_lost(30)
            assert second.token > first.token
            with engine.begin() as connection:
                SqlGuard(connection).accept(mode, token=second.token)
            with engine.begin() as connection, pytest.raises(lockkit.StaleToken):
                SqlGuard(connection).accept(mode, token=first.token)
            second.release()


def test_transaction_with_a_lock_is_lost_with_its_primary_and_tokens_go_on(pair: Pair) -> None:
    """Work and lock are one: what the promoted replica does not know was not committed, or lost with the lock."""
    with base(pair.primary).engine() as engine:
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE work (token bigint)"))
            lock_in(connection, "x")
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
