"""mode=row and mode=advisory when something goes wrong: servers hang, waiters stop, sessions are ended."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import psycopg
import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Gone, Grant, LockBackend, Renewed, Unknown
from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql_session import session as sql_session
from lockkit.backends.sql_session.backend import SessionBackend
from lockkit.runtime import drive
from lockkit.testing.stopwatch import Stopwatch
from lockkit_tools.servers import MariaServer, PgBouncer, PostgresServer, require, wait_until
from tests.backends.sql_session.support import (
    LONG,
    MODES,
    PATIENCE,
    TTL,
    ModeServer,
    pid_of,
    queued,
)
from tests.backends.sql_table.support import demote
from tests.backends.support import Connect
from tests.tries import busy, tried, until, until_renewed

SLACK = 1.0  # for a busy machine
LIMITS = ("idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout", "transaction_timeout")
"""PostgreSQL's, by which an administrator ends transactions, sessions and waits; the last since PostgreSQL 17."""


def test_one_table_is_one_however_it_is_spelled(place: ModeServer, connect: Connect) -> None:
    """
    Clients that name it with and without its schema exclude each other, and see who holds; but not in another schema.

    That is another database on MariaDB, whose user locks are the server's.
    """
    name, schema = f"spelled_{place.mode}", "public" if place.is_postgresql else "lockkit"
    place.server.execute(f"CREATE {'SCHEMA' if place.is_postgresql else 'DATABASE'} IF NOT EXISTS elsewhere")
    plain, qualified, there = (
        connect(place.url, table=f"{prefix}{name}") for prefix in ("", f"{schema}.", "elsewhere.")
    )
    there.lock("connected", ttl=LONG).acquire(PATIENCE).release()
    for one, other in ((plain, qualified), (qualified, plain)):
        with one.lock("x", ttl=LONG) as lease, there.lock("x", ttl=LONG, timeout=PATIENCE) as another:
            assert busy(other.lock("x", ttl=LONG))
            assert [holder.owner for holder in other.holders("x")] == [lease.owner]
            assert [holder.owner for holder in there.holders("x")] == [another.owner]


def test_search_path_decides_which_table_is_meant(postgresql: PostgresServer, connect: Connect) -> None:
    """Of PostgreSQL: two logins may mean two tables by one name, or one table by two."""
    postgresql.execute("DO $$ BEGIN CREATE ROLE tenant LOGIN SUPERUSER; END $$")
    postgresql.execute("CREATE SCHEMA tenant")
    place = ModeServer(postgresql, "advisory")
    tenant = connect(place.url.replace("postgres@", "tenant@"), table="found")
    everybody = connect(place.url, table="found")
    spelled = connect(place.url, table="tenant.found")
    spelled.lock("x", ttl=LONG).acquire().release()  # makes the table
    with everybody.lock("x", ttl=LONG), tenant.lock("x", ttl=LONG, timeout=PATIENCE):
        assert busy(spelled.lock("x", ttl=LONG))


def test_index_is_built_concurrently_under_the_lock(on_postgresql: ModeServer, connect: Connect) -> None:
    """
    Though a waiter's statement is older: it makes way when it looks again, once in its ttl.

    Without that: the holder waits for CREATE INDEX, that waits for the waiter, and that for the holder.
    """
    holder, client = connect(on_postgresql.url), connect(on_postgresql.url)
    table = f"indexed_{on_postgresql.mode}"
    on_postgresql.server.execute(f"CREATE TABLE {table} (n int)")
    lease = holder.lock("index", ttl=LONG).acquire()
    got = queued(client, "index", ttl=TTL)
    with psycopg.connect(on_postgresql.server.url, autocommit=True) as connection:
        connection.execute("SET statement_timeout = '30s'")
        connection.execute(f"CREATE INDEX CONCURRENTLY ON {table} (n)".encode())
    assert not got.done()
    lease.release()
    got.result(PATIENCE).release()


def test_primary_that_was_demoted_is_left_for_the_one_that_took_over(connect: Connect) -> None:
    """
    Connections that may only read any more are replaced, and nothing is reported to those who lock.

    The kept ones of each mode; and in mode=row and mode=advisory that of a waiter to whom the lock is handed.
    """
    require("postgresql", local=True)
    with PostgresServer() as server:
        table = connect(server.url)
        held, released = (table.lock(name, ttl=LONG).acquire(PATIENCE) for name in ("x", "y"))
        handing = []
        for mode in MODES:
            client, other = (connect(server.url, mode=mode) for _ in range(2))
            kept = [client.lock(f"kept {number}", ttl=LONG).acquire(PATIENCE) for number in range(5)]
            lease = client.lock("handed", ttl=LONG).acquire(PATIENCE)
            for one in kept:
                one.release()
            handing.append((client, other, kept[0], lease, queued(other, "handed")))
        demote(server)

        released.release()
        with table.lock("y", ttl=LONG, timeout=PATIENCE) as another:
            assert another.token > released.token
        held.extend()
        held.release()
        for client, other, former, lease, got in handing:
            lease.release()
            assert got.result(PATIENCE).token > lease.token
            got.result().release()
            for holder in (client, other):
                again = tried(holder.lock("kept 0", ttl=LONG))
                assert again is not None, "free, though the client kept several sessions"
                assert again.token > former.token
                again.release()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop one process of the server meanwhile, and with it the session that it serves."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def renewal(backend: LockBackend, grant: Grant) -> Renewed | None:
    """Renew one lease; None if there is no answer."""
    (outcome,) = drive(backend.renew([grant]))
    return outcome if isinstance(outcome, Renewed) else None


