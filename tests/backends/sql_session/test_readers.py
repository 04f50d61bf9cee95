"""Read locks of mode=row and mode=advisory on real servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import lockkit
from lockkit.backends.sql.connection import Parameter, Result, Statement
from lockkit.backends.sql_session import backend
from lockkit.backends.sql_session.session import Session
from lockkit.sync import Client, Lease
from lockkit_tools.servers import FaultProxy, PooledPostgres, PostgresServer, require, wait_until
from tests.backends.sql_session.support import (
    LONG,
    MODES,
    PATIENCE,
    TTL,
    ModeServer,
    queued,
    until_waiting,
    waiting_pid,
)
from tests.backends.support import Connect
from tests.tries import beside, busy

READERS = ["postgresql-row", "postgresql-advisory", "mariadb-row"]


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

    def test_writer_in_the_queue_stops_readers_until_it_leaves(self, place: ModeServer, connect: Connect) -> None:
        """What it holds while it waits is free then."""
        client, writer, late = connect(place.url), connect(place.url), connect(place.url)
        lease = read(client, "stopped readers")

        got = beside(writer.lock("stopped readers", ttl=LONG).try_acquire, 5.0)
        until_in_queue(place, writer, "stopped readers")
        assert busy(late.rwlock("stopped readers", ttl=LONG).read())
        assert got.result(PATIENCE) is None

        read(late, "stopped readers").release()
        lease.release()

    def test_waiters_are_counted_behind_readers(self, on_postgresql: ModeServer, connect: Connect) -> None:
        """Writers and readers alike, wherever they wait."""
        client, other, writer, late = (connect(on_postgresql.url) for _ in range(4))
        leases = [read(client, "counted"), read(other, "counted")]
        wrote = queued(writer, "counted")
        until_in_queue(on_postgresql, writer, "counted")
        got = queued(late, "counted", read=True)
        until_in_queue(on_postgresql, late, "counted")
        assert [one.waiters for one in client.holders("counted")] == [2, 2]
        for lease in leases:
            lease.release()
        wrote.result(PATIENCE)
        wait_until(lambda: None if [one.waiters for one in client.holders("counted")] == [1] else "not one waiter")
        wrote.result().release()
        got.result(PATIENCE).release()

    @pytest.mark.parametrize("place", [*READERS, "postgresql-table", "mariadb-table"], indirect=True)
    def test_tokens_are_unique_and_in_the_order_of_grants(self, place: ModeServer, connect: Connect) -> None:
        """Over readers and writers of several clients; a writer is alone."""
        grants: list[tuple[str, int, float, float, float]] = []

        def use(number: int) -> None:
            lock = connect(place.url).rwlock("mixed", ttl=LONG, timeout=PATIENCE)
            for turn in range(12):
                asked = time.perf_counter()
                with lock.write() if (turn + number) % 4 == 0 else lock.read() as lease:
                    entered = time.perf_counter()
                    grants.append((lease.mode, lease.token, asked, entered, time.perf_counter()))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))

        assert len({token for _, token, *_ in grants}) == 48
        for _, token, asked, entered, _ in grants:
            for mode, other, _, begun, ended in grants:
                # Who was in before this one asked has a lower token.
                assert begun >= asked or other < token
                assert mode == "shared" or other == token or not begun < entered < ended

    def test_leases_of_former_readers_are_deleted(
        self, place: ModeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the release of another reader, if they are old; that of a reader which lives stays."""
        monkeypatch.setattr(backend, "DELETE_CHANCE", 1.0)
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
            got = beside(lock.acquire, PATIENCE)
            until_in_queue(place, client, "down")
            held_by_other.release()
            lease = got.result(PATIENCE)
        else:
            lease = lock.acquire(PATIENCE)

        lease.downgrade()

        (holder,) = other.holders("down")
        assert (holder.owner, holder.token, holder.mode) == (lease.owner, lease.token, "shared")
        assert holder.metadata["job"] == "report"
        with other.rwlock("down", ttl=LONG, timeout=PATIENCE).read() as another:
            assert another.token > lease.token
            lease.extend()
            lease.release()
            assert owners(other, "down") == {another.owner}

    def test_silent_holder_is_thrown_out_after_a_downgrade(self, postgresql: PostgresServer, connect: Connect) -> None:
        """The limit that the server was given still holds."""
        place = ModeServer(postgresql, "advisory")
        client, other = connect(place.url), connect(place.url)
        lease = client.rwlock("silent", ttl=1.0, renew=False).write().acquire(PATIENCE)
        lease.downgrade()

        with other.lock("silent", ttl=LONG, timeout=PATIENCE) as after:
            assert lease.lost
            assert after.token > lease.token

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


def test_readers_behind_a_pooler(connect: Connect) -> None:
    """Beside one that comes directly; a write lease stays one."""
    require("pgbouncer", local=True)
    with PooledPostgres(pool_mode="transaction", pool_size=8) as pooled:
        for mode in MODES:
            client, other = connect(f"{pooled.url}?mode={mode}"), connect(f"{pooled.server.url}?mode={mode}")
            place, late = ModeServer(pooled.server, mode), connect(f"{pooled.url}?mode={mode}")
            lease, direct = read(client, "pooled"), read(other, "pooled")
            assert direct.token > lease.token
            assert owners(other, "pooled") == owners(client, "pooled") == {lease.owner, direct.owner}
            got = queued(other, "pooled")
            until_in_queue(place, other, "pooled")
            assert late.rwlock("pooled", ttl=LONG).read().try_acquire(TTL / 3) is None
            direct.release()
            lease.extend()
            lease.release()
            got.result(PATIENCE)
            back = queued(client, "pooled", read=True)
            got.result().release()
            assert back.result(PATIENCE).token > got.result().token
            back.result().release()
            with client.rwlock("pooled", ttl=LONG, timeout=PATIENCE).write() as written:
                with pytest.raises(lockkit.Unsupported, match="read lease"):
                    written.downgrade()
                assert written.mode == "exclusive"
            gone = client.rwlock("pooled", ttl=TTL / 3, renew=False).read().acquire(PATIENCE)
            with other.lock("pooled", ttl=LONG, timeout=PATIENCE) as after:
                assert gone.lost
                assert after.token > gone.token
