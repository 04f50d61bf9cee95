"""Locks inside an application's transaction keep others out until it ends: on real databases, on both faces."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import lockkit
from lockkit import optimistic, sql
from lockkit.sql import TransactionLock, create_tables, ddl, lock_in
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.forked import all_done
from tests.storage.sql import support
from tests.storage.sql.support import Base
from tests.tries import beside, until

KINDS = ["postgresql", "mariadb", "sqlite"]
SERVERS = ["postgresql", "mariadb"]
SHORT = 0.2

WAITERS = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
    "mariadb": "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'",
}
"""How many statements wait for a row."""

LIMITS = {
    "postgresql": "SHOW lock_timeout",
    "mariadb": "SELECT @@innodb_lock_wait_timeout",
    "sqlite": "PRAGMA busy_timeout",
}
"""For how long a session waits for a lock."""


def is_waited(server: Base) -> bool:
    """Tell whether a statement waits for another transaction."""
    return int(server.rows(WAITERS[server.kind])[0][-1]) > 0


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Base:
    """Each kind in turn."""
    return bases[request.param]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Base:
    """Each kind that has a server and locks rows."""
    return bases[request.param]


@pytest.fixture
def engine(base: Base) -> Iterator[sa.Engine]:
    """An engine of the application's."""
    with base.engine() as made:
        yield made


def taken(engine: sa.Engine, name: str, timeout: float | None = 0) -> bool:
    """Whether a lock is held, seen from another transaction."""
    with engine.connect() as connection:
        try:
            lock_in(connection, name, timeout=timeout)
        except lockkit.LockTimeout:
            return True
        return False


@pytest.mark.parametrize("ending", ["commit", "rollback", "close"])
def test_lock_lasts_until_the_transaction_ends(engine: sa.Engine, ending: str) -> None:
    """However it ends; and the object says what was locked."""
    with engine.connect() as connection:
        lock = lock_in(connection, "seat:12A")
        assert (lock.name, type(lock.token), len(lock.owner)) == ("seat:12A", int, 32)
        assert taken(engine, "seat:12A")

        getattr(connection, ending)()

        assert not taken(engine, "seat:12A")


def test_other_names_are_free_unless_the_database_has_one_writer(base: Base, engine: sa.Engine) -> None:
    """Names are compared as bytes; SQLite locks out all writers, as documented."""
    with engine.begin() as connection:
        lock_in(connection, "é")

        for other in ("É", "e", "é ", "e\u0301", "%C3%A9", "a/b"):
            assert taken(engine, other) is (base.kind == "sqlite")
        assert taken(engine, "é")


def test_sessions_and_connections_of_both_faces(base: Base, engine: sa.Engine) -> None:
    """All are the same lock."""
    with Session(engine) as session, session.begin():
        assert isinstance(lock_in(session, "x"), TransactionLock)
        assert taken(engine, "x")
    shared = scoped_session(sessionmaker(engine))
    assert lock_in(shared, "x").token > 0
    shared.remove()

    async def main(aio: Any) -> tuple[int, int]:  # noqa: ANN401 - an AsyncEngine
        async with AsyncSession(aio) as session, session.begin():
            first = await lock_in(session, "x")
            async with aio.connect() as other:
                with pytest.raises(lockkit.LockTimeout, match=r"'x' at .* stayed busy for 0\.2 s"):
                    await lock_in(other, "x", timeout=SHORT)
        async with aio.begin() as connection:
            return first.token, (await lock_in(connection, "x")).token

    first, second = base.aio(main)
    assert first < second


def test_timeout_leaves_the_transaction_as_it_was(engine: sa.Engine, base: Base) -> None:
    """What it has done before stays, and it can go on; the limit on waiting that it had is back."""
    base.rows("CREATE TABLE IF NOT EXISTS notes (text VARCHAR(20))")
    base.rows("DELETE FROM notes")

    def asked(connection: sa.Connection) -> Any:  # noqa: ANN401 - a number or text
        return connection.execute(sa.text(LIMITS[base.kind])).scalar_one()

    with engine.connect() as holder, engine.connect() as waiter:
        before = asked(waiter)
        waiter.rollback()
        lock_in(holder, "x")
        if base.kind != "sqlite":
            waiter.execute(sa.text("INSERT INTO notes VALUES ('kept')"))
        for timeout in (0, SHORT, 1.2):
            started = time.monotonic()
            with pytest.raises(lockkit.LockTimeout, match="stayed busy") as caught:
                lock_in(waiter, "x", timeout=timeout)
            assert time.monotonic() - started >= timeout * 0.9
            assert caught.value.name == "x"
            assert base.kind in str(caught.value.backend)
        assert asked(waiter) == before

        holder.commit()
        assert lock_in(waiter, "x", timeout=10).token > 0
        if base.kind == "sqlite":
            waiter.execute(sa.text("INSERT INTO notes VALUES ('kept')"))
        waiter.commit()
    assert base.rows("SELECT text FROM notes") == [("kept",)]