@pytest.mark.parametrize("way", ["direct", "pooled"])
@pytest.mark.parametrize("mode", MODES)
def test_holder_and_waiter_outlive_the_limits_of_the_role(
    postgresql: PostgresServer, connect: Connect, mode: str, way: str
) -> None:
    """Those that this version has: a transaction that is the lock, and one that waits, are open for longer."""
    quoted = ", ".join(f"'{name}'" for name in LIMITS)
    known = postgresql.execute(f"SELECT name FROM pg_settings WHERE name IN ({quoted})").split()  # noqa: S608 - ours
    old = "SELECT count(*) FROM pg_stat_activity WHERE xact_start < clock_timestamp() - interval '1.5 s'"
    place = ModeServer(postgresql, mode)
    with ExitStack() as stack:
        if way == "pooled":
            require("pgbouncer", local=True)
        for name in known:
            postgresql.execute(f"ALTER ROLE postgres SET {name} = '1s'")
            stack.callback(postgresql.execute, f"ALTER ROLE postgres RESET {name}")
        address = stack.enter_context(PgBouncer(postgresql)).address if way == "pooled" else postgresql.address
        client, other = (connect(place.url.replace(postgresql.address, address)) for _ in range(2))
        lease = client.lock("long", ttl=LONG).acquire(PATIENCE)
        got = queued(other, "long")

        def both_are_old() -> bool:
            lease.check()
            return postgresql.execute(f"{old} AND backend_type = 'client backend'") == "2"

        until(both_are_old)
        assert lease.confirm()
        lease.release()
        assert got.result(PATIENCE).token > lease.token
        got.result().release()


