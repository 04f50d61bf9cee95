"""Deadlocks and serialization failures that lockkit's own statements are the victims of: they are run again inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import NullPool, text

import lockkit
from lockkit.backends.sql import database, dialect
from lockkit.backends.sql.connection import Connection, Parameter, Result, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql_session import session as sqlsession_session
from lockkit.backends.sql_session.session import Session
from lockkit.runtime import drive
from lockkit.sync import Client, Lease
from lockkit_tools.servers import PostgresServer, require, wait_until
from tests.backends.sql_session.support import ModeServer
from tests.backends.sql_table.support import DRIVERS, Look, with_driver
from tests.tries import beside

LONG = 600.0
PATIENCE = 60.0
STEPS = [("table", "acquire"), ("table", "extend"), ("table", "release"), ("row", "acquire"), ("advisory", "acquire")]
"""What writes to a table of lockkit's, by mode."""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """It looks for deadlocks soon after a wait begins."""
    require("postgresql", local=True)
    with PostgresServer(settings={"deadlock_timeout": "100ms"}) as server:
        yield server


@dataclass
class Place(ModeServer):
    """A server with one mode's lock ``x`` on it, which was used before; `said` of errors: SQLSTATE, or a number."""

    said: list[str | int]

    def client(self) -> Client:
        """Make a client whose statements may wait for long, so that a slow test does not end them."""
        limits: dict[str, Any] = {} if self.is_postgresql else {"read_timeout": PATIENCE}
        client = lockkit.connect(self.url, **limits)
        client.lock("x", ttl=LONG).acquire(PATIENCE).release()
        self.said.clear()  # that there was no table
        return client

    def step(self, client: Client, name: str) -> tuple[Lease, Callable[[], Any]]:
        """Prepare for a step; give the last lease, and what does it."""
        lock = client.lock("x", ttl=LONG)
        lease = lock.acquire(PATIENCE)
        if name == "acquire":
            lease.release()
            return lease, lambda: lock.acquire(PATIENCE)
        return lease, getattr(lease, name)

    def run(self, *statements: str) -> None:
        """Run statements of an administrator's."""
        for statement in statements:
            Look(self.server.url).run(statement)

    @contextmanager
    def others(self) -> Iterator[SqlConnection]:
        """Give a connection of somebody else's. PostgreSQL looks for no deadlock on its behalf."""
        engine = sqlalchemy.create_engine(with_driver(self.server.url, DRIVERS), poolclass=NullPool)
        with engine.connect() as connection:
            if self.is_postgresql:
                connection.execute(text("SET deadlock_timeout = '1h'"))
                connection.commit()
            yield connection

    def until_waiting(self, count: int) -> None:
        """Return when so many sessions wait for a row."""
        # Others, such as autovacuum's, wait for locks of other types.
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple')"
        if not self.is_postgresql:
            waiting = (
                "SELECT variable_value FROM information_schema.global_status"
                " WHERE variable_name = 'Innodb_row_lock_current_waits'"
            )
        look = Look(self.server.url)

        def ask() -> str | None:
            ((found,),) = look.run(waiting)
            return None if int(found) == count else f"{found} wait"

        wait_until(ask)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """Take down what databases say, and have lockkit wait for them for longer than it does."""
    heard: list[str | int] = []
    run, answer = Database._run_on, Session.answer

    async def listening(
        self: Database, connection: Connection, statement: Statement, parameters: Sequence[Parameter], until: float
    ) -> Result:
        with hearing(heard):
            return await run(self, connection, statement, parameters, until)

    async def listening_too(self: Session) -> Result:
        with hearing(heard):
            return await answer(self)

    monkeypatch.setattr(Database, "_run_on", listening)
    monkeypatch.setattr(Session, "answer", listening_too)
    monkeypatch.setattr(Session, "_seconds", lambda _: PATIENCE)
    for module in (dialect, database, sqlsession_session):
        monkeypatch.setattr(module, "STATEMENT_SECONDS", PATIENCE)
    monkeypatch.setattr(dialect, "LOCK_SECONDS", PATIENCE)
    short = dialect._MYSQL_SETTINGS.text
    waits = short.replace("wait_timeout = 1,", f"wait_timeout = {PATIENCE:.0f},")
    assert waits.count(f"= {PATIENCE:.0f},") == 2
    monkeypatch.setattr(dialect, "_MYSQL_SETTINGS", Statement(waits))
    monkeypatch.setattr(database, "seconds_left", lambda *_: PATIENCE)
    return heard


@contextmanager
def hearing(heard: list[str | int]) -> Iterator[None]:
    """Take down the code of a database's error, and pass it on."""
    try:
        yield
    except psycopg.Error as error:
        heard.append(str(error.sqlstate))
        raise
    except Exception as error:
        heard.append(error.args[0])  # PyMySQL
        raise


