"""The lock table: what is in it, who else may write to it, and what it costs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import NullPool

import lockkit
import lockkit.aio
from lockkit.backend import Busy, Grant, Renewed, Request, apart
from lockkit.backends.sql_table import backend as sql_table
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit_tools.servers import wait_until
from tests.backends.sql_table.support import DRIVERS, Look, counted, now_us, waits, with_driver
from tests.backends.support import Connect
from tests.tries import beside, busy

PATIENCE = 60.0
HOUR_US = 3_600_000_000


class TestRow:
    """The columns that are a contract."""

    def test_row_says_who_holds_until_when(self, url: str, connect: Connect) -> None:
        """By UTC, whatever time zone the server is in; a release leaves the token."""
        client, look = connect(url), Look(url)

        lease = client.lock("ä b ", ttl=30).acquire()

        owner, token, expires_at_us = look.row("ä b ")
        assert (owner, token) == (lease.owner, lease.token)
        assert abs(expires_at_us - now_us() - 30e6) < 10e6
        assert abs(token - now_us()) < 10e6
        lease.release()
        assert look.row("ä b ") == (None, token, 0)

    def test_foreign_writer_holds_the_lock(self, url: str, connect: Connect) -> None:
        """It sets owner and expires_at_us, and knows no other column; waiters notice the end of its lease."""
        client, look = connect(url), Look(url)
        client.lock("y").acquire().release()
        look.run(
            "INSERT INTO lockkit_locks (name, owner, token, expires_at_us) VALUES ('x', 'cron', 7, :until)",
            until=now_us() + 600_000_000,
        )

        assert busy(client.lock("x"))
        assert busy(client.rwlock("x").read())
        (holder,) = client.holders("x")
        assert (holder.owner, holder.token, dict(holder.metadata)) == ("cron", None, {})
        assert 500 < (holder.remaining or 0) <= 600
        waiter = beside(client.lock("x", ttl=30).acquire, PATIENCE)
        wait_until(lambda: None if waits(client, "x") else "nobody waits")
        look.run("UPDATE lockkit_locks SET owner = NULL WHERE name = 'x'")  # and forgets the rest
        first = waiter.result(PATIENCE)
        assert first.token > 7
        first.release()

        look.run("UPDATE lockkit_locks SET owner = 'cron', expires_at_us = :until", until=now_us() + 600_000_000)
        assert client.break_lock("x")
        with client.rwlock("x", ttl=30, timeout=PATIENCE).read() as lease:
            assert lease.token > first.token
            assert abs(look.row("x")[2] - now_us() - 30e6) < 20e6

    def test_names_are_those_of_held_rows(self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """In pages; of any writer, by the database's clock; not rows that are free, expired or without a name."""
        monkeypatch.setattr("lockkit.backends.sql_table.backend.BATCH", 2)
        client, look = connect(url), Look(url)
        assert list(client.names()) == []  # there is no table yet
        client.lock("p:free").acquire().release()
        until = now_us() + 600_000_000
        for name in ("p:a", "p:b", "p:c", "p:é", "p:~", "p%b", "q", ""):
            look.run(
                "INSERT INTO lockkit_locks (name, owner, token, expires_at_us) VALUES (:name, 'cron', 7, :until)",
                name=name, until=until,
            )  # fmt: skip
        look.run(
            "INSERT INTO lockkit_locks (name, owner, token, expires_at_us) VALUES ('p:over', 'cron', 7, :until)",
            until=now_us() - 600_000_000,
        )

        assert list(client.names("p:")) == ["p:a", "p:b", "p:c", "p:~", "p:é"]
        assert list(client.names("p:é")) == ["p:é"]
        assert list(client.names()) == ["p%b", "p:a", "p:b", "p:c", "p:~", "p:é", "q"]

    def test_foreign_writer_that_knows_only_the_contract(self, url: str, connect: Connect) -> None:
        """The other columns have defaults."""
        client, look = connect(url), Look(url)
        client.lock("y").acquire().release()
        look.run(
            "INSERT INTO lockkit_locks (name, owner, token, expires_at_us) VALUES ('x', 'cron', 7, :until)",
            until=now_us() + 600_000_000,
        )

        assert busy(client.lock("x"))
        assert client.break_lock("x")
        lease = client.lock("x").acquire(timeout=PATIENCE)
        assert lease.token > 7
        lease.release()

    @pytest.mark.parametrize("damage", ["DELETE FROM lockkit_locks", "DROP TABLE lockkit_locks"])
    def test_lost_rows_are_told_and_tokens_go_on(self, url: str, connect: Connect, damage: str) -> None:
        """A table that is emptied or dropped while locks are held is made anew; the holder hears of it."""
        client, other, look = connect(url), connect(url), Look(url)
        lease = client.lock("x", ttl=600).acquire()
        reasons: list[str] = []
        lease.on_lost(lambda _, reason: reasons.append(reason))

        look.run(damage)
        second = other.lock("x").acquire(timeout=PATIENCE)

        assert second.token > lease.token
        client._engine.confirm_soon()
        assert lease.wait_lost(PATIENCE)
        wait_until(lambda: None if reasons else "not told yet")
        assert reasons[0] in {"taken", "gone"}
        second.release()

    def test_dropped_table_frees_everything(self, url: str, connect: Connect) -> None:
        """Without anybody who makes it anew there is nobody who holds anything, and no error."""
        client, look = connect(url), Look(url)
        kept: dict[str, Any] = {"ttl": 600, "renew": False, "timeout": PATIENCE}
        writing = client.rwlock("d", **kept).write().acquire()
        leases = [
            client.lock("x", **kept).acquire(),
            client.rwlock("r", **kept).read().acquire(),
            client.semaphore("s", limit=2, **kept).acquire(),
        ]
        releasing = client.rwlock("q", **kept).read().acquire()
        look.run("DROP TABLE lockkit_locks")

        for name in ("x", "r", "s"):
            assert client.holders(name) == []
            assert not client.break_lock(name)
        assert list(client.names()) == []
        with pytest.raises(lockkit.LockLost):
            releasing.release()
        with pytest.raises(lockkit.LockLost):
            writing.downgrade()
        for lease in leases:
            assert not lease.confirm()
            assert lease.lost

    @pytest.mark.parametrize("asked", ["extend", "confirm"])
    def test_it_says_why_a_lease_is_gone(self, url: str, connect: Connect, asked: str) -> None:
        """Broken by force, taken by another, or run out."""
        client, look = connect(url), Look(url)
        reasons: dict[str, str] = {}
        leases = {name: client.lock(name, ttl=600).acquire() for name in ("broken", "taken", "gone", "kept")}
        for name, lease in leases.items():
            lease.on_lost(lambda lease, reason: reasons.update({lease.name: reason}))
            assert name == lease.name

        client.break_lock("broken")
        look.run("UPDATE lockkit_locks SET owner = 'cron' WHERE name = 'taken'")
        look.run("UPDATE lockkit_locks SET expires_at_us = 5 WHERE name = 'gone'")

        for name in ("broken", "taken", "gone"):
            if asked == "extend":
                with pytest.raises(lockkit.LockLost):
                    leases[name].extend()
            else:
                assert not leases[name].confirm()
        leases["kept"].extend()
        assert leases["kept"].confirm()
        wait_until(lambda: None if len(reasons) == 3 else f"told {reasons}")
        assert reasons == {"broken": "broken", "taken": "taken", "gone": "gone"}
        leases["kept"].release()

    @pytest.mark.parametrize(("options", "keep_us"), [({}, 24 * HOUR_US), ({"idle_ttl": 7200}, 2 * HOUR_US)])
    def test_idle_rows_are_removed_and_others_stay(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], keep_us: int
    ) -> None:
        """After a day, or what the URL says."""
        monkeypatch.setattr(sql_table, "REAP_SHARE", 1.0)
        client, look = connect(url, **options), Look(url)
        client.lock("new").acquire().release()
        for name, age_us, expires_at_us in (
            ("idle", keep_us + HOUR_US, 0),
            ("dead", keep_us + HOUR_US, now_us() - keep_us - HOUR_US),
            ("held for days", 9 * keep_us, now_us() + HOUR_US),
            ("recent", keep_us - HOUR_US, 0),
            ("noted", 9 * keep_us, 0),
            ("was noted", 9 * keep_us, 0),
        ):
            note_until_us = {"noted": now_us() + HOUR_US, "was noted": now_us() - HOUR_US}.get(name, 0)
            look.run(
                "INSERT INTO lockkit_locks (name, owner, token, expires_at_us, note_until_us)"
                " VALUES (:name, 'o', :token, :until, :note)",
                name=name, token=now_us() - age_us, until=expires_at_us, note=note_until_us,
            )  # fmt: skip

        connect(url, **options).lock("new").acquire().release()

        def names() -> set[str]:
            found = (name for (name,) in look.run("SELECT name FROM lockkit_locks"))
            return {name.decode() if isinstance(name, bytes) else name for name in found}

        expected = {"new", "held for days", "recent", "noted"}
        wait_until(lambda: None if names() == expected else f"there are {names()}")

    def test_table_of_another_version_has_locks(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One with columns of a later one, or without those that locks never name. What needs them says what to do."""
        client, look = connect(url), Look(url)
        client.lock("x").acquire().release()
        look.run("ALTER TABLE lockkit_locks ADD COLUMN later BIGINT NOT NULL DEFAULT 7")
        for lock in (client.lock("x"), client.rwlock("x").read(), client.semaphore("s", 2)):
            lease = lock.acquire(timeout=PATIENCE)
            assert lease.confirm()
            lease.release()
        with counted(monkeypatch) as statements:
            client.lock("x").acquire(timeout=PATIENCE).release()
        assert len(statements) == 2
        assert not [text for text in statements if "writer" in text or "shares" in text]

        for column in ("later", "shares", "writer", "writer_until_us", "note", "note_until_us"):
            look.run(f"ALTER TABLE lockkit_locks DROP COLUMN {column}")
        client = connect(url)
        with client.lock("x", timeout=PATIENCE) as lease:
            assert lease.confirm()
            assert [holder.owner for holder in client.holders("x")] == [lease.owner]
        for call in (client.once("key", keep=60).__enter__, client.rwlock("x", timeout=PATIENCE).read().acquire):
            with pytest.raises(lockkit.ConfigurationError, match="run lockkit migrate"):
                call()

    def test_table_of_somebody_else_is_not_dropped(self, url: str, connect: Connect) -> None:
        """Which has the name of lockkit's, and other columns."""
        look = Look(url)
        look.run("DROP TABLE IF EXISTS seats")
        look.run("CREATE TABLE seats (name VARCHAR(20), owner VARCHAR(20))")
        look.run("INSERT INTO seats VALUES ('12A', 'Ada')")
        backend: Any = connect(url, table="seats")._engine.client.backend
        with pytest.raises(lockkit.ConfigurationError, match="lacks a column"):
            drive(backend.erase())
        assert look.run("SELECT count(*) FROM seats") == [(1,)]

    @pytest.mark.parametrize("key", ["x", "k" * 255, "\u20ac" * 85, "a/", "a/."])
    def test_row_of_a_record_is_no_locks(self, url: str, connect: Connect, key: str) -> None:
        """Whatever its key is; on PostgreSQL the release wakes who waits for it, too."""
        client, other = connect(url), connect(url)
        with client.once(key, keep=60, timeout=PATIENCE) as attempt, ThreadPoolExecutor(1) as pool:
            with other.lock(key, timeout=PATIENCE):
                waiter = pool.submit(lambda: other.once(key, keep=60, timeout=PATIENCE).__enter__().result)
                wait_until(lambda: None if waits(other, apart("once", key)) else "nobody waits")
            attempt.done([key])
            assert waiter.result() == [key]
        keys = [name for (name,) in Look(url).run("SELECT name FROM lockkit_locks")]
        assert len(keys) == 2

    def test_database_clock_that_was_set_back_gives_no_second_holder(self, url: str, connect: Connect) -> None:
        """By an hour: others wait for longer, tokens go on increasing, renewals hold."""
        client, other = connect(url), connect(url)
        lease = client.lock("x", ttl=60).acquire(timeout=PATIENCE)
        for one in (client, other):
            backend: Any = one._engine.client.backend
            now = backend.database.dialect.now_us
            backend._statements = type(backend._statements)("lockkit_locks", f"({now} - {HOUR_US})")

        assert busy(other.lock("x"))
        assert lease.confirm()
        lease.release()
        second = other.lock("x").acquire(timeout=PATIENCE)
        assert second.token == lease.token + 1
        assert busy(client.lock("x"))
        taken = client.take(second.ticket())
        assert taken.token == second.token + 1
        taken.release()


class TestCost:
    """Round trips and connections."""

    def test_acquire_and_release_are_one_statement_each(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also a first acquisition of a name, and a try that finds it held on PostgreSQL."""
        client, other = connect(url), connect(url)
        client.lock("first").acquire().release()
        other.ping()

        with counted(monkeypatch) as statements:
            lease = client.lock("x").acquire()
            assert len(statements) == 1
            lease.release()
            assert len(statements) == 2
            lease = client.lock("x").acquire()
            assert len(statements) == 3
            assert busy(other.lock("x"))
            assert len(statements) == (4 if url.startswith("postgresql") else 5)
        lease.release()

    def test_waiter_asks_one_thing_each_time(self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once it has found the lock held."""
        backend: Any = connect(url)._engine.client.ready()
        request = Request("x", "a" * 32, 600.0, "{}", queue=True, runtime=backend._runtime)
        with connect(url).lock("x", ttl=600, timeout=PATIENCE):
            assert isinstance(drive(backend.try_acquire(request)), Busy)
            with counted(monkeypatch) as statements:
                assert isinstance(drive(backend.try_acquire(request)), Busy)
            assert len(statements) == 1
            drive(backend.abandon(request))

    def test_thousand_leases_are_renewed_by_one_statement(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Per batch; and each has its own outcome."""
        client, look = connect(url), Look(url)
        client.lock("x").acquire().release()
        grants = [Grant(f"lock {index}", f"owner {index}", index + 1, 600.0) for index in range(1000)]
        rows = ", ".join(f"('{grant.name}', '{grant.owner}', {grant.token}, {now_us() + HOUR_US})" for grant in grants)
        look.run(f"INSERT INTO lockkit_locks (name, owner, token, expires_at_us) VALUES {rows}")  # noqa: S608 - ours
        backend: Any = client._engine.client.backend
        client.break_lock("lock 7")

        with counted(monkeypatch) as statements:
            outcomes = drive(backend.renew(grants))

        assert len([text for text in statements if text.startswith("UPDATE")]) == 1
        assert len(statements) <= 3
        assert [index for index, outcome in enumerate(outcomes) if outcome != Renewed()] == [7]
        ends = look.run("SELECT min(expires_at_us), max(expires_at_us) FROM lockkit_locks WHERE owner IS NOT NULL")
        assert all(now_us() + 400_000_000 < end < now_us() + 700_000_000 for end in ends[0])

    def test_release_that_nobody_waits_for_tells_nobody(self, postgresql_url: str, connect: Connect) -> None:
        """NOTIFY serialises the commits of all who use it; so it is sent to waiters only."""
        client, other = connect(postgresql_url), connect(postgresql_url)
        with psycopg.connect(postgresql_url, autocommit=True) as listener:
            listener.execute('LISTEN "lockkit_locks"')
            for _ in range(3):
                client.lock("x").acquire().release()
            lease = client.lock("x").acquire()
            assert busy(other.lock("x"))
            lease.release()
            assert list(listener.notifies(timeout=0.2)) == []


class TestTable:
    """How the table comes to be there."""

    def test_many_clients_make_it_at_once(self, url: str, connect: Connect) -> None:
        """All succeed, and exclude one another from the first acquisition on."""
        clients = [connect(url) for _ in range(8)]
        tokens: list[int] = []
        start = threading.Barrier(len(clients))

        def work(client: Client) -> None:
            start.wait(PATIENCE)
            with client.lock("x", timeout=PATIENCE) as lease:
                tokens.append(lease.token)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, clients))

        assert len(tokens) == 8
        assert tokens == sorted(set(tokens))

    def test_without_auto_create_it_says_what_to_do(self, url: str, connect: Connect) -> None:
        """And makes nothing."""
        client = connect(f"{url}?auto_create=0")

        with pytest.raises(lockkit.ConfigurationError, match=r"no such table.*lockkit migrate"):
            client.lock("x").acquire(timeout=PATIENCE)

    def test_table_of_another_name_is_another_lock(self, url: str, connect: Connect) -> None:
        """With the same name they exclude, with another they do not."""
        client, other = connect(f"{url}?table=Other_Locks"), connect(url)
        try:
            lease = client.lock("x").acquire()
            other.lock("x").acquire(timeout=PATIENCE).release()
            assert busy(connect(url, table="Other_Locks").lock("x"))
            lease.release()
        finally:
            quote = "`" if url.startswith("mariadb") else '"'
            Look(url).run(f"DROP TABLE {quote}Other_Locks{quote}")

    def test_table_in_a_schema(self, postgresql_url: str, connect: Connect) -> None:
        """Where it cannot be made the message names it; where it can, waiters are woken."""
        look = Look(postgresql_url)
        client, other = (connect(f"{postgresql_url}?table=tools.locks") for _ in range(2))
        with pytest.raises(lockkit.ConfigurationError, match=r"no table tools\.locks, and it cannot be made"):
            client.lock("x").acquire(timeout=PATIENCE)
        look.run("CREATE SCHEMA tools")
        try:
            lease = client.lock("x", ttl=600).acquire()
            assert look.row("x", "tools.locks")[0] == lease.owner
            waiter = beside(other.lock("x").acquire, PATIENCE)
            wait_until(lambda: None if waits(other, "x") else "nobody waits")
            lease.release()
            waiter.result(PATIENCE).release()
        finally:
            look.run("DROP SCHEMA tools CASCADE")

    def test_postgresql_stores_it_as_a_table_that_changes_all_the_time(self, postgresql_url: str) -> None:
        """However it is made: by lockkit, or by the application with its own tables."""
        look = Look(postgresql_url)
        options = "SELECT reloptions FROM pg_class WHERE relname = 'lockkit_locks'"
        metadata = sqlalchemy.MetaData()
        table = sql_table.lock_table(metadata)
        engine = sqlalchemy.create_engine(with_driver(postgresql_url, DRIVERS), poolclass=NullPool)

        metadata.create_all(engine)
        ((theirs,),) = look.run(options)
        table.drop(engine)
        with lockkit.connect(postgresql_url) as client, client.lock("x"):
            ((ours,),) = look.run(options)

        assert ours == theirs
        assert "fillfactor=50" in ours


def test_engine_whose_pool_is_used_up(url: str) -> None:
    """50 locks are taken and released while the application holds all five connections of its pool."""
    engine = sqlalchemy.create_engine(with_driver(url, DRIVERS), pool_size=5, max_overflow=0, pool_timeout=1)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(engine.connect())
        client = stack.enter_context(lockkit.from_client(engine))
        leases = [client.lock(f"lock {index}", ttl=600).acquire() for index in range(50)]
        for lease in leases:
            lease.release()
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT 1")).scalar() == 1
    engine.dispose()


def test_engine_of_a_database_in_memory_is_refused() -> None:
    """Another connection would not see the lock."""
    with pytest.raises(lockkit.ConfigurationError, match="in memory"):
        lockkit.from_client(sqlalchemy.create_engine("sqlite://"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///x.db?idle_ttl=59", "idle_ttl"),
        ("sqlite://host/x.db", "three or four slashes"),
        ("sqlite:///x.db?mode=row", r"no mode='row'.*mode=table"),
        ("sqlite:///x.db?mode=advisory", r"no mode='advisory'.*mode=table"),
        ("postgresql://h/db?mode=tabel", r"no mode='tabel' \(did you mean 'table'\?\)"),
        ("postgresql://h/db?table=a.b.c", "schema.name"),
        ("postgresql://h/db?table=x;drop", "schema.name"),
        # PostgreSQL would cut the name of the table beside it.
        (f"postgresql://h/db?mode=row&table={'x' * 57}", "at most 56"),
        ("mariadb://h/db?mode=row&keepalive=0.5", "keepalive"),
        ("postgresql://h/db?mode=advisory&keepalive=inf", "keepalive"),
        ("postgresql://h/a/b", "the name of a database"),
        ("postgresql://h/db?auto_creat=1", r"in mode=table \(did you mean 'auto_create'\?\)"),
        ("postgresql://h/db?unix_socket=/x", "unknown option 'unix_socket'"),
        ("postgresql://h/db?sslmod=require", r"did you mean 'sslmode'"),
        ("mariadb://h/db?sslmode=require", "unknown option 'sslmode'"),
        *[(f"mariadb://h/db?{tls}", "ssl") for tls in ("ssl=maybe", "ssl_ca=/nowhere/ca", "ssl_cert=/nowhere/c")],
        ("mariadb://h1,h2/db", "name one server"),
        ("mariadb://h/db?read_timeout=0", "above 0 seconds"),
        ("mysql+nosuch://h/db", "connects by PyMySQL, and knows no driver nosuch: leave it out"),
        ("postgresql://u:hunter2@h1,v:hunter3@h2/db", "the same user and password"),
    ],
)
def test_url_that_is_wrong(url: str, message: str) -> None:
    """Refused when it is given, without a connection, and without its password."""
    with pytest.raises(lockkit.ConfigurationError, match=message) as caught:
        lockkit.connect(url)
    assert "hunter" not in str(caught.value)