def test_first_use_in_a_process_does_not_wait_at_serializable(server: Base) -> None:
    """InnoDB reads with a shared lock then, and would wait for the holder beside the transaction, however long."""
    with server.engine(isolation_level="SERIALIZABLE") as engine, engine.begin() as connection:
        lock_in(connection, "x")
        with server.engine(isolation_level="SERIALIZABLE") as fresh, fresh.connect() as other:
            if server.kind == "mariadb":
                sa.event.listen(
                    fresh, "connect", lambda dbapi, _: dbapi.cursor().execute("SET innodb_lock_wait_timeout = 1")
                )
            with pytest.raises(lockkit.LockTimeout, match=r"'x' at .* stayed busy for 0 s"):
                lock_in(other, "x", timeout=0)


@pytest.mark.parametrize("timeout", [None, support.PATIENCE])
def test_waiter_is_let_in_by_the_end_of_the_holder(engine: sa.Engine, timeout: float | None) -> None:
    """With and without a limit."""
    with engine.connect() as holder:
        first = lock_in(holder, "x")

        def wait() -> int:
            with engine.begin() as connection:
                return lock_in(connection, "x", timeout=timeout).token

        waiting = beside(wait)
        time.sleep(0.3)
        assert not waiting.done()
        holder.rollback()
        assert waiting.result(support.PATIENCE) > first.token


def test_same_transaction_keeps_its_token(engine: sa.Engine) -> None:
    """Another call is granted at once; the next transaction has a new one, on the same connection too."""
    with engine.connect() as connection:
        first = lock_in(connection, "x")
        assert lock_in(connection, "x", timeout=0) == first
        assert lock_in(connection, "x", timeout=1) == first
        connection.commit()

        assert lock_in(connection, "x").token > first.token


def test_rollback_to_a_savepoint_ends_what_was_locked_since(base: Base, engine: sa.Engine) -> None:
    """On PostgreSQL at once; InnoDB and SQLite keep it. Locked again, it has a higher token."""
    with engine.begin() as connection:
        outer = lock_in(connection, "outer")
        savepoint = connection.begin_nested()
        inner = lock_in(connection, "inner")
        assert lock_in(connection, "outer") == outer
        savepoint.rollback()

        assert taken(engine, "inner") is (base.kind != "postgresql")
        assert taken(engine, "outer")
        assert lock_in(connection, "inner").token > inner.token
        assert taken(engine, "inner")


def test_lock_outlives_a_savepoint_that_begins_after_it(engine: sa.Engine) -> None:
    """On SQLite the lock makes the driver send BEGIN; one that is taken in the first savepoint ends with it."""
    with engine.begin() as connection:
        lock_in(connection, "x")
        with connection.begin_nested():
            pass
        assert taken(engine, "x", SHORT)


def test_autocommit_is_refused(base: Base) -> None:
    """A lock would end with its own statement; nothing is locked."""
    with (
        base.engine(isolation_level="AUTOCOMMIT") as engine,
        engine.connect() as connection,
        pytest.raises(lockkit.ConfigurationError, match="is in autocommit"),
    ):
        lock_in(connection, "x")
    with base.engine() as engine, engine.connect() as connection:
        chosen = connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(lockkit.ConfigurationError, match="is in autocommit"):
            lock_in(chosen, "x")


