"""Read locks of mode=row and mode=advisory on real servers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import psycopg
import pytest

import lockkit
from lockkit.backend import Busy, Request
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_session import held
from lockkit.backends.sql_session.backend import SessionBackend
from lockkit.backends.sql_session.session import Key, Session
from lockkit.runtime import drive
from lockkit.sync import Client, Lease
from lockkit_tools.servers import FaultProxy, MariaServer, PooledPostgres, PostgresServer, require, wait_until
from tests.backends.sql_session.support import (
    LONG,
    MODES,
    PATIENCE,
    TTL,
    ModeServer,
    open_backend,
    pid_of,
    running,
    until_waiting,
    waiting_pid,
)
from tests.backends.sql_table.support import Connect, counted
from tests.backends.support import StubHost, granted
from tests.tries import busy

pytestmark = pytest.mark.timeout(180)

READERS = ["postgresql-row", "postgresql-advisory", "mariadb-row"]
READING = """
import sys

import lockkit

with lockkit.connect(sys.argv[1]) as client:
    lease = client.rwlock(sys.argv[2], ttl=120).read().acquire()
    print(lease.owner, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """A server of this module's own; strict by default, see the other tests."""
    require("postgresql", local=True)
    with PostgresServer(settings={"default_transaction_isolation": "'serializable'"}) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """The same."""
    require("mariadb", local=True)
    with MariaServer(settings={"transaction-isolation": "SERIALIZABLE"}) as server:
        yield server


@pytest.fixture(params=READERS)
def place(request: pytest.FixtureRequest) -> ModeServer:
    """Each kind of server in each mode that has readers."""
    kind, _, mode = request.param.partition("-")
    return ModeServer(request.getfixturevalue(kind), mode)


def read(client: Client, name: str, ttl: float = LONG) -> Lease:
    """Acquire a read lease."""
    return client.rwlock(name, ttl=ttl).read().acquire(PATIENCE)


def owners(client: Client, name: str) -> set[str]:
    """Give the owners of the leases of a lock."""
    return {holder.owner for holder in client.holders(name)}


def until_in_queue(place: ModeServer, client: Client, name: str) -> None:
    """Return once a waiter of this client is in the server's queue."""
    until_waiting(client, name)
    pid = waiting_pid(client, name)

    def ask() -> str | None:
        waits = f"SELECT count(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = {pid}"  # noqa: S608
        question = f"{waits} AND trx_state = 'LOCK WAIT'"
        if place.is_postgresql:
            question = f"SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted"  # noqa: S608 - ours
        return None if place.server.execute(question) != "0" else "not in the queue yet"

    wait_until(ask)


class TestReaders:
    """Several at once, each a session of its own."""

    def test_killed_reader_frees_its_share_while_others_go_on(self, place: ModeServer, connect: Connect) -> None:
        """A writer waits for those that live, and for no other."""
        name = "killed reader"
        client, writer = connect(place.url), connect(place.url)
        lease = read(client, name)
        with subprocess.Popen(
            [sys.executable, "-c", READING, place.url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            owner = process.stdout.readline().strip()
            assert owners(client, name) == {lease.owner, owner}
            process.kill()
            wait_until(lambda: None if owners(client, name) == {lease.owner} else "its share is not free yet")

        assert lease.confirm()
        with running(partial(writer.lock(name, ttl=LONG).acquire, PATIENCE)) as got:
            until_in_queue(place, writer, name)
            assert got == []
            lease.release()
        assert got[0].token > lease.token
        got[0].release()

    def test_reader_whose_connection_is_ended_loses_its_lease_alone(self, place: ModeServer, connect: Connect) -> None:
        """It is notified at once, the others hold on."""
        client, other = connect(place.url), connect(place.url)
        lease, kept = read(client, "ended reader"), read(other, "ended reader")

        place.end(pid_of(lease))

        assert lease.wait_lost(PATIENCE)
        with pytest.raises(lockkit.LockLost):
            lease.release()
        assert kept.confirm()
        assert owners(client, "ended reader") == {kept.owner}
        kept.release()

    def test_read_lock_whose_answer_was_lost_is_freed(self, place: ModeServer, connect: Connect) -> None:
        """The client asks again as another owner, and holds one share."""
        server = place.server
        with FaultProxy(server.host, server.port) as proxy:
            client = connect(place.url.replace(f"{server.host}:{server.port}", proxy.address))
            other = connect(place.url)
            client.rwlock("no answer", ttl=LONG).read().acquire(PATIENCE).release()
            dropped = proxy.drop_next_reply(match=b"lockkit_read" if place.is_postgresql else b"SHARE MODE")

            lease = read(client, "no answer")

            assert dropped.is_set()
            wait_until(lambda: None if owners(other, "no answer") == {lease.owner} else "two shares")
            lease.release()
            other.lock("no answer", ttl=LONG).acquire(PATIENCE).release()

    def test_readers_that_come_and_go_do_not_starve_a_writer(self, place: ModeServer, connect: Connect) -> None:
        """Once it is in the queue, only those that were on their way there go before it."""
        name, count = "starved", 4
        writer, clients = connect(place.url), [connect(place.url) for _ in range(count)]
        ended, overlapping, reads = threading.Event(), threading.Barrier(count), list[int]()

        def come_and_go(client: Client) -> None:
            lock = client.rwlock(name, ttl=LONG).read()
            first = lock.acquire(PATIENCE)
            overlapping.wait(PATIENCE)
            while not ended.is_set():
                first.release()
                first = lock.acquire(PATIENCE)
                reads.append(first.token)
                ended.wait(0.01)
            first.release()

        threads = [threading.Thread(target=come_and_go, args=(client,), daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: None if len(reads) > 3 * count else "they do not come and go yet")
            with running(partial(writer.lock(name, ttl=LONG).acquire, PATIENCE)) as got:
                pass
            assert owners(writer, name) == {got[0].owner}
            assert max(reads) < got[0].token
            got[0].release()
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE)

    def test_writer_in_the_queue_stops_readers_until_it_leaves(self, place: ModeServer, connect: Connect) -> None:
        """What it holds while it waits is free then."""
        client, writer, late = connect(place.url), connect(place.url), connect(place.url)
        lease = read(client, "stopped readers")

        def give_up() -> Lease | None:
            return writer.lock("stopped readers", ttl=LONG).try_acquire(2.0)

        with running(give_up) as got:
            until_in_queue(place, writer, "stopped readers")
            assert busy(late.rwlock("stopped readers", ttl=LONG).read())
        assert got == [None]

        read(late, "stopped readers").release()
        lease.release()

    def test_reader_that_gives_up_leaves_nothing(self, place: ModeServer, connect: Connect) -> None:
        """Neither in the queue nor of the lock."""
        holder, client = connect(place.url), connect(place.url)
        lease = holder.lock("left", ttl=LONG).acquire(PATIENCE)
        assert busy(client.rwlock("left", ttl=LONG).read(), 0.2)
        assert busy(client.rwlock("left", ttl=LONG).read())

        if place.is_postgresql:
            assert [one.waiters for one in client.holders("left")] == [0]
        lease.release()
        holder.lock("left", ttl=LONG).acquire(PATIENCE).release()

    def test_reader_that_was_left_waiting_at_a_hung_server_is_ended_later(
        self, place: ModeServer, connect: Connect
    ) -> None:
        """As a writer is: no ttl ends a waiter."""
        host = StubHost()
        waiter = open_backend(place, host)
        lease = connect(place.url).lock("left waiting", ttl=LONG).acquire(PATIENCE)
        request = host.request("left waiting", ttl=LONG)
        request.mode = "shared"
        assert isinstance(drive(waiter.try_acquire(request)), Busy)
        pid = request.state.session.pid
        place.server.pause()
        try:
            request.answer_by = host.runtime.now() + 0.3
            with pytest.raises(lockkit.BackendUnavailable):
                drive(waiter.abandon(request))
        finally:
            place.server.resume()

        grant = granted(drive(waiter.try_acquire(host.request("another"))))

        wait_until(lambda: "it still waits" if place.has_session(pid) else None)
        assert drive(waiter.release(grant))
        lease.release()
        drive(waiter.close())

    def test_waiters_are_counted_behind_readers(self, on_postgresql: ModeServer, connect: Connect) -> None:
        """Writers and readers alike, wherever they wait."""
        client, other, writer, late = (connect(on_postgresql.url) for _ in range(4))
        leases = [read(client, "counted"), read(other, "counted")]
        with running(partial(writer.lock("counted", ttl=LONG).acquire, PATIENCE)) as wrote:
            until_in_queue(on_postgresql, writer, "counted")
            with running(partial(read, late, "counted")) as got:
                until_in_queue(on_postgresql, late, "counted")
                assert [one.waiters for one in client.holders("counted")] == [2, 2]
                for lease in leases:
                    lease.release()
                wait_until(lambda: None if wrote else "the writer waits")
                wait_until(
                    lambda: None if [one.waiters for one in client.holders("counted")] == [1] else "not one waiter"
                )
                wrote[0].release()
        got[0].release()

    def test_tokens_are_unique_and_in_the_order_of_grants(self, place: ModeServer, connect: Connect) -> None:
        """Over readers and writers of several clients; a writer is alone."""
        grants: list[tuple[str, int, int, int]] = []
        clock, mutex = itertools.count(), threading.Lock()

        def tick() -> int:
            with mutex:
                return next(clock)

        def use(number: int) -> None:
            client = connect(place.url)
            lock = client.rwlock("mixed", ttl=LONG, timeout=PATIENCE)
            for turn in range(12):
                side = lock.write() if (turn + number) % 4 == 0 else lock.read()
                asked = tick()
                with side as lease:
                    entered = tick()
                    grants.append((lease.mode, lease.token, asked, entered))
                    left.append((lease.mode, lease.token, entered, tick()))

        left: list[tuple[str, int, int, int]] = []
        threads = [threading.Thread(target=use, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

        assert len(grants) == 48
        assert len({token for _, token, *_ in grants}) == 48
        for _, token, asked, entered in grants:
            for mode, other, begun, ended in left:
                # Who was in before this one asked has a lower token.
                assert begun >= asked or other < token
                assert mode == "shared" or other == token or not begun < entered < ended

    def test_token_is_above_the_last_though_the_clock_is_behind_it(self, place: ModeServer, connect: Connect) -> None:
        """As after a clock that was set back; a writer goes on from there."""
        client = connect(place.url)
        client.lock("clock", ttl=LONG).acquire(PATIENCE).release()
        ahead = 4_102_444_800_000_000  # 2100
        name = "'clock'" if place.is_postgresql else "CAST('clock' AS BINARY)"
        place.server.execute(f"UPDATE {place.leases} SET token = {ahead} WHERE name = {name}")  # noqa: S608 - ours

        for token, side in enumerate(("read", "read", "write"), ahead + 1):
            with getattr(client.rwlock("clock", ttl=LONG, timeout=PATIENCE), side)() as lease:
                assert lease.token == token

    def test_read_costs_what_a_write_costs(
        self, place: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same number of statements; but for the leases of former readers, which one in many deletes."""
        monkeypatch.setattr(held, "DELETE_CHANCE", 0.0)
        client = connect(place.url)
        lock = client.rwlock("trips", ttl=LONG)
        sent: list[Statement] = []
        send = Session.send

        def collecting(self: Session, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
            sent.append(statement)
            send(self, statement, parameters)

        monkeypatch.setattr(Session, "send", collecting)
        counts = []
        for side in (lock.write(), lock.read()):
            for _ in range(2):
                side.acquire(PATIENCE).release()
            sent.clear()
            with counted(monkeypatch) as beside:
                lease = side.acquire(PATIENCE)
                lease.extend()
                lease.release()
            counts.append((len(sent), len(beside)))

        assert counts == [(3, 0 if place.mode == "advisory" else 1)] * 2

    def test_leases_of_former_readers_are_deleted(
        self, place: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the release of another reader, if they are old; that of a reader which lives stays."""
        monkeypatch.setattr(held, "DELETE_CHANCE", 1.0)
        client, other, third = connect(place.url), connect(place.url), connect(place.url)
        kept, former, last = (read(one, "former") for one in (client, other, third))
        name = "name" if place.is_postgresql else "CONVERT(name USING utf8mb4)"
        shares = f"FROM {place.leases} WHERE {name} LIKE '%read%'"

        def rows() -> set[str]:
            return set(place.server.execute(f"SELECT owner {shares}").split())

        before = rows()
        assert {kept.owner, former.owner, last.owner} <= before
        former.release()
        assert rows() == before  # it is young

        place.server.execute(f"UPDATE {place.leases} SET granted_at_us = 1 WHERE {name} LIKE '%read%'")  # noqa: S608
        last.release()

        assert rows() & {kept.owner, former.owner, last.owner} == {kept.owner}
        assert owners(other, "former") == {kept.owner}
        kept.release()

    def test_row_that_a_foreign_client_locks(self, postgresql: PostgresServer, connect: Connect) -> None:
        """A row is a row: FOR SHARE by hand keeps writers out, FOR UPDATE waits and is counted."""
        place = ModeServer(postgresql, "row")
        client, writer = connect(place.url), connect(place.url)
        client.lock("foreign", ttl=LONG).acquire().release()
        by_hand = "SELECT name FROM lockkit_rows WHERE name = 'foreign' FOR"
        with psycopg.connect(postgresql.url) as connection:
            connection.execute(f"{by_hand} SHARE")
            assert busy(client.lock("foreign", ttl=LONG))
            client.rwlock("foreign", ttl=LONG).read().acquire(PATIENCE).release()

        lease = client.lock("foreign", ttl=LONG).acquire(PATIENCE)
        with running(partial(writer.lock("foreign", ttl=LONG).acquire, PATIENCE)) as got:
            until_in_queue(place, writer, "foreign")
            with running(partial(postgresql.execute, f"{by_hand} UPDATE")):
                wait_until(lambda: None if client.holders("foreign")[0].waiters == 2 else "not two waiters")
                lease.release()
                wait_until(lambda: None if got else "the writer waits")
                got[0].release()

    @pytest.mark.parametrize("where", READERS)
    def test_read_lease_is_not_written_by_who_was_thrown_out_meanwhile(
        self, where: str, request: pytest.FixtureRequest, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        Between the database's grant and the writing of the lease, which in mode=advisory are apart behind a pooler.

        Its token would be larger than that of the writer which was granted the lock meanwhile.
        """
        kind, _, mode = where.partition("-")
        place = ModeServer(request.getfixturevalue(kind), mode)
        monkeypatch.setattr(Session, "pooled", mode == "advisory")
        host = StubHost()
        slow: SessionBackend = open_backend(place, host)
        other = connect(place.url)
        write = slow._leases.write
        theirs: list[Lease] = []

        async def stopped(wanted: Request, key: Key, session: Session, identity: int) -> int | None:
            if not theirs:
                place.end(session.pid)
                theirs.append(other.lock("thrown out", ttl=LONG).acquire(PATIENCE))
            return await write(wanted, key, session, identity)

        slow._leases.write = stopped  # type: ignore[method-assign, assignment]
        other.lock("thrown out", ttl=LONG).acquire(PATIENCE).release()
        wanted = host.request("thrown out", ttl=LONG)
        wanted.mode = "shared"

        outcome = drive(slow.try_acquire(wanted))

        assert isinstance(outcome, Busy)
        (holder,) = other.holders("thrown out")
        assert (holder.owner, holder.token, holder.mode) == (theirs[0].owner, theirs[0].token, "exclusive")
        theirs[0].release()
        wait_until(lambda: None if wanted.state.session.answered else "not granted yet")
        grant = granted(drive(slow.try_acquire(wanted)))
        assert grant.token > theirs[0].token
        assert drive(slow.release(grant))
        drive(slow.close())

    def test_user_locks_of_mysql_have_no_read_side(self, mariadb: MariaServer, connect: Connect) -> None:
        """Nothing is sent: there is no such server."""
        client = connect("mysql://nobody@127.0.0.1:1/x?mode=advisory")

        with pytest.raises(lockkit.Unsupported, match="shared_mode"):
            client.rwlock("x").read()

        with connect(mariadb.url, mode="advisory").rwlock("x", ttl=LONG).write() as lease:
            assert lease.mode == "exclusive"


class TestDowngrade:
    """A write lease becomes a read lease."""

    @pytest.mark.parametrize("waited", [False, True])
    def test_downgraded_lease_is_that_of_a_reader(
        self, postgresql: PostgresServer, connect: Connect, *, waited: bool
    ) -> None:
        """Also one from the queue, which has its lock twice; its metadata stays, and other readers come in."""
        place = ModeServer(postgresql, "advisory")
        client, other = connect(place.url), connect(place.url)
        lock = client.rwlock("down", ttl=LONG, metadata={"job": "report"}).write()
        if waited:
            held_by_other = other.lock("down", ttl=LONG).acquire(PATIENCE)
            with running(partial(lock.acquire, PATIENCE)) as got:
                until_in_queue(place, client, "down")
                held_by_other.release()
            lease = got[0]
        else:
            lease = lock.acquire(PATIENCE)

        lease.downgrade()

        (holder,) = other.holders("down")
        assert (holder.owner, holder.token, holder.mode) == (lease.owner, lease.token, "shared")
        assert holder.metadata["job"] == "report"
        with other.rwlock("down", ttl=LONG, timeout=PATIENCE).read() as beside:
            assert beside.token > lease.token
            lease.extend()
            lease.release()
            assert owners(other, "down") == {beside.owner}

    def test_silent_holder_is_thrown_out_after_a_downgrade(self, postgresql: PostgresServer, connect: Connect) -> None:
        """The limit that the server was given still holds."""
        place = ModeServer(postgresql, "advisory")
        client, other = connect(place.url), connect(place.url)
        lease = client.rwlock("silent", ttl=1.0, renew=False).write().acquire(PATIENCE)
        lease.downgrade()

        with other.lock("silent", ttl=LONG, timeout=PATIENCE) as after:
            assert lease.lost
            assert after.token > lease.token

    def test_lost_lease_is_not_downgraded(self, postgresql: PostgresServer, connect: Connect) -> None:
        """Its connection has ended, and no renewal has noticed yet."""
        place = ModeServer(postgresql, "advisory")
        client = connect(place.url)
        lease = client.rwlock("lost", ttl=LONG).write().acquire(PATIENCE)
        place.end(pid_of(lease))

        with pytest.raises(lockkit.LockLost):
            lease.downgrade()

        assert client.holders("lost") == []

    @pytest.mark.parametrize("again", [False, True])
    @pytest.mark.parametrize("sent", [False, True])
    def test_downgrade_without_an_answer(
        self, postgresql: PostgresServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, *, sent: bool, again: bool
    ) -> None:
        """The lease is held in one mode or the other: it can be downgraded once more, and released."""
        place = ModeServer(postgresql, "advisory")
        client, other = connect(place.url), connect(place.url)
        lease = client.rwlock("unanswered", ttl=LONG).write().acquire(PATIENCE)

        async def no_answer(self: Session, statement: Statement, parameters: Sequence[Parameter] = ()) -> Result:
            if sent:
                self.send(statement, parameters)
            else:
                self.unanswered = True
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", no_answer)
            with pytest.raises(lockkit.BackendUnavailable):
                lease.downgrade()
        if not sent:
            lease._record.grant.state.session.unanswered = False

        if again:
            lease.downgrade()
            assert [holder.mode for holder in other.holders("unanswered")] == ["shared"]
            with other.rwlock("unanswered", ttl=LONG, timeout=PATIENCE).read():
                lease.check()
        lease.release()
        other.lock("unanswered", ttl=LONG).acquire(PATIENCE).release()

    def test_row_lock_is_not_downgraded(self, place: ModeServer, connect: Connect) -> None:
        """No database weakens the lock of a row within a transaction."""
        if place.mode == "advisory":
            place = ModeServer(place.server, "row")
        client = connect(place.url)
        assert not client.capabilities.downgrade
        with client.rwlock("row", ttl=LONG).write() as lease:
            with pytest.raises(lockkit.Unsupported, match="read lease"):
                lease.downgrade()
            assert lease.mode == "exclusive"
            assert lease.confirm()


class TestPooler:
    """pgbouncer in front of PostgreSQL."""

    def test_readers_behind_a_pooler(self, connect: Connect) -> None:
        """Beside one that comes directly; a write lease stays one."""
        require("pgbouncer", local=True)
        with PooledPostgres(pool_mode="transaction", pool_size=8) as pooled:
            for mode in MODES:
                client, other = connect(f"{pooled.url}?mode={mode}"), connect(f"{pooled.server.url}?mode={mode}")
                place, late = ModeServer(pooled.server, mode), connect(f"{pooled.url}?mode={mode}")
                lease, direct = read(client, "pooled"), read(other, "pooled")
                assert direct.token > lease.token
                assert owners(other, "pooled") == owners(client, "pooled") == {lease.owner, direct.owner}
                with running(partial(other.lock("pooled", ttl=LONG).acquire, PATIENCE)) as got:
                    until_in_queue(place, other, "pooled")
                    assert late.rwlock("pooled", ttl=LONG).read().try_acquire(TTL) is None
                    direct.release()
                    lease.extend()
                    lease.release()
                with running(partial(read, client, "pooled")) as back:
                    until_waiting(client, "pooled")
                    got[0].release()
                assert back[0].token > got[0].token
                back[0].release()
                with client.rwlock("pooled", ttl=LONG, timeout=PATIENCE).write() as written:
                    with pytest.raises(lockkit.Unsupported, match="read lease"):
                        written.downgrade()
                    assert written.mode == "exclusive"
                gone = client.rwlock("pooled", ttl=TTL / 3, renew=False).read().acquire(PATIENCE)
                with other.lock("pooled", ttl=LONG, timeout=PATIENCE) as after:
                    assert gone.lost
                    assert after.token > gone.token