@contextmanager
def audited(place: Place) -> Iterator[None]:
    """Have each change of a row of lockkit's change two rows of an application's, one after the other."""
    drop = [f"DROP TRIGGER {name}" for name in ("audit_insert", "audit_update")]
    count = "UPDATE audit SET seen = seen + 1 WHERE n = {}"
    place.run(
        "CREATE TABLE audit (n int PRIMARY KEY, seen int NOT NULL)",
        "INSERT INTO audit VALUES (1, 0), (2, 0)",
        "CREATE TABLE weight (n int)",
    )
    if place.is_postgresql:
        drop = ["DROP FUNCTION audited CASCADE"]
        body = f"BEGIN {count.format(1)}; {count.format(2)}; RETURN NEW; END"
        place.run(
            f"CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql AS '{body}'",
            f"CREATE TRIGGER audit AFTER INSERT OR UPDATE ON {place.leases} FOR EACH ROW EXECUTE FUNCTION audited()",
        )
    else:
        for event in ("insert", "update"):
            body = f"BEGIN {count.format(1)}; {count.format(2)}; END"
            place.run(f"CREATE TRIGGER audit_{event} AFTER {event} ON {place.leases} FOR EACH ROW {body}")
    try:
        yield
    finally:
        place.run(*drop, "DROP TABLE audit", "DROP TABLE weight")


@pytest.mark.parametrize(("mode", "step"), STEPS)
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_deadlock_that_the_database_ends_at_our_cost(
    kind: str, mode: str, step: str, request: pytest.FixtureRequest, said: list[str | int]
) -> None:
    """
    Whoever else was in it goes on undisturbed, and ours is run again when it can be.

    ::

        B  locks row 1 of the application's
        A  locks row 2 of the application's
        we change our row, and wait for row 1
        A  waits for our row
        B  ends
        we get row 1, and wait for row 2: the circle is closed by us, and A has more to lose
    """
    place = Place(request.getfixturevalue(kind), mode, said)
    row = "SELECT 1 FROM {} WHERE {} FOR UPDATE".format
    with ExitStack() as stack:
        client = stack.enter_context(place.client())
        lease, act = place.step(client, step)
        stack.enter_context(audited(place))
        first, other = stack.enter_context(place.others()), stack.enter_context(place.others())
        first.execute(text(row("audit", "n = 1")))
        other.execute(text("INSERT INTO weight VALUES (:n)"), [{"n": n} for n in range(200)])
        other.execute(text(row("audit", "n = 2")))

        ours = beside(act)
        place.until_waiting(1)
        theirs = beside(lambda: other.execute(text(row(place.leases, "name = 'x'"))).all())
        place.until_waiting(2)
        first.rollback()
        assert [tuple(each) for each in theirs.result(PATIENCE)] == [(1,)]
        assert not ours.done()
        other.commit()
        outcome = ours.result(PATIENCE)

        # More than once, if ours had its row again before A was woken.
        assert set(said) == {"40P01" if place.is_postgresql else 1213}
        held = [(holder.owner, holder.token) for holder in client.holders("x")]
        if step == "release":
            assert held == []
        else:
            now = lease if step == "extend" else outcome
            assert held == [(now.owner, now.token)]
            assert now is lease or now.token > lease.token


@pytest.mark.parametrize(("mode", "step"), STEPS)
def test_serialization_failure_of_ours(mode: str, step: str, postgresql: PostgresServer, said: list[str | int]) -> None:
    """
    As behind a pooler, where lockkit sets nothing for a session, with a strict default of the database's.

    Somebody else's change of our row commits while we wait for it.
    """
    place = Place(postgresql, mode, said)
    with ExitStack() as stack:
        client = stack.enter_context(place.client())
        _, act = place.step(client, step)
        backend: Any = client._engine.client.backend
        sessions = backend._sessions._idle if mode != "table" else []
        for connection in (*backend.database._idle, *(session.connection for session in sessions)):
            drive(connection.run(Statement("SET default_transaction_isolation = 'serializable'")))
        other = stack.enter_context(place.others())
        other.execute(text(f"UPDATE {place.leases} SET token = token + 1000000000 WHERE name = 'x'"))  # noqa: S608 - ours
        (token,) = other.execute(text(f"SELECT token FROM {place.leases} WHERE name = 'x'")).scalars()  # noqa: S608

        ours = beside(act)
        place.until_waiting(1)
        other.commit()

        lease = ours.result(PATIENCE)
        assert said == ["40001"]
        assert step != "acquire" or lease.token > token