def test_sqlite_with_begin_sent_by_the_application(bases: dict[str, Base]) -> None:
    """SQLAlchemy's recipe: the driver in autocommit, BEGIN by an event. Then a lock outlives its savepoint, too."""
    with bases["sqlite"].engine() as engine:

        def connected(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver's
            connection.isolation_level = None

        def begun(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        sa.event.listen(engine, "connect", connected)
        sa.event.listen(engine, "begin", begun)
        with engine.begin() as connection:
            with connection.begin_nested():
                lock_in(connection, "x")
            assert taken(engine, "x", SHORT)
        assert not taken(engine, "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "must not be empty"),
        ({"name": "a\0b"}, "NUL"),
        ({"name": None}, "must be a str"),
        ({"timeout": -1}, "timeout must be 0 or more seconds, not -1"),
        ({"timeout": "1"}, "timeout must be seconds"),
        ({"timeout": float("inf")}, "timeout must be"),
        ({"table": "a.b.c"}, r"table='a\.b\.c' is not understood"),
        ({"table": 'a"; DROP TABLE x; --'}, "is not understood"),
        ({"table": None}, "table=None"),
    ],
)
def test_bad_input_is_named_and_nothing_is_sent(
    bases: dict[str, Base], arguments: dict[str, Any], message: str
) -> None:
    """Before any statement."""
    with bases["sqlite"].engine() as engine, engine.connect() as connection:
        sent: list[str] = []
        sa.event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        with pytest.raises(lockkit.ConfigurationError, match=message):
            lock_in(connection, **{"name": "x", **arguments})
        assert sent == []


def test_what_has_no_transaction_is_refused(bases: dict[str, Base]) -> None:
    """An engine, a client of something else, a session of several databases."""
    with bases["sqlite"].engine() as engine:
        wrong: Any = engine
        with pytest.raises(lockkit.ConfigurationError, match=r"not Engine: it has no transaction; use .with engine"):
            lock_in(wrong, "x")
    wrong = "sqlite://"
    with pytest.raises(lockkit.ConfigurationError, match="give a SQLAlchemy Session, Connection"):
        lock_in(wrong, "x")
    with pytest.raises(lockkit.ConfigurationError, match="several databases or none"):
        lock_in(Session(), "x")


def test_other_databases_are_unsupported() -> None:
    """Said before anything is sent."""
    with pytest.raises(lockkit.Unsupported, match="PostgreSQL, MariaDB, MySQL and SQLite, not oracle"):
        ddl("oracle")


def test_transaction_that_failed_before_must_be_rolled_back(bases: dict[str, Base]) -> None:
    """PostgreSQL answers nothing in it."""
    with bases["postgresql"].engine() as engine, engine.connect() as connection:
        with pytest.raises(exc.DBAPIError):
            connection.execute(sa.text("SELECT nothing"))
        with pytest.raises(lockkit.ConfigurationError, match="after an earlier error: roll it back first"):
            lock_in(connection, "x")


@pytest.mark.parametrize(
    ("kind", "isolation"),
    [
        *((kind, level) for kind in SERVERS for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
        ("sqlite", ""),
    ],
)
def test_eight_processes_lose_no_update_and_tokens_follow_grants(
    bases: dict[str, Base],
    kind: str,
    isolation: str,
    tmp_path: Any,  # noqa: ANN401 - a Path
) -> None:
    """A name that is new, with commits and rollbacks, at every isolation level."""
    base = bases[kind]
    base.rows("DROP TABLE IF EXISTS numbers")
    base.rows("CREATE TABLE numbers (value INTEGER)")
    base.rows("INSERT INTO numbers VALUES (0)")
    base.rows(f"DROP TABLE IF EXISTS {sql.TABLE}")
    journal = tmp_path / "tokens"

    kept = all_done([support.start("work", base.url, journal, 8, isolation) for _ in range(8)])

    tokens = [int(line) for line in journal.read_text().split()]
    assert len(tokens) == 8 * 8
    assert tokens == sorted(set(tokens))
    assert base.rows("SELECT value FROM numbers") == [(sum(map(int, kept)),)]


@pytest.mark.parametrize("timeout", [None, 5])
def test_snapshot_from_before_the_last_holder_is_refused(server: Base, timeout: float | None) -> None:
    """At REPEATABLE READ a transaction that read too early would never see what the last holder wrote."""
    with server.engine(isolation_level="REPEATABLE READ") as engine, engine.connect() as early:
        with engine.begin() as connection:
            lock_in(connection, "x")
        early.execute(sa.text("SELECT 1 FROM lockkit_tx")).all()
        with engine.begin() as connection:
            lock_in(connection, "x")

        with pytest.raises(lockkit.LockTimeout, match=r"before the last holder of 'x' committed: roll back and run it"):
            lock_in(early, "x", timeout=timeout)
        early.rollback()

        assert lock_in(early, "x", timeout=timeout).token > 0


@pytest.mark.parametrize("timeout", [None, support.PATIENCE])
def test_victim_of_a_deadlock_is_not_tried_again_inside(server: Base, timeout: float | None) -> None:
    """
    What the application did before is undone, so neither a second try of ours nor of its own may take the lock.

    The other one has more to lose (InnoDB), or does not look for deadlocks (PostgreSQL): the database ends ours.
    With a timeout, PostgreSQL keeps the first lock of the victim until it is rolled back: it waited under a savepoint.
    """
    server.rows("DROP TABLE IF EXISTS work")
    server.rows("CREATE TABLE work (n INTEGER)")
    insert = sa.text("INSERT INTO work VALUES (:n)")
    with server.engine() as engine, engine.connect() as ours, engine.connect() as theirs:
        if server.kind == "postgresql":
            theirs.execute(sa.text("SET LOCAL deadlock_timeout = '1h'"))
        theirs.execute(insert, [{"n": n} for n in range(200)])
        lock_in(theirs, "b")
        ours.execute(insert, {"n": 1000})
        lock_in(ours, "a")
        other = beside(lock_in, theirs, "a")
        until(lambda: is_waited(server))
        sent: list[str] = []
        sa.event.listen(ours, "before_cursor_execute", lambda *given: sent.append(given[2]))

        with pytest.raises(
            lockkit.LockTimeout, match=r"a deadlock at .* Roll back and run the .* take locks in the same order"
        ) as caught:
            lock_in(ours, "b", timeout=timeout)

        code = {"postgresql": "40P01", "mariadb": 1213}[server.kind]
        cause: Any = caught.value.__cause__
        assert code in {getattr(cause.orig, "sqlstate", None), cause.orig.args[0]}
        waited = [statement for statement in sent if "FOR UPDATE" in statement or "ON CONFLICT" in statement]
        assert len(waited) == (1 if timeout is None else 2)
        for _ in range(2):
            with pytest.raises(lockkit.ConfigurationError, match="after an earlier error: roll it back first"):
                lock_in(ours, "c")
        ours.rollback()
        assert isinstance(other.result(support.PATIENCE), TransactionLock)
        theirs.commit()
        assert lock_in(ours, "b").token > 0
        ours.commit()
    assert server.rows("SELECT count(*) FROM work WHERE n = 1000") == [(0,)]


def test_stopped_holder_is_ended_by_the_server_if_it_was_told_to(server: Base) -> None:
    """A transaction has no ttl; the database's own limit on idle ones is what ends it."""
    limits = {
        "postgresql": ("ALTER ROLE postgres SET idle_in_transaction_session_timeout = {}", "'2s'", "DEFAULT"),
        "mariadb": ("SET GLOBAL idle_transaction_timeout = {}", "2", "0"),
    }
    statement, limit, none = limits[server.kind]
    server.rows(statement.format(limit))
    process = support.start("hold", server.url, "x")
    try:
        token = int(process.line())
        process.send_signal(signal.SIGSTOP)

        with server.engine() as engine, engine.begin() as connection:
            assert lock_in(connection, "x", timeout=support.PATIENCE).token > token
    finally:
        process.close()
        server.rows(statement.format(none))


@pytest.mark.parametrize("victim", ["holder", "waiter"])
def test_connection_ended_by_the_server(server: Base, victim: str) -> None:
    """The holder's: the lock is free. The waiter's: it gets an error, and its session can be used again."""
    ended = {"postgresql": "SELECT pg_terminate_backend({})", "mariadb": "KILL {}"}[server.kind]
    asked = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}[server.kind]
    with server.engine() as engine, engine.connect() as holder, engine.connect() as waiter:
        pids = {
            name: connection.execute(sa.text(asked)).scalar_one()
            for name, connection in (("holder", holder), ("waiter", waiter))
        }
        waiter.rollback()
        lock_in(holder, "x")
        waiting = beside(lock_in, waiter, "x")
        until(lambda: is_waited(server))
        with engine.connect() as admin:
            admin.execute(sa.text(ended.format(pids[victim])))

        if victim == "holder":
            assert isinstance(waiting.result(support.PATIENCE), TransactionLock)
            with pytest.raises(lockkit.BackendUnavailable, match="was lost, and the transaction with it"):
                lock_in(holder, "y")
            with pytest.raises(lockkit.ConfigurationError, match="was lost: roll its transaction back first"):
                lock_in(holder, "y")
        else:
            assert isinstance(waiting.exception(support.PATIENCE), lockkit.BackendUnavailable)
            waiter.rollback()
            holder.rollback()
            assert lock_in(waiter, "x").token > 0


def test_cancelled_waiter_leaves_nothing(base: Base) -> None:
    """Its session is rolled back and goes on; the lock is granted to the next one."""

    async def main(aio: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        async with aio.connect() as holder, AsyncSession(aio) as session:
            await lock_in(holder, "x")
            waiter = asyncio.ensure_future(lock_in(session, "x", timeout=30))
            await asyncio.sleep(0.3)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            await holder.rollback()
            async with aio.begin() as next_one:
                assert (await lock_in(next_one, "x", timeout=30)).token > 0
            await session.rollback()
            assert (await lock_in(session, "x", timeout=30)).token > 0

    base.aio(main)


def test_full_pool_is_no_deadlock(server: Base) -> None:
    """What is made beside a transaction does not wait for the pool; a session without a connection says why."""
    with server.engine(pool_size=1, max_overflow=0, pool_timeout=0.2) as engine, engine.begin() as connection:
        lock_in(connection, "never used before", table="lockkit_tx_pool")
        with (
            Session(engine) as session,
            pytest.raises(lockkit.BackendUnavailable, match="is exhausted: each open transaction uses one connection"),
        ):
            lock_in(session, "x")
    server.rows("DROP TABLE lockkit_tx_pool")


@pytest.mark.parametrize("made", [1, 2])
def test_tables_that_another_process_is_still_making(server: Base, made: int) -> None:
    """What is looked for is made last: on MariaDB each statement commits, and others see what is there so far."""
    server.rows("DROP TABLE IF EXISTS lockkit_tx")
    server.rows(f"DROP {'SEQUENCE' if server.kind == 'postgresql' else 'TABLE'} IF EXISTS lockkit_tx_token")
    for statement in ddl(server.kind, fences=None)[:made]:
        server.rows(statement)

    with server.engine() as engine, engine.begin() as connection:
        assert lock_in(connection, "x").token > 0


def test_transaction_older_than_the_table_is_told_to_start_again(server: Base) -> None:
    """Its snapshot has no such table: MariaDB refuses to read it, PostgreSQL does not mind."""
    server.rows("DROP TABLE IF EXISTS numbers")
    server.rows("CREATE TABLE numbers (value INTEGER)")
    server.rows("DROP TABLE IF EXISTS lockkit_tx")
    with server.engine(isolation_level="REPEATABLE READ") as engine, engine.connect() as early:
        early.execute(sa.text("SELECT value FROM numbers")).all()
        if server.kind == "mariadb":
            with pytest.raises(lockkit.LockTimeout, match=r"as it was before .*: roll back and run it again"):
                lock_in(early, "x")
            early.rollback()

        assert lock_in(early, "x").token > 0


def test_tables_are_made_by_several_at_once(server: Base) -> None:
    """Ten engines find none, and all are let in one after the other."""

    def use(engine: sa.Engine) -> None:
        with engine.begin() as connection:
            lock_in(connection, "x", table="lockkit_tx_race")

    with ExitStack() as stack:
        # Made by one thread: SQLAlchemy imports the dialect, which several at once do not survive.
        engines = [stack.enter_context(server.engine()) for _ in range(10)]
        for used in [beside(use, engine) for engine in engines]:
            used.result(support.PATIENCE)
    server.rows("DROP TABLE lockkit_tx_race")


def test_missing_table_is_named_if_it_is_not_to_be_made(base: Base, engine: sa.Engine) -> None:
    """And `create_tables` makes it, with an engine or a connection of either face."""
    with engine.connect() as connection, pytest.raises(lockkit.ConfigurationError, match=r"create_tables\(engine\)"):
        lock_in(connection, "x", table="lockkit_tx_own", auto_create=False)

    create_tables(engine, locks="lockkit_tx_own", fences=None)
    with engine.begin() as connection:
        assert lock_in(connection, "x", table="lockkit_tx_own", auto_create=False).token > 0
        create_tables(connection, locks=None, fences="lockkit_fences_own")

    async def main(aio: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        await create_tables(aio)
        async with aio.begin() as connection:
            assert isinstance(connection, AsyncConnection)
            await create_tables(connection, locks="lockkit_tx_own")

    base.aio(main)
    wrong: Any = "sqlite://"
    with pytest.raises(lockkit.ConfigurationError, match="target must be a SQLAlchemy engine or connection, not str"):
        create_tables(wrong)
    for table in ("lockkit_tx_own", "lockkit_fences_own"):
        base.rows(f"DROP TABLE {table}")


def test_schema_of_its_own(bases: dict[str, Base]) -> None:
    """As ``schema.table``."""
    base = bases["postgresql"]
    base.rows("CREATE SCHEMA IF NOT EXISTS other")
    with base.engine() as engine, engine.begin() as connection:
        lock_in(connection, "in a schema", table="other.locks")
    assert base.rows("SELECT name FROM other.locks") == [("in a schema",)]


def test_missing_right_and_read_only_are_configuration_errors(bases: dict[str, Base]) -> None:
    """The message says what is missing."""
    base = bases["postgresql"]
    base.rows("DROP ROLE IF EXISTS reader")
    base.rows("CREATE ROLE reader LOGIN")
    with base.engine() as engine:
        create_tables(engine, locks="lockkit_tx_rights", fences=None)
    reader = Base(base.kind, base.place.replace("postgres@", "reader@"))
    with (
        reader.engine() as engine,
        engine.connect() as connection,
        pytest.raises(lockkit.ConfigurationError, match="denies this user a right: SELECT, INSERT, UPDATE and DELETE"),
    ):
        lock_in(connection, "x", table="lockkit_tx_rights")
    base.rows("GRANT SELECT, INSERT, UPDATE ON lockkit_tx_rights TO reader")
    with reader.engine() as engine, engine.connect() as connection:
        with pytest.raises(lockkit.ConfigurationError, match=r"also UPDATE on the sequence .* lockkit_tx_rights_token"):
            lock_in(connection, "x", table="lockkit_tx_rights")
        connection.rollback()
        base.rows("GRANT UPDATE ON SEQUENCE lockkit_tx_rights_token TO reader")
        assert lock_in(connection, "x", table="lockkit_tx_rights").token > 0
    with base.engine() as engine, engine.connect() as connection:
        connection.execute(sa.text("SET TRANSACTION READ ONLY"))
        with pytest.raises(lockkit.ConfigurationError, match="read-only"):
            lock_in(connection, "x")
    base.rows("DROP TABLE lockkit_tx_rights")


def test_password_is_in_no_error(bases: dict[str, Base]) -> None:
    """Not in the message, not in its attributes."""
    base = bases["postgresql"]
    secret = Base(base.kind, base.place.replace("postgres@", "postgres:s3cret@"))
    with secret.engine() as engine, engine.begin() as holder, engine.connect() as waiter:
        lock_in(holder, "x")
        with pytest.raises(lockkit.LockTimeout) as caught:
            lock_in(waiter, "x", timeout=0)
    assert "s3cret" not in f"{caught.value} {caught.value.backend} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("postgresql", {"options": "-c lock_timeout=50ms"}, "own limit: roll back and run the transaction again"),
        ("postgresql", {"options": "-c statement_timeout=500ms"}, "roll back and run the .* raise statement_timeout"),
        ("mariadb", {"init_command": "SET max_statement_time=0.5"}, "roll back and run the .* or max_statement_time"),
    ],
)
def test_limit_of_the_connection_ends_a_transaction(
    bases: dict[str, Base], kind: str, arguments: dict[str, Any], message: str
) -> None:
    """The message says so, and `transact` runs the work again."""
    with bases[kind].engine(connect_args=arguments) as engine, engine.connect() as holder:
        lock_in(holder, "limited")
        with engine.connect() as waiter, pytest.raises(lockkit.LockTimeout, match=message):
            lock_in(waiter, "limited")
        tries: list[int] = []

        def work(connection: sa.Connection) -> int:
            tries.append(1)
            if len(tries) == 2:
                holder.rollback()
            return lock_in(connection, "limited").token

        assert optimistic.transact(engine, work)
        assert len(tries) == 2


@pytest.mark.parametrize("ending", ["deadlock", "removed"])
def test_connection_has_its_own_limit_again(bases: dict[str, Base], ending: str) -> None:
    """A wait with a timeout sets a limit of the session's, which the pool lends to others next."""
    base = bases["mariadb"]
    base.rows("DROP TABLE IF EXISTS work")
    base.rows("CREATE TABLE work (n INTEGER)")
    with base.engine(pool_size=1, max_overflow=0) as engine, base.engine() as another, another.connect() as holder:
        # It has more to lose, so InnoDB ends the other one.
        holder.execute(sa.text("INSERT INTO work VALUES (:n)"), [{"n": n} for n in range(200)])
        lock_in(holder, "x")
        with engine.connect() as waiter:
            lock_in(waiter, "y")
            waiting = beside(partial(lock_in, waiter, "x", timeout=support.PATIENCE))
            until(lambda: is_waited(base))
            if ending == "deadlock":
                lock_in(holder, "y")
            else:
                holder.execute(sa.text("DELETE FROM lockkit_tx WHERE name = CAST('x' AS BINARY)"))
                holder.commit()
            failed = waiting.exception(support.PATIENCE)
            holder.rollback()
            assert isinstance(failed, lockkit.LockTimeout)
            assert ("a deadlock" if ending == "deadlock" else "was removed meanwhile") in str(failed)
        with engine.connect() as connection:
            assert connection.execute(sa.text("SELECT @@innodb_lock_wait_timeout")).scalar_one() == 50


def test_tables_that_were_dropped_are_made_again(base: Base, engine: sa.Engine) -> None:
    """By the next transaction of a process that has used them: PostgreSQL has aborted the one that found out."""
    tokens = []
    for _ in range(2):
        with engine.connect() as connection:
            tokens.append(lock_in(connection, "x").token)
            connection.commit()
        base.rows("DROP TABLE lockkit_tx")
        if base.kind != "sqlite":
            with engine.connect() as connection, pytest.raises(lockkit.ConfigurationError, match="is missing"):
                lock_in(connection, "x")

    with engine.begin() as connection:
        tokens.append(lock_in(connection, "x").token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("kind", SERVERS)
def test_tokens_grow_over_a_crash_of_the_server(kind: str) -> None:
    """
    Also those that a transaction drew which never committed: a server may forget such numbers in a crash.

    PostgreSQL 15 does: without the first draw after a start raising them, the same number would come twice.
    """
    require(kind, local=True)
    made: PostgresServer | MariaServer = PostgresServer() if kind == "postgresql" else MariaServer()
    with made as running:
        base = Base(kind, running.url.partition("://")[2])
        with base.engine() as engine:
            tokens = []
            for _ in range(2):
                with engine.connect() as connection:
                    tokens += [lock_in(connection, f"x{number}").token for number in range(5)]
                    tokens.append(lock_in(connection, "x").token)
                    running.kill()
                    running.start()
                    connection.invalidate()
                engine.dispose()
            with engine.begin() as connection:
                tokens.append(lock_in(connection, "x").token)

    assert tokens == sorted(set(tokens))


def test_server_that_rolls_back_on_timeout_is_told() -> None:
    """MariaDB with innodb_rollback_on_timeout: what was done before is gone, so the transaction must not go on."""
    require("mariadb", local=True)
    with MariaServer(settings={"innodb-rollback-on-timeout": "1"}) as running:
        base = Base("mariadb", running.url.partition("://")[2])
        with base.engine() as engine, engine.connect() as holder, engine.connect() as waiter:
            lock_in(holder, "x")
            with pytest.raises(lockkit.LockTimeout, match="has rolled back this transaction"):
                lock_in(waiter, "x", timeout=0)


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("mariadb", "TRUNCATE TABLE lockkit_tx_token"),
        ("mariadb", "DROP TABLE lockkit_tx_token"),
        ("postgresql", "ALTER SEQUENCE lockkit_tx_token RESTART"),
    ],
)
def test_tokens_grow_on_when_their_source_is_emptied(bases: dict[str, Base], kind: str, statement: str) -> None:
    """Counted from 1 again, on a connection that the pool has kept: also for a holder that rolled back."""
    base = bases[kind]
    with base.engine(pool_size=1, max_overflow=0) as engine:
        with engine.begin() as connection:
            lock_in(connection, "emptied")
        with engine.connect() as connection:
            last = lock_in(connection, "emptied").token
            other = lock_in(connection, "never committed").token
            connection.rollback()
        base.rows(statement)
        if statement.startswith("DROP"):
            with base.engine() as another:
                create_tables(another)

        with engine.begin() as connection:
            after = [lock_in(connection, "never committed").token, lock_in(connection, "emptied").token]
        assert min(after) > max(last, other)