def test_session_has_ended_once_the_server_says_so(
    on_postgresql: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL says FATAL, then frees what the session had, and closes its socket last: another may hold by then."""
    lease = connect(on_postgresql.url).lock("x", ttl=LONG, renew=False).acquire()
    session = lease._record.grant.state.session
    # Between the two: these are dropped first, which takes some 100 ms.
    tables = "BEGIN FOR n IN 1..1000 LOOP EXECUTE ''CREATE TEMP TABLE t'' || n || ''()''; END LOOP; END"
    monkeypatch.setattr(sql_session, "STATEMENT_SECONDS", PATIENCE)
    assert drive(session.turn.take(inf))
    session.answer_by = inf
    drive(session.run(Statement(f"DO '{tables}'")))
    session.turn.give()

    socket = os.dup(session.connection.fd)  # the client closes its own as soon as it reads the message
    try:
        on_postgresql.end(pid_of(lease))
        assert select.select([socket], [], [], PATIENCE)[0]
    finally:
        os.close(socket)

    assert session.ended
    with pytest.raises(lockkit.LockLost):
        lease.release()


def test_lease_that_comes_while_the_watch_ends_is_watched(
    on_postgresql: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch has found for a while that nothing is held, and another thread acquires before it has ended."""
    monkeypatch.setattr("lockkit.backends.sql_session.backend.LINGER_SECONDS", 0.0)
    client = connect(on_postgresql.url)
    first = client.lock("first", ttl=LONG, renew=False).acquire(PATIENCE)
    backend = client._engine.client.backend
    assert isinstance(backend, SessionBackend)
    wait, waiting, leases = backend._watch.wait, threading.Event(), list[lockkit.Lease]()

    async def wait_and_acquire(seconds: float) -> None:
        waiting.set()
        await wait(seconds)
        if not backend._held and not leases:
            leases.append(client.lock("second", ttl=LONG, renew=False).acquire(PATIENCE))

    monkeypatch.setattr(backend._watch, "wait", wait_and_acquire)
    assert waiting.wait(PATIENCE)
    first.release()
    until(lambda: bool(leases))
    on_postgresql.end(pid_of(leases[0]))
    assert leases[0].wait_lost(PATIENCE)


class TestHungServers:
    """A server that is stopped: its port and its connections stay open, and nothing is answered."""

    def test_leaving_while_a_renewal_hangs_is_back_in_time(self, place: ModeServer, connect: Connect) -> None:
        """It has the session when the release wants it."""
        lease = connect(place.url).lock("renewed", ttl=9.0).acquire()
        session = lease._record.grant.state.session
        place.server.pause()
        try:
            wait_until(lambda: None if session.unanswered else "no renewal yet")
            watch = Stopwatch()
            with pytest.raises(lockkit.LockError):
                lease.release()
            assert watch.stop() < 4.5 + SLACK
        finally:
            place.server.resume()

    def test_session_that_hangs_loses_its_own_lease_only(self, on_postgresql: ModeServer, connect: Connect) -> None:
        """A round of renewals waits for it no longer than the other leases can."""
        client = connect(on_postgresql.url)
        hanging, *others = (client.lock(name, ttl=4.4).acquire(PATIENCE) for name in ("hangs", "one", "two"))
        with stopped(pid_of(hanging)):
            assert hanging.wait_lost(PATIENCE)
            until_renewed(*others)
        for lease in others:
            lease.release()

    def test_renewals_wait_for_as_long_as_the_leases_that_are_held_can(
        self, on_postgresql: ModeServer, connect: Connect
    ) -> None:
        """A lease of a short ttl that has ended takes no time from the others."""
        client = connect(on_postgresql.url)
        client.lock("short", ttl=1.5).acquire(PATIENCE).release()
        lease = client.lock("long", ttl=LONG, renew=False).acquire(PATIENCE)
        grant, backend = lease._record.grant, client._engine.client.backend
        assert isinstance(backend, SessionBackend)
        until(lambda: len(backend._held) == 1)
        with stopped(pid_of(lease)):
            watch = Stopwatch()
            assert isinstance(drive(backend.renew([grant]))[0], Unknown)
            assert watch.stop() > 1.0
        lease.release()

    def test_late_answer_to_a_renewal_counts_from_when_it_was_sent(
        self, on_postgresql: ModeServer, connect: Connect
    ) -> None:
        """The next renewal reads it, unless another ttl is asked for."""
        client = connect(on_postgresql.url)
        lease = client.lock("late", ttl=6.0, renew=False).acquire(PATIENCE)
        grant, backend = lease._record.grant, client._engine.client.backend
        assert backend is not None
        now = client._engine.runtime.now
        for ttl in (6.0, LONG):
            with stopped(pid_of(lease)):
                before = now()
                assert isinstance(drive(backend.renew([grant]))[0], Unknown)
                after = now()
            renewed = until(partial(renewal, backend, replace(grant, ttl=ttl)))
            assert renewed.anchor is not None
            assert renewed.ttl == ttl
            assert before <= renewed.anchor
            assert (renewed.anchor <= after) == (ttl == grant.ttl)
        lease.release()

    def test_renewal_that_waits_for_its_turn_leaves_a_released_session_alone(
        self, place: ModeServer, connect: Connect
    ) -> None:
        """The session may be another lock's by then, whose answers it would take."""
        client = connect(place.url)
        lease = client.lock("turn", ttl=LONG).acquire()
        grant = lease._record.grant
        session, backend = grant.state.session, client._engine.client.backend
        assert backend is not None
        outcomes: list[Any] = []
        assert drive(session.turn.take(inf))  # a release is under way
        renewal = threading.Thread(target=lambda: outcomes.extend(drive(backend.renew([grant]))))
        renewal.start()
        wait_until(lambda: None if session.turn._free._sleepers else "it does not wait for its turn yet")
        grant.state.session = None  # released
        session.turn.give()
        renewal.join(PATIENCE)

        assert outcomes == [Gone("session")]
        assert not session.unanswered
        grant.state.session = session
        lease.release()

    def test_attempt_behind_a_locked_table_is_back_in_time(self, on_postgresql: ModeServer, connect: Connect) -> None:
        """And nothing of it stays at the server."""
        client = connect(on_postgresql.url)
        client.lock("behind", ttl=LONG).acquire().release()
        table = "lockkit_rows" if on_postgresql.mode == "row" else "lockkit_advisory"
        with psycopg.connect(on_postgresql.server.url) as locker:
            locker.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
            watch = Stopwatch()
            with pytest.raises(lockkit.BackendUnavailable):
                client.lock("behind", ttl=LONG).acquire(0)
            assert watch.stop() < 0.5 + SLACK
        with client.lock("behind", ttl=LONG, timeout=PATIENCE):
            pass


@pytest.mark.parametrize("mode", MODES)
def test_new_names_are_locked_with_a_log_of_statements(mode: str) -> None:
    """InnoDB locks gaps then, and lockkit's own INSERT must not wait for its own lock."""
    require("mariadb", local=True)
    settings = {
        "log-bin": "binlog",
        "binlog-format": "STATEMENT",
        "server-id": "1",
        # At this level InnoDB writes no log of statements: lockkit sets its own.
        "transaction-isolation": "READ-COMMITTED",
    }
    with MariaServer(settings=settings) as server, lockkit.connect(f"{server.url}?mode={mode}") as client:
        for number in range(3):
            with client.lock(f"new {number}", ttl=LONG, timeout=PATIENCE):
                pass
