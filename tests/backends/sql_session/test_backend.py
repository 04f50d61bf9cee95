"""mode=row and mode=advisory on real servers, that are killed, stopped, cut off, and asked for what they refuse."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest
import sqlalchemy

import lockkit
import lockkit.aio
from lockkit.backend import Busy, Mode, Request
from lockkit.backends.sql.connection import Parameter, Statement
from lockkit.backends.sql_session import mysql
from lockkit.backends.sql_session.backend import SessionBackend
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.session import Key, Session
from lockkit.runtime import drive
from lockkit.sync import Lease
from lockkit.testing.witness import Witness
from lockkit_tools.servers import MariaServer, PooledPostgres, require, wait_until
from tests.backends.sql_session.support import (
    LONG,
    MODES,
    PATIENCE,
    TTL,
    ModeServer,
    open_backend,
    pid_of,
    queued,
    until_waiting,
    waiting_pid,
)
from tests.backends.sql_table.support import DRIVERS, counted, with_driver
from tests.backends.support import Connect, StubHost, granted
from tests.tries import busy, until_renewed


def sent_from_now_on(monkeypatch: pytest.MonkeyPatch) -> list[Statement]:
    """Collect what is sent in the sessions of locks."""
    sent: list[Statement] = []
    send = Session.send

    def collecting(self: Session, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        sent.append(statement)
        send(self, statement, parameters)

    monkeypatch.setattr(Session, "send", collecting)
    return sent


class TestConnections:
    """A connection is the lock."""

    def test_holder_whose_connection_is_ended_is_told_and_replaced(self, place: ModeServer, connect: Connect) -> None:
        """By whomever: the waiter has the lock at once, the holder is told by its next renewal."""
        client, other = connect(place.url), connect(place.url)
        lease = client.lock("ended", ttl=LONG).acquire()
        reasons: list[str] = []
        lease.on_lost(lambda _, reason: reasons.append(reason))
        waiter = queued(other, "ended")

        place.end(pid_of(lease))

        got = waiter.result(PATIENCE)
        assert got.token > lease.token
        assert lease.wait_lost(PATIENCE)
        wait_until(lambda: None if reasons == ["session"] else f"told {reasons}")
        with pytest.raises(lockkit.LockLost):
            lease.release()
        assert got.confirm()
        got.release()

    def test_release_of_a_lease_whose_connection_was_ended_says_so(self, place: ModeServer, connect: Connect) -> None:
        """Before any renewal has noticed: the work was not protected to its end."""
        client = connect(place.url)
        lease = client.lock("unnoticed", ttl=LONG).acquire()
        pid = pid_of(lease)
        place.end(pid)
        wait_until(lambda: None if client.holders("unnoticed") == [] else "not ended yet")
        if place.is_postgresql:  # which frees the locks a moment before it says why, and closes the connection
            wait_until(lambda: "still runs" if Path("/proc", str(pid)).exists() else None)

        with pytest.raises(lockkit.LockLost):
            lease.release()

    def test_error_in_the_session_of_a_lock(self, on_postgresql: ModeServer, connect: Connect) -> None:
        """It ends the transaction that has locked a row, and COMMIT would not tell. An advisory lock outlives it."""
        client, other = connect(on_postgresql.url), connect(on_postgresql.url)
        lease = client.lock("aborted", ttl=LONG).acquire(PATIENCE)
        with pytest.raises(psycopg.errors.DivisionByZero):
            drive(lease._record.grant.state.session.run(Statement("SELECT 1/0")))

        if on_postgresql.mode == "advisory":
            assert busy(other.lock("aborted", ttl=LONG))
            lease.release()
        with other.lock("aborted", ttl=LONG, timeout=PATIENCE) as after:
            if on_postgresql.mode == "row":
                with pytest.raises(lockkit.LockLost):
                    lease.release()
        assert after.token > lease.token

    def test_statement_that_the_server_has_forgotten_is_planned_anew(
        self, on_postgresql: ModeServer, connect: Connect
    ) -> None:
        """As when a pool has dropped it, or the text that plans it was cancelled halfway."""
        client = connect(on_postgresql.url)
        lease = client.lock("planned", ttl=LONG).acquire()
        session = lease._record.grant.state.session
        lease.release()
        drive(session.run(Statement("DEALLOCATE ALL")))

        again = client.lock("planned", ttl=LONG).acquire(TTL)

        assert again._record.grant.state.session is session
        again.release()

    def test_waiter_whose_statement_is_cancelled_waits_on(self, place: ModeServer, connect: Connect) -> None:
        """An administrator's cancel, or a limit of the server's, is no grant."""
        client, other = connect(place.url), connect(place.url)
        lease = client.lock("cancelled", ttl=LONG).acquire()
        got = queued(other, "cancelled")
        pid = waiting_pid(other, "cancelled")

        place.server.execute(f"SELECT pg_cancel_backend({pid})" if place.is_postgresql else f"KILL QUERY {pid}")

        time.sleep(0.2)
        assert not got.done()
        assert [holder.owner for holder in client.holders("cancelled")] == [lease.owner]
        until_waiting(other, "cancelled")
        lease.release()
        assert got.result(PATIENCE).token > lease.token
        got.result().release()

    @pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
    def test_free_advisory_lock_is_one_round_trip_each(
        self, kind: str, request: pytest.FixtureRequest, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lease is written where the lock is taken, and others see it."""
        client = connect(request.getfixturevalue(kind).url, mode="advisory")
        client.lock("trips", ttl=LONG).acquire().release()
        sent = sent_from_now_on(monkeypatch)

        with counted(monkeypatch) as beside:
            lease = client.lock("trips", ttl=LONG).acquire()
            assert (len(sent), beside) == (1, [])
            lease.release()
            assert (len(sent), beside) == (2, [])
            lease = client.lock("trips", ttl=LONG).acquire()
        (holder,) = client.holders("trips")
        assert (holder.owner, holder.token) == (lease.owner, lease.token)
        assert holder.metadata["pid"] == os.getpid()
        lease.release()

    def test_hand_over_is_one_round_trip_each(
        self, place: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        The holder's release, and the waiter's proof that the lock it was granted is still held.

        Where the lease is written on another connection, the proof is under way meanwhile.
        """
        client, other = connect(place.url), connect(place.url)
        for each in (client, other):
            each.lock("over", ttl=LONG, timeout=PATIENCE).acquire().release()
        lease = client.lock("over", ttl=LONG).acquire(PATIENCE)

        waiter = queued(other, "over")
        sent, sent_before = sent_from_now_on(monkeypatch), []
        with counted(monkeypatch) as beside:
            write = Locking.write

            async def noted(self: Locking, *arguments: Any) -> int | None:
                sent_before.append(len(sent))
                return await write(self, *arguments)

            monkeypatch.setattr(Locking, "write", noted)
            lease.release()
            got = waiter.result(PATIENCE)

        mariadb_limits = 1 if not place.is_postgresql and place.mode == "advisory" else 0
        assert len(sent) == 2 + mariadb_limits
        assert len(beside) == (1 if place.mode == "row" else 0)
        assert sent_before == ([2] if place.mode == "row" else [])
        if place.is_postgresql:
            counts = [statement.text.count(";") + 1 for statement in sent]
            assert counts == ([1, 1] if place.mode == "row" else [2, 2])
        assert got.token > lease.token
        got.release()
        assert client.holders("over") == []
        client.lock("over", ttl=LONG).acquire(PATIENCE).release()

    def test_row_of_mysql_is_freed_in_two_messages(
        self, mariadb: MariaServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if the server said that it is MySQL, which has no blocks: nothing stays locked."""
        monkeypatch.setattr(mysql, "_LOOK", Statement("SELECT CONNECTION_ID(), '8.0.40'"))
        monkeypatch.setattr(mysql, "_NO_OTHER_LIMIT", mysql._MARIADB_NO_OTHER_LIMIT)
        client, other = connect(mariadb.url, mode="row"), connect(mariadb.url, mode="row")
        client.lock("freed", ttl=LONG).acquire().release()
        sent = sent_from_now_on(monkeypatch)

        client.lock("freed", ttl=LONG).acquire().release()

        assert len(sent) == 3
        assert client.holders("freed") == []
        other.lock("freed", ttl=LONG).acquire(PATIENCE).release()

    def test_pool_that_is_used_up_says_so(self, place: ModeServer, connect: Connect) -> None:
        """Of an application's engine, or by ``pool_size``; when a lock is released there is room again."""
        engine = sqlalchemy.create_engine(with_driver(place.server.url, DRIVERS), pool_size=3, max_overflow=2)
        used_up = r"pool of {} connections .* is used up.*pool_size, or mode=table".format
        with lockkit.from_client(engine, mode=place.mode) as given:
            for client, size in ((given, 5), (connect(place.url, pool_size=2), 2)):
                leases = [client.lock(f"pool {number}", ttl=LONG).acquire(PATIENCE) for number in range(size)]

                with pytest.raises(lockkit.BackendUnavailable, match=used_up(size)):
                    client.lock("pool 5", ttl=LONG).acquire(0)

                leases.pop().release()
                client.lock("pool 5", ttl=LONG).acquire(PATIENCE).release()
                for lease in leases:
                    lease.release()
        engine.dispose()


class TestGrants:
    """When a grant counts, and what is written."""

    @pytest.mark.parametrize("mode", ["exclusive", "shared"])
    @pytest.mark.parametrize("where", ["postgresql-row", "mariadb-row", "postgresql-advisory"])
    def test_lease_is_not_written_by_who_was_thrown_out_meanwhile(
        self, where: str, mode: Mode, request: pytest.FixtureRequest, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        Between the database's grant and our writing of it. In mode=advisory that is two things behind a pooler only.

        A is granted the lock, and is stopped. A is thrown out. B is granted it, and writes its lease.
        A wakes: it must neither believe that it holds, nor write over B's lease, nor beside it with a larger token.
        """
        kind, _, sql_mode = where.partition("-")
        place = ModeServer(request.getfixturevalue(kind), sql_mode)
        monkeypatch.setattr(Session, "pooled", sql_mode == "advisory")
        host = StubHost()
        slow: SessionBackend = open_backend(place, host)
        other = connect(place.url)
        write = slow._locking.write
        theirs: list[Lease] = []

        async def stopped(wanted: Request, key: Key, session: Session, identity: int) -> int | None:
            if not theirs:
                place.end(session.pid)
                theirs.append(other.lock("thrown out", ttl=LONG).acquire(PATIENCE))
            return await write(wanted, key, session, identity)

        slow._locking.write = stopped  # type: ignore[method-assign, assignment]
        wanted = host.request("thrown out", ttl=LONG)
        wanted.mode = mode
        with other.lock("thrown out", ttl=LONG):
            assert isinstance(drive(slow.try_acquire(wanted)), Busy)
        wait_until(lambda: None if wanted.state.session.answered else "not granted yet")

        outcome = drive(slow.try_acquire(wanted))

        assert isinstance(outcome, Busy)
        assert theirs[0].confirm()
        (holder,) = other.holders("thrown out")
        assert (holder.owner, holder.token, holder.mode) == (theirs[0].owner, theirs[0].token, "exclusive")
        theirs[0].release()
        wait_until(lambda: None if wanted.state.session.answered else "not granted yet")
        grant = granted(drive(slow.try_acquire(wanted)))
        assert grant.token > theirs[0].token
        assert drive(slow.release(grant))
        drive(slow.close())

    def test_grant_that_was_found_late_is_not_believed(self, place: ModeServer, connect: Connect) -> None:
        """
        A waiter that was stopped in the queue: the server granted it the lock, and threw it out after its ttl.

        What the queue's answer says was true once. The session must answer again, and it has ended.
        """
        host = StubHost()
        waiter: SessionBackend = open_backend(place, host)
        other = connect(place.url)
        lease = other.lock("late", ttl=LONG).acquire()
        request = host.request("late", ttl=1.0)
        assert isinstance(drive(waiter.try_acquire(request)), Busy)
        pid = request.state.session.pid

        lease.release()
        wait_until(lambda: None if request.state.session.answered else "not granted yet")
        after = other.lock("late", ttl=LONG).acquire(PATIENCE)  # once the server has thrown the waiter out

        with pytest.raises(lockkit.BackendUnavailable):
            drive(waiter.try_acquire(request))
        assert after.confirm()
        drive(waiter.abandon(request))
        again = host.request("late", ttl=1.0, queue=False)
        assert isinstance(drive(waiter.try_acquire(again)), Busy)
        after.release()
        grant = granted(drive(waiter.try_acquire(host.request("late", ttl=30.0, queue=False))))
        assert grant.token > after.token
        assert grant.state.session.pid != pid
        assert drive(waiter.release(grant))
        drive(waiter.close())

    def test_waiter_that_leaves_before_the_server_has_begun_leaves_nothing(
        self, on_postgresql: ModeServer, connect: Connect
    ) -> None:
        """A cancel that comes before the statement is forgotten by the server; it must come again."""
        host = StubHost()
        waiter: SessionBackend = open_backend(on_postgresql, host)
        other = connect(on_postgresql.url)
        request = host.request("early", ttl=LONG)
        enqueue = waiter._locking.enqueue

        async def stop_first(session: Session, key: Key, limit: int) -> None:
            os.kill(session.pid, signal.SIGSTOP)
            await enqueue(session, key, limit)

        waiter._locking.enqueue = stop_first  # type: ignore[method-assign]
        with other.lock("early", ttl=LONG):
            assert isinstance(drive(waiter.try_acquire(request)), Busy)
            going_on = threading.Timer(0.3, os.kill, (request.state.session.pid, signal.SIGCONT))
            going_on.start()

            drive(waiter.abandon(request))

            going_on.join()
            wait_until(lambda: None if [one.waiters for one in other.holders("early")] == [0] else "somebody waits")
        drive(waiter.close())

    def test_ttl_of_a_grant_from_the_queue_counts_from_our_look(self, place: ModeServer, connect: Connect) -> None:
        """Not from when we joined the queue (too early to be of use), nor from when the answer was read."""
        host = StubHost()
        waiter: SessionBackend = open_backend(place, host)
        other = connect(place.url)
        lease = other.lock("look", ttl=LONG).acquire()
        request = host.request("look", ttl=30.0)
        assert isinstance(drive(waiter.try_acquire(request)), Busy)
        lease.release()
        wait_until(lambda: None if request.state.session.answered else "not granted yet")

        before = host.runtime.now()
        grant = granted(drive(waiter.try_acquire(request)))

        assert grant.anchor is not None
        assert before <= grant.anchor <= host.runtime.now()
        assert drive(waiter.release(grant))
        drive(waiter.close())

    def test_token_is_above_the_last_though_the_clock_is_behind_it(self, place: ModeServer, connect: Connect) -> None:
        """As after a clock that was set back, and also when the holder's connection was ended."""
        client = connect(place.url)
        client.lock("clock", ttl=LONG).acquire().release()
        ahead = 4_102_444_800_000_000  # 2100
        name = "'clock'" if place.is_postgresql else "CAST('clock' AS BINARY)"
        place.server.execute(f"UPDATE {place.leases} SET token = {ahead} WHERE name = {name}")  # noqa: S608 - ours

        if client.capabilities.shared_mode:
            for _ in range(2):
                ahead += 1
                with client.rwlock("clock", ttl=LONG, timeout=PATIENCE).read() as read:
                    assert read.token == ahead
        lease = client.lock("clock", ttl=LONG).acquire(PATIENCE)
        assert lease.token == ahead + 1
        place.end(pid_of(lease))

        with client.lock("clock", ttl=LONG, timeout=PATIENCE) as after:
            assert after.token == ahead + 2
        with pytest.raises(lockkit.LockLost):
            lease.release()

    def test_exclusion_where_the_server_is_serializable(self, place: ModeServer, tmp_path: Path) -> None:
        """By its default: lockkit's own sessions are at READ COMMITTED."""
        witness = Witness(tmp_path)
        rounds, contenders = 15, 4

        def contend(who: str) -> None:
            with lockkit.connect(place.url) as client:
                for _ in range(rounds):
                    with client.lock("level", ttl=LONG, timeout=PATIENCE) as lease:
                        witness.enter(who, lease.token)
                        witness.leave(who, lease.token)

        with ThreadPoolExecutor(contenders) as pool:
            list(pool.map(contend, [f"client{number}" for number in range(contenders)]))
        witness.report().expect_exclusion(rounds * contenders)


class TestTables:
    """Tables that are missing, dropped, or not ours to make."""

    def test_table_of_leases_dropped_while_held(self, place: ModeServer, connect: Connect) -> None:
        """The session is the lock: it stays held. The table is made anew, and tokens go on."""
        client, other = connect(place.url), connect(place.url)
        lease = client.lock("dropped", ttl=LONG).acquire()

        place.server.execute(f"DROP TABLE {place.leases}")

        lease.extend()
        assert busy(other.lock("dropped", ttl=LONG))
        lease.release()
        with other.lock("dropped", ttl=LONG, timeout=PATIENCE) as after:
            assert after.token > lease.token

    def test_row_that_was_deleted_is_made_again(self, place: ModeServer, connect: Connect) -> None:
        """Whoever tidies up may delete rows of names that are not in use."""
        client = connect(place.url)
        client.lock("deleted", ttl=LONG).acquire().release()
        for table in {place.leases, "lockkit_rows"} if place.mode == "row" else {place.leases}:
            place.server.execute(f"DELETE FROM {table}")  # noqa: S608 - ours

        client.lock("deleted", ttl=LONG).acquire(PATIENCE).release()

    def test_tables_that_are_not_to_be_made_are_asked_for(self, place: ModeServer, connect: Connect) -> None:
        """With auto_create=off; the error says what to run."""
        client = connect(f"{place.url}&table=absent&auto_create=off")

        with pytest.raises(lockkit.ConfigurationError, match=r"absent.*lockkit migrate"):
            client.lock("x", ttl=LONG).acquire(PATIENCE)

        assert client.holders("x") == []


def test_breaking_without_the_right_says_which(place: ModeServer, connect: Connect) -> None:
    """What another login may not do, which may use the tables. The holder keeps its lock."""
    user, schema = f"stranger_{place.mode}", "public" if place.is_postgresql else "lockkit"
    lease = connect(place.url).lock("rights", ttl=LONG).acquire()
    login = "LOGIN PASSWORD" if place.is_postgresql else "IDENTIFIED BY"
    place.server.execute(f"CREATE {'ROLE' if place.is_postgresql else 'USER'} {user} {login} 'pw-secret'")
    for table in {place.leases, "lockkit_rows"} if place.mode == "row" else {place.leases}:
        place.server.execute(f"GRANT SELECT, INSERT, UPDATE ON {schema}.{table} TO {user}")
    scheme, _, rest = place.server.url.partition("://")
    stranger = connect(f"{scheme}://{user}:pw-secret@{rest.partition('@')[2]}?mode={place.mode}")

    with pytest.raises(lockkit.Unsupported, match=r"pg_signal_backend|CONNECTION.ADMIN") as caught:
        stranger.break_lock("rights")

    assert "pw-secret" not in str(caught.value)
    assert lease.confirm()
    lease.release()


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
def test_locks_work_behind_a_pooler(pool_mode: Literal["transaction", "session"], connect: Connect) -> None:
    """Everything is set for the transaction alone: nothing lands on another client's connection."""
    require("pgbouncer", local=True)
    with PooledPostgres(pool_mode=pool_mode, pool_size=8) as pooled:
        for mode in MODES:
            client, other = connect(f"{pooled.url}?mode={mode}"), connect(f"{pooled.server.url}?mode={mode}")
            lease = client.lock("pooled", ttl=TTL).acquire(PATIENCE)
            for _ in range(4):  # for longer than its ttl
                until_renewed(lease)
            assert busy(other.lock("pooled", ttl=LONG))
            got = queued(other, "pooled")
            lease.release()
            got.result(PATIENCE)
            back = queued(client, "pooled")
            with client.lock("pooled 2", ttl=LONG, timeout=PATIENCE):
                got.result().release()
            back.result(PATIENCE).release()
            gone = client.lock("pooled", ttl=1.0, renew=False).acquire(PATIENCE)
            with other.lock("pooled", ttl=LONG, timeout=PATIENCE) as after:
                assert gone.lost
                assert after.token > gone.token
        assert pooled.server.execute("SHOW idle_in_transaction_session_timeout") == "0"


def test_pooler_that_lends_single_statements_is_refused(connect: Connect) -> None:
    """A transaction cannot stay open there."""
    require("pgbouncer", local=True)
    with PooledPostgres(pool_mode="statement") as pooled:
        for mode in MODES:
            with pytest.raises(lockkit.ConfigurationError, match=r"takes no transactions.*mode=table"):
                connect(f"{pooled.url}?mode={mode}").lock("x", ttl=LONG).acquire(PATIENCE)
