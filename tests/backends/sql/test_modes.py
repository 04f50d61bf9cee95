"""What docs/explanation/sql-modes.md says of connections, transactions and isolation levels that nothing else shows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

import lockkit
from lockkit.sql import lock_in
from lockkit_tools.servers import PgBouncer, PostgresServer, require, wait_until
from tests.storage.sql.support import Base


def base(server: PostgresServer | PgBouncer) -> Base:
    """Its database."""
    return Base("postgresql", server.url.partition("://")[2])


@pytest.mark.parametrize(("mode", "least", "most"), [("table", 1, 5), ("row", 20, 24), ("advisory", 20, 24)])
def test_connections_of_twenty_held_locks(postgresql: PostgresServer, mode: str, least: int, most: int) -> None:
    """A held lock is a row in one mode, and a connection in the others; also if all are wanted at once."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    wait_until(lambda: None if postgresql.execute(asked) == "1" else "others are still connected", timeout=30.0)
    with lockkit.connect(f"{postgresql.url}?mode={mode}") as client:
        with ThreadPoolExecutor(20) as pool:
            leases = list(pool.map(lambda number: client.lock(f"x{number}", ttl=60).acquire(timeout=30), range(20)))

        assert least <= int(postgresql.execute(asked)) - 1 <= most  # -1: who asks
        for lease in leases:
            lease.release()


def test_lock_released_before_the_commit_lets_the_next_one_read_old_data(postgresql: PostgresServer) -> None:
    """Why a lock that protects what a transaction does has to end with the transaction, or after it."""
    with base(postgresql).engine() as engine:
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE stock AS SELECT 1 AS pieces"))
        sold = 0
        with lockkit.connect(postgresql.url) as client, engine.connect() as one, engine.connect() as two:
            for connection in (one, two):
                with client.lock("stock"):
                    if connection.execute(sa.text("SELECT pieces FROM stock")).scalar_one() > 0:
                        sold += 1
                        if connection is one:
                            connection.execute(sa.text("UPDATE stock SET pieces = pieces - 1"))
                # Here the lock is free, and nothing is committed.
            one.commit()
        assert sold == 2

        sold = 0
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE stock SET pieces = 1"))
        for _ in range(2):
            with engine.begin() as connection:
                lock_in(connection, "stock")
                if connection.execute(sa.text("SELECT pieces FROM stock")).scalar_one() > 0:
                    sold += 1
                    connection.execute(sa.text("UPDATE stock SET pieces = pieces - 1"))
        assert sold == 1


def test_lock_in_a_transaction_behind_a_pooler(postgresql: PostgresServer) -> None:
    """In transaction mode, pgbouncer keeps a server connection for a transaction, and so for its locks."""
    require("pgbouncer", local=True)
    # What SQLAlchemy recommends behind a pooler.
    options = {"poolclass": NullPool, "connect_args": {"prepare_threshold": None}}
    tokens = []
    with (
        PgBouncer(postgresql, pool_mode="transaction", pool_size=2) as pooler,
        base(pooler).engine(**options) as engine,
    ):
        for _ in range(3):
            with engine.begin() as holder, engine.begin() as waiter:
                tokens.append(lock_in(holder, "x").token)
                with pytest.raises(lockkit.LockTimeout):
                    lock_in(waiter, "x", timeout=0.1)
                assert waiter.execute(sa.text("SHOW lock_timeout")).scalar_one() == "0"
    assert tokens == sorted(set(tokens))
